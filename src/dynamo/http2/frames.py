"""HTTP/2 frames (RFC 9113): kinds, flags, error codes, their bytes, and the errors of a peer that breaks the protocol. Pure."""

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
"""Settings."""

HEADER = struct.Struct(">BHBBL")
"""Frame header: length in two parts, kind, flags, stream."""
HEADER_BYTES = HEADER.size
SETTING = struct.Struct(">HL")
FRAME_BYTES_MIN, FRAME_BYTES_LARGEST = 16384, (1 << 24) - 1
"""Range of `MAX_FRAME_SIZE`; the lower end is its default, which this server keeps for what it receives."""
WINDOW_DEFAULT, WINDOW_MAX = 65535, (1 << 31) - 1
PRIORITY_BYTES = 5


class ErrorCode(IntEnum):
    """Reasons of `RST_STREAM` and `GOAWAY`."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(Exception):
    """The peer broke the protocol: the connection ends."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    size = len(payload)
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    """Return the frame that announces settings."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(name, value) for name, value in values.items()))


def window_update(stream: int, size: int) -> bytes:
    """Return the frame that lets the peer send `size` more bytes; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset_frame(stream: int, code: ErrorCode) -> bytes:
    """Return the frame that ends a stream."""
    return frame(RST_STREAM, 0, stream, int(code).to_bytes(4, "big"))


def goaway_frame(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    """Return the frame after which no new stream is served."""
    return frame(GOAWAY, 0, 0, struct.pack(">LL", last_stream, code) + reason.encode())


def without_padding(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the content of a `DATA` or `HEADERS` payload: without padding and priority. Raise `Http2Error`."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - (payload[0] if payload else 0)
    if kind == HEADERS and flags & WITH_PRIORITY:
        start += PRIORITY_BYTES
    if start > end:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame is shorter than its padding")
    return payload[start:end]


def number_of(payload: bytes, kind: str) -> int:
    """Return the number that is the whole payload of a frame. Raise `Http2Error`."""
    if len(payload) != 4:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"{kind} of {len(payload)} bytes")
    return int.from_bytes(payload, "big")
