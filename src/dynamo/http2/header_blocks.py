"""Header blocks (HPACK, RFC 7541): requests are decoded with the library `hpack`, responses are written without a table. Pure.

A response of gRPC has few headers. Without a dynamic table its block is a constant, and no state is shared with the peer.
"""

from collections.abc import Iterable

from hpack import Decoder, HPACKError

from dynamo.http2.frames import ErrorCode, Http2Error

HEADERS_BYTES_MAX = 64 << 10
"""Maximum size of a request's headers; Envoy's default is 60 KiB."""
STATUS_200 = b"\x88"
EMPTY_TABLE = b"\x20"
"""Update that empties the dynamic table, which a peer expects after it has made the table smaller."""
LITERAL = b"\x00"
LENGTH_MAX = 0x7F

RequestHeaders = list[tuple[bytes, bytes]]


class HeaderDecoder:
    """Decodes the header blocks of one connection."""

    def __init__(self) -> None:
        self._decoder = Decoder(HEADERS_BYTES_MAX)
        self._recent: tuple[bytes, RequestHeaders] = b"", []
        """Last block that consists of table entries, and its headers: most calls of a client repeat it."""

    def decode(self, block: bytes) -> RequestHeaders:
        """Return the headers of a block. Raise `Http2Error`."""
        if block and block == self._recent[0]:
            return self._recent[1]
        try:
            headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except HPACKError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from None
        self._recent = (block, headers) if is_constant(block) else (b"", [])
        return headers


def is_constant(block: bytes) -> bool:
    """Return whether a block only names entries of the table, by one byte each: then it leaves the table as it is."""
    return all(0x80 < byte < 0xFF for byte in block)


def encode(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the block of headers, as literals that no table keeps. Names are in lower case."""
    return b"".join(LITERAL + _text(name) + _text(value) for name, value in headers)


def _text(value: bytes) -> bytes:
    """Return a text with its length: an integer with a prefix of 7 bits."""
    size = len(value)
    if size < LENGTH_MAX:
        return bytes((size,)) + value
    size -= LENGTH_MAX
    length = bytearray((LENGTH_MAX,))
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + value
