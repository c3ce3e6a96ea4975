"""Messages of Dynamo framing: request header, response handshake and element envelope."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.runtime.request_plane import frame

PROLOGUE = frame.two_part(b'{"error":null}', b"")
SENTINEL = frame.two_part(b'"sentinel"', b"")
MANY_IN = "many_in"
"""Type of a request with a stream of frames."""
REQUEST_STREAM = "request"
"""Type of the connection that a worker opens for them."""
STOP = frame.two_part(b'"stop"', b"")
KILL = frame.two_part(b'"kill"', b"")

# Envelope of an item, split at the position of the value.
JSON_HEAD, JSON_TAIL = b'{"data":{"data":', b'},"complete_final":false}'
PACK_HEAD, PACK_TAIL = b"\x82\xa4data\x81\xa4data", b"\xaecomplete_final\xc2"
PACK_TOKENS, PACK_INDEX = b"\x82\xa9token_ids", b"\xa5index\x00"
PACK_FINAL, JSON_FINAL = b"\x81\xaecomplete_final\xc3", b'{"complete_final":true}'
ONE_TOKEN_HEAD = PACK_HEAD + PACK_TOKENS + b"\x91"
ONE_TOKEN_TAIL = PACK_INDEX + PACK_TAIL
EMPTY_FIELDS = (
    b"\xa6tokens\xc0\xa4text\xc0\xaboutput_type\xa4text\xadcum_log_probs\xc0\xa9log_probs\xc0\xactop_logprobs\xc0"
    b"\xadfinish_reason\xc0\xa5index\xc0"
)
"""Fields without a value that engines in Rust, such as the released mocker, send with each token."""
ONE_TOKEN_TAILS = {
    ONE_TOKEN_HEAD: ONE_TOKEN_TAIL,
    PACK_HEAD + b"\x89\xa9token_ids\x91": EMPTY_FIELDS + PACK_TAIL,
}
"""What follows the token in a message that begins so; all beginnings have one length."""

ONE_TOKEN_BYTES_MAX = 256
"""Bodies of one token are shorter, so that the size of the body is the last byte of its field."""
SHORT_HEAD = bytes(15)
"""Start of a two-part message without a header and with a body of less than 256 bytes, whose size is the next byte."""
SHORT_HEAD_BYTES = 24
PACKED_INT_BYTES = {0xCC: 2, 0xCD: 3, 0xCE: 5}
"""Size of a msgpack integer with its first byte."""


_known_messages: dict[bytes, int] = {}
"""Token of messages that were recognized before; a text consists mostly of a few thousand different ones."""
KNOWN_MESSAGES_MAX = 16_384


def leading_tokens(data: bytes, at: int = 0) -> tuple[list[int], int]:
    """Return the tokens of the messages of one token each that begin at `at`, and where these messages end.

    Such a message is most of what a worker sends, so it is recognized without being decoded.
    """
    tokens: list[int] = []
    size, known = len(data), _known_messages.get
    while at + SHORT_HEAD_BYTES < size:
        end = at + SHORT_HEAD_BYTES + data[at + 15]
        message = data[at:end]
        token = known(message)
        if token is None:
            token = _one_token(message)
            if token is None:
                break
            if len(_known_messages) >= KNOWN_MESSAGES_MAX:
                _known_messages.clear()
            _known_messages[message] = token
        tokens.append(token)
        at = end
    return tokens, at


def _one_token(message: bytes) -> int | None:
    """Return the token of a message that has one token and nothing else; None for any other."""
    if message[:15] != SHORT_HEAD or len(message) != SHORT_HEAD_BYTES + message[15]:
        return None
    start = SHORT_HEAD_BYTES + len(ONE_TOKEN_HEAD)
    tail = ONE_TOKEN_TAILS.get(message[SHORT_HEAD_BYTES:start])
    if tail is None or not message.endswith(tail):
        return None
    packed = message[start : len(message) - len(tail)]
    if len(packed) == 1 and packed[0] < 0x80:
        return packed[0]
    if packed and PACKED_INT_BYTES.get(packed[0]) == len(packed):
        return int.from_bytes(packed[1:], "big")
    return None


class ConnectionInfo(msgspec.Struct):
    """Address of the response connection; `info` is JSON text."""

    transport: str
    info: str


class StreamAddress(msgspec.Struct):
    """Content of `ConnectionInfo.info`."""

    address: str
    subject: str
    context: str = ""
    stream_type: str = "response"


class ControlHeader(msgspec.Struct, omit_defaults=True):
    """Header of a request's two-part message."""

    id: str
    request_type: str
    response_type: str
    connection_info: ConnectionInfo
    payload_codec: str = "json"
    metadata: dict[str, Any] | None = None
    request_stream_connection_info: ConnectionInfo | None = None
    """Address of the frames of a `many_in` request, whose body is empty."""


class WireHandshake(msgspec.Struct):
    """First message of a worker on the response connection."""

    subject: str
    stream_type: str = "response"


class Prologue(msgspec.Struct):
    """Second message of a worker: whether the request was accepted."""

    error: str | None = None


class WireAnnotated(msgspec.Struct):
    """One response element."""

    data: msgspec.Raw | UnsetType = UNSET
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None
    error: Any = None

    @property
    def says_nothing(self) -> bool:
        """Return True if all fields are unset: it may be a bare value instead of an annotated element."""
        return isinstance(self.data, UnsetType) and not (self.id or self.event or self.comment or self.error)


class WireEnvelope(msgspec.Struct):
    """One body of the response stream."""

    data: WireAnnotated | None = None
    complete_final: bool = False


class BareEnvelope(msgspec.Struct):
    """Body with a value without annotations."""

    data: msgspec.Raw


read_control = msgspec.json.Decoder(ControlHeader).decode
read_address = msgspec.json.Decoder(StreamAddress).decode
read_handshake = msgspec.json.Decoder(WireHandshake).decode
read_prologue = msgspec.json.Decoder(Prologue).decode
read_headers = msgspec.json.Decoder(dict[str, Any]).decode
read_json_envelope = msgspec.json.Decoder(WireEnvelope).decode
read_pack_envelope = msgspec.msgpack.Decoder(WireEnvelope).decode
read_bare_json = msgspec.json.Decoder(BareEnvelope).decode
read_bare_pack = msgspec.msgpack.Decoder(BareEnvelope).decode
