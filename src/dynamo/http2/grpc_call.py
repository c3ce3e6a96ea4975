"""GrpcCall: one gRPC call on an HTTP/2 stream: messages in, messages out, and the status that ends it."""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from urllib.parse import quote

from dynamo.http2.header_blocks import STATUS_200, RequestHeaders, encode
from dynamo.http2.stream import WINDOW_BYTES, Http2Stream

PREFIX_BYTES = 5
"""Before each message: whether it is compressed, and its size."""
RESPONSE_HEADERS = STATUS_200 + encode([(b"content-type", b"application/grpc")])
MESSAGE_CHARS_MAX = 1000
"""Maximum length of a status's text, which travels in a header."""
TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
TIMEOUT_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class GrpcCode(IntEnum):
    """Codes of gRPC statuses."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class GrpcStatus(Exception):
    """Ends a call with a status other than OK."""

    def __init__(self, code: GrpcCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def status_block(code: GrpcCode, message: str = "") -> bytes:
    """Return the header block of a status."""
    headers = [(b"grpc-status", b"%d" % code)]
    if message:
        headers.append((b"grpc-message", quote(message[:MESSAGE_CHARS_MAX], safe=" !\"#$&'()*+,/:;<=>?@[]{}").encode()))
    return encode(headers)


OK_BLOCK = status_block(GrpcCode.OK)


def timeout_of(headers: RequestHeaders) -> float | None:
    """Return the time that a client gives a call, in seconds; None for any."""
    found = next((TIMEOUT.fullmatch(value) for name, value in headers if name == b"grpc-timeout"), None)
    return None if found is None else int(found[1]) * TIMEOUT_UNITS[found[2]]


class GrpcCall:
    """One call, as its method reads and answers it."""

    __slots__ = (
        "_buffer", "_failure", "_has_answered", "_has_ended", "_message_bytes_max", "_messages", "_paid", "_reader", "_stream", "_writer",
        "headers", "on_reset",
    )  # fmt: skip

    def __init__(self, stream: Http2Stream, headers: RequestHeaders, message_bytes_max: int) -> None:
        self.headers = headers
        self.on_reset: Callable[[], object] = _nothing
        """Called when the client ends the call before its status, or its connection is lost."""
        self._stream = stream
        self._message_bytes_max = message_bytes_max
        self._messages: deque[tuple[bytes, int]] = deque()
        """Messages that were not read, and the bytes to acknowledge when they are."""
        self._buffer = bytearray()
        self._paid = 0
        """Bytes of the incomplete message that are acknowledged: one larger than the window must be able to arrive."""
        self._failure: GrpcStatus | None = None
        self._has_ended = self._has_answered = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """Return the next message; None after the last one. Raise `GrpcStatus` for what is no message."""
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message, size = self._messages.popleft()
        self._stream.consumed(size)
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; wait while the client does not read those before."""
        if not self._has_answered:
            self._has_answered = True
            self._stream.send_headers(RESPONSE_HEADERS)
        self._stream.send_data(b"\0" + len(message).to_bytes(4, "big") + message)
        while self._stream.is_congested:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def end(self, code: GrpcCode = GrpcCode.OK, message: str = "") -> None:
        """End the call. One that ended before stays as it is."""
        block = OK_BLOCK if code is GrpcCode.OK else status_block(code, message)
        self._stream.end(block if self._has_answered else RESPONSE_HEADERS + block)

    # The stream.

    def data_received(self, data: bytes, ends: bool) -> None:
        """Take messages from the data; further data of a call that failed is dropped."""
        buffer = self._buffer
        buffer += data if self._failure is None else b""
        while len(buffer) >= PREFIX_BYTES:
            size = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
            self._check(buffer[0], size)
            end = PREFIX_BYTES + size
            if self._failure is not None or len(buffer) < end:
                break
            self._messages.append((bytes(buffer[PREFIX_BYTES:end]), end - self._paid))
            self._paid = 0
            del buffer[:end]
        if self._failure is not None:
            buffer.clear()
        elif len(buffer) - self._paid > WINDOW_BYTES // 2:
            self._stream.consumed(len(buffer) - self._paid)
            self._paid = len(buffer)
        if ends:
            self._has_ended = True
            if buffer and self._failure is None:
                self._failure = GrpcStatus(GrpcCode.INTERNAL, f"the last message ends after {len(buffer)} bytes")
        _wake(self._reader)

    def _check(self, compression: int, size: int) -> None:
        if compression:
            self._failure = GrpcStatus(GrpcCode.UNIMPLEMENTED, "compressed messages are not supported")
        elif size > self._message_bytes_max:
            text = f"message of {size} bytes: at most {self._message_bytes_max}"
            self._failure = GrpcStatus(GrpcCode.RESOURCE_EXHAUSTED, text)

    def reset_received(self) -> None:
        """End the method."""
        self.on_reset()

    def drained(self) -> None:
        """Continue writing."""
        _wake(self._writer)


def refuse(stream: Http2Stream, code: GrpcCode, message: str) -> None:
    """Answer a call that no method serves."""
    stream.end(RESPONSE_HEADERS + status_block(code, message))


def refuse_other_protocol(stream: Http2Stream) -> None:
    """Answer a request that is not gRPC."""
    stream.end(encode([(b":status", b"415")]))


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def _nothing() -> None:
    """Ignore a reset."""
