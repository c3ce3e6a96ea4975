"""Frames: encoding and decoding of both TCP framings, without I/O.

Dynamo framing, used with released Dynamo processes. A request uses a pooled connection and is acknowledged on it; the
response uses a separate connection, which the worker opens to the caller:

    request   u16 path_len | path | u16 headers_len | JSON headers | u32 len | two-part message
    ack       u32 len | text; empty means accepted
    two-part  u64 header_len | u64 body_len | u64 checksum (0) | header | body         all big-endian

Batched frames, used between processes of this implementation. The caller opens with `HELLO`, which is an empty path and
therefore unused by Dynamo framing; afterwards both directions carry, little-endian,

    frame     u32 payload_len | u8 kind | payload

and many streams share the connection. All tokens of one loop iteration share one `TOKENS` frame.
"""

import struct
import sys
from abc import ABC, abstractmethod
from array import array
from typing import Generic, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument

T = TypeVar("T")

HELLO = b"\x00\x00dynamo.frames\x01"
HELLO_PREFIX = b"\x00\x00"

PATH_BYTES_MAX = 4096  # A path is four names. TLS and HTTP openings decode as longer paths and are rejected at once.

# Worker to caller.
TOKENS, ITEM, END, ERROR, ACK, ALIVE = 1, 2, 3, 4, 5, 6
# Caller to worker.
REQUEST, STOP, KILL, PROBE = 16, 17, 18, 19

ITEM_JSON = 1  # The item is JSON; msgpack otherwise.
ITEM_ANNOTATED = 2  # The item is an object of `data`, `id`, `event` and `comment`; the bare value otherwise.

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_TWO_PART = struct.Struct(">QQQ")
_FRAME = struct.Struct("<IB")
_ITEM = struct.Struct("<IB")
_STREAM = struct.Struct("<I")
_HEAD = struct.Struct("<II")

FRAME_HEAD_BYTES = _FRAME.size
REQUEST_HEADERS_BYTES_MAX = 65535


class FrameError(InvalidArgument):
    """Malformed frame from the peer: the connection cannot be read further."""


class RequestHead(msgspec.Struct, array_like=True):
    """Head of a batched request: everything except its body."""

    id: str
    path: str
    codec: str
    headers: dict[str, str]
    metadata: dict[str, str]


class UpstreamRequest(msgspec.Struct):
    """Decoded request in Dynamo framing."""

    path: str
    headers: bytes
    message: bytes


# Encoding ---------------------------------------------------------------------------------------------------------


def two_part(header: bytes, body: bytes) -> bytes:
    """Encode a two-part message."""
    return b"%b%b%b" % (_TWO_PART.pack(len(header), len(body), 0), header, body)


def upstream_request(path: str, headers: bytes, message: bytes) -> bytes:
    """Encode a request in Dynamo framing. Raise `InvalidArgument` when path or headers are too long."""
    name = path.encode()
    if len(name) > REQUEST_HEADERS_BYTES_MAX or len(headers) > REQUEST_HEADERS_BYTES_MAX:
        raise InvalidArgument(f"request headers too large for a frame: {len(headers)} bytes")
    return b"".join((_U16.pack(len(name)), name, _U16.pack(len(headers)), headers, _U32.pack(len(message)), message))


def ack(text: bytes = b"") -> bytes:
    """Encode an acknowledgement; a text makes it a rejection."""
    return _U32.pack(len(text)) + text


def frame(kind: int, payload: bytes) -> bytes:
    """Encode one batched frame."""
    return _FRAME.pack(len(payload), kind) + payload


def tokens_frame(streams: "array[int]", tokens: "array[int]") -> bytes:
    """Encode the tokens of a loop iteration: token i belongs to stream i."""
    return _FRAME.pack(8 * len(streams), TOKENS) + u32_bytes(streams) + u32_bytes(tokens)


def streams_frame(kind: int, streams: "array[int]") -> bytes:
    """Encode a frame that contains only stream ids: `END` or `ACK`."""
    return _FRAME.pack(4 * len(streams), kind) + u32_bytes(streams)


def item_frame(stream: int, flags: int, data: bytes) -> bytes:
    """Encode one response element."""
    return _FRAME.pack(5 + len(data), ITEM) + _ITEM.pack(stream, flags) + data


def stream_frame(kind: int, stream: int, data: bytes = b"") -> bytes:
    """Encode a frame for one stream: `ERROR`, `STOP` or `KILL`."""
    return _FRAME.pack(4 + len(data), kind) + _STREAM.pack(stream) + data


def request_frame(stream: int, head: bytes, body: bytes) -> bytes:
    """Encode a request as a batched frame."""
    size = 8 + len(head) + len(body)
    return b"%b%b%b%b" % (_FRAME.pack(size, REQUEST), _HEAD.pack(stream, len(head)), head, body)


def u32_bytes(values: "array[int]") -> bytes:
    """Return the values as little-endian bytes on every platform."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


# Decoding ---------------------------------------------------------------------------------------------------------


def read_u32s(payload: bytes) -> tuple[int, ...]:
    """Decode a list of u32. Raise `FrameError` for a wrong length."""
    count, rest = divmod(len(payload), 4)
    if rest:
        raise FrameError(f"malformed u32 list: {len(payload)} bytes")
    return struct.unpack(f"<{count}I", payload)


def read_item(payload: bytes) -> tuple[int, int, bytes]:
    """Decode an item frame into stream, flags and data."""
    if len(payload) < _ITEM.size:
        raise FrameError("item frame without a stream id")
    stream, flags = _ITEM.unpack_from(payload)
    return stream, flags, payload[_ITEM.size :]


def read_stream(payload: bytes) -> tuple[int, bytes]:
    """Decode a stream frame into stream and data."""
    if len(payload) < _STREAM.size:
        raise FrameError("stream frame without a stream id")
    return _STREAM.unpack_from(payload)[0], payload[_STREAM.size :]


def read_request(payload: bytes) -> tuple[int, bytes, bytes]:
    """Decode a request frame into stream, head and body."""
    if len(payload) < _HEAD.size:
        raise FrameError("request frame without a head")
    stream, head_size = _HEAD.unpack_from(payload)
    end = _HEAD.size + head_size
    if end > len(payload):
        raise FrameError("request frame shorter than its head")
    return stream, payload[_HEAD.size : end], payload[end:]


class Decoder(ABC, Generic[T]):
    """Incremental decoder of a byte stream into frames. `size_max` bounds one frame."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._rest = bytearray()
        self._needed = 0

    @property
    def is_between_frames(self) -> bool:
        return not self._rest

    @property
    def held(self) -> int:
        """Return the size of the incomplete frame in bytes."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[T]:
        """Return the frames that `data` completes. Raise `FrameError` for malformed bytes."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest = bytearray()
        frames: list[T] = []
        position = 0
        size = len(data)
        while position < size:
            end = self.end(data, position)
            if end > size:
                self._needed = end - position
                self._rest = bytearray(data[position:] if position else data)
                break
            frames.append(self.cut(data, position, end))
            position = end
        return frames

    @abstractmethod
    def end(self, data: bytes, position: int) -> int:
        """Return the end of the frame at `position`; for an incomplete frame a lower bound of it beyond the data."""

    @abstractmethod
    def cut(self, data: bytes, position: int, end: int) -> T:
        """Decode the complete frame from `position` to `end`."""

    def check(self, size: int) -> None:
        if size > self.size_max:
            raise FrameError(f"frame of {size} bytes exceeds the limit of {self.size_max} (DYN_TCP_MAX_MESSAGE_SIZE)")


class FrameDecoder(Decoder[tuple[int, bytes]]):
    """Decoder of batched frames into kind and payload."""

    def end(self, data: bytes, position: int) -> int:
        if len(data) - position < 5:
            return position + 5
        size: int = _FRAME.unpack_from(data, position)[0]
        if size > self.size_max:
            self.check(size)
        return position + 5 + size

    def cut(self, data: bytes, position: int, end: int) -> tuple[int, bytes]:
        return data[position + 4], data[position + 5 : end]


class TwoPartDecoder(Decoder[tuple[bytes, bytes]]):
    """Decoder of two-part messages into header and body."""

    def end(self, data: bytes, position: int) -> int:
        if len(data) - position < _TWO_PART.size:
            return position + _TWO_PART.size
        header, body, _ = _TWO_PART.unpack_from(data, position)
        self.check(header + body)
        return position + _TWO_PART.size + int(header) + int(body)

    def cut(self, data: bytes, position: int, end: int) -> tuple[bytes, bytes]:
        middle = position + _TWO_PART.size + int(_TWO_PART.unpack_from(data, position)[0])
        return data[position + _TWO_PART.size : middle], data[middle:end]


class AckDecoder(Decoder[bytes]):
    """Decoder of acknowledgements into their text, empty when accepted."""

    def end(self, data: bytes, position: int) -> int:
        if len(data) - position < 4:
            return position + 4
        size = int(_U32.unpack_from(data, position)[0])
        self.check(size)
        return position + 4 + size

    def cut(self, data: bytes, position: int, end: int) -> bytes:
        return data[position + 4 : end]


class UpstreamRequestDecoder(Decoder[UpstreamRequest]):
    """Decoder of requests in Dynamo framing."""

    def end(self, data: bytes, position: int) -> int:
        headers = _after_u16(data, position)
        if headers - position - 2 > PATH_BYTES_MAX:
            raise FrameError(f"request path too long: {headers - position - 2} bytes")
        message = _after_u16(data, headers)
        if message + 4 > len(data):
            return message + 4
        size = int(_U32.unpack_from(data, message)[0])
        self.check(size)
        return message + 4 + size

    def cut(self, data: bytes, position: int, end: int) -> UpstreamRequest:
        headers = _after_u16(data, position)
        message = _after_u16(data, headers)
        try:
            path = data[position + 2 : headers].decode()
        except UnicodeDecodeError:
            raise FrameError("request path is not UTF-8") from None
        return UpstreamRequest(path, data[headers + 2 : message], data[message + 4 : end])


def split_two_part(message: bytes) -> tuple[bytes, bytes]:
    """Split exactly one two-part message into header and body. Raise `FrameError` for anything else."""
    if len(message) < _TWO_PART.size:
        raise FrameError("request is not a two-part message")
    header, body, _ = _TWO_PART.unpack_from(message)
    if _TWO_PART.size + header + body != len(message):
        raise FrameError("two-part message with inconsistent lengths")
    middle = _TWO_PART.size + int(header)
    return message[_TWO_PART.size : middle], message[middle:]


def _after_u16(data: bytes, position: int) -> int:
    """Return the end of a field with a u16 length prefix; a position beyond the data if the prefix is incomplete."""
    if position + 2 > len(data):
        return position + 2
    return position + 2 + int(_U16.unpack_from(data, position)[0])
