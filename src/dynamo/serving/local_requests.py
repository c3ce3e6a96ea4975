"""Local requests: requests of this process to its own handlers, without a connection.

The batch runner and the WebSocket of the Responses API, whose clients send and receive JSON, use `LocalRequest`. A handler
writes its response to it as to any `ResponseStream`; the response is kept for the caller, whole or as the events of a
stream. `LocalCall` is also the base of requests that are made as objects (`completion_calls`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from msgspec import Struct

from dynamo.core.errors import Cancelled, ResponseTimeout
from dynamo.serving.choice import Frame
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.request_trace.payload import InternalCapture
from dynamo.serving.response_stream import RequestAccount, RequestHandler

UNREAD_BYTES_MAX = 4 << 20  # As for a client: a reader that is this far behind has stopped reading.

DATA = b"data: "
DONE = b"[DONE]"


def data_of(event: bytes) -> bytes:
    """Return the data of a server-sent event, named or not; nothing for a comment."""
    start = 0 if event.startswith(DATA) else event.find(b"\n" + DATA) + 1
    return event[start + len(DATA) :] if start or event.startswith(DATA) else b""


Item = TypeVar("Item")


class LocalCall(Generic[Item]):
    """One request of this process and the items of its response that the caller has not read; an `IncomingRequest`."""

    __slots__ = (
        "_capture",
        "_is_cut",
        "_unread",
        "_unread_bytes",
        "_wake",
        "account",
        "body",
        "disconnected",
        "error_body",
        "header_bytes",
        "headers",
        "on_disconnect",
        "refusal",
        "response_complete",
        "response_started",
        "status",
    )

    def __init__(self, body: bytes, headers: Sequence[tuple[bytes, bytes]], account: RequestAccount | None) -> None:
        """`account`: the caller, closed at the end of the response."""
        self.body = bytearray(body)
        self.headers = list(headers)
        self.account = account
        self.header_bytes = b""
        self.error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
        self.on_disconnect: Callable[[], None] | None = None
        self.response_started = self.response_complete = self.disconnected = False
        self.status = 0
        self.refusal: ErrorAnswer | None = None
        """Error with which the handler ended the request."""
        self._capture: InternalCapture | None = None
        self._unread: deque[tuple[Item, int]] = deque()
        self._unread_bytes = 0
        self._is_cut = False
        self._wake = asyncio.Event()

    # Caller interface.

    def leave(self) -> None:
        """Disconnect: the caller needs no more of the response."""
        if self.disconnected:
            return
        self.disconnected = True
        self._close_account()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None and not self.response_complete:
            callback()
        self._wake.set()

    async def _items(self) -> AsyncGenerator[Item, None]:
        """Yield the items of the response; closing the generator early acts as a client that disconnects.

        Raise `ResponseTimeout` if the response is aborted or the reader is too slow.
        """
        try:
            while True:
                while self._unread:
                    item, size = self._unread.popleft()
                    self._unread_bytes -= size
                    yield item
                if self._is_cut:
                    raise ResponseTimeout("the response was aborted, or its reader was too slow")
                if self.response_complete:
                    return
                await self._next()
        finally:
            self.leave()

    async def _next(self) -> None:
        self._wake.clear()
        await self._wake.wait()
        if self.disconnected and not self._is_cut:
            raise Cancelled("the request was cancelled by its caller")

    # Handler interface, as described by `IncomingRequest`.

    def header(self, name: bytes) -> bytes | None:
        """Return the first header with that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)

    def drop_body(self) -> None:
        """Free the body, which the handler has read or will not read."""
        self.body = bytearray()

    def begin(self) -> None:
        """Write nothing: no client waits for a status."""

    def comment(self) -> None:
        """Write nothing: without a connection, nothing is closed as idle."""

    def capture(self) -> InternalCapture:
        """Keep a copy of everything that is written from now on."""
        self._capture = InternalCapture()
        return self._capture

    def _add(self, item: Item, size: int) -> None:
        """Add an item for the caller; `size` counts against `UNREAD_BYTES_MAX`."""
        self._unread.append((item, size))
        self._unread_bytes += size
        if self._unread_bytes > UNREAD_BYTES_MAX and len(self._unread) > 1:  # A whole response is one item of any size.
            self._cut()
        self._wake.set()

    def _cut(self) -> None:
        self._is_cut = True
        self.leave()

    def _complete(self) -> None:
        self.response_complete = True
        self.on_disconnect = None
        self._close_account()
        self._wake.set()

    def _close_account(self) -> None:
        if self.account is not None:
            self.account.close()


class LocalResponse(Struct, frozen=True):
    """Complete response."""

    status: int
    body: bytes
    error: ErrorAnswer | None = None
    """Error of a request that the handler refused."""


class LocalRequest(LocalCall[bytes]):
    """One request in bytes; a `ResponseStream` for the handler. Its items are server-sent events."""

    __slots__ = ("_buffer", "_handler", "_response")

    def __init__(
        self,
        handler: RequestHandler,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        account: RequestAccount | None = None,
    ) -> None:
        super().__init__(body, headers, account)
        self._handler = handler
        self._response: LocalResponse | None = None
        self._buffer = b""

    # Caller interface.

    async def whole(self) -> LocalResponse:
        """Send the request and return the complete response; cancellation acts as a client that disconnects.

        An aborted response is returned with status 500.
        """
        self._handler(self)
        try:
            while not self.response_complete and not self._is_cut:
                await self._next()
        finally:
            self.leave()
        if self._is_cut:
            error = ErrorAnswer(500, "the response ended prematurely")
            return LocalResponse(error.status, self.error_body(error), error)
        return self._response or LocalResponse(200, b"".join(event + b"\n\n" for event, _ in self._unread))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Send the request and yield the data of each server-sent event except the final `[DONE]`.

        Closing the generator early acts as a client that disconnects. `refusal` is the error that occurred before the
        first event. Raise `ResponseTimeout` if the response is aborted or the reader is too slow.
        """
        self._handler(self)
        async with aclosing(self._items()) as events:
            async for event in events:
                data = data_of(event)
                if data and data != DONE:
                    yield data

    # Handler interface, as described by `ResponseStream`.

    def abort(self) -> None:
        """Abort a response that has begun and cannot be completed; the reader gets `ResponseTimeout`."""
        self._cut()

    def open(self, content_type: bytes) -> None:
        """Begin a stream that does not consist of events."""
        self.response_started = True

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send a complete response."""
        if self.disconnected or self.response_complete:
            return
        self.response_started = True
        if self._capture is not None:
            self._capture.keep_body(body)
        self._response = LocalResponse(status, body, self.refusal)
        self._complete()

    def refuse(self, error: ErrorAnswer) -> None:
        """Send an error as the complete response."""
        self.refusal = error
        self.respond(error.status, self.error_body(error))

    def write(self, data: bytes) -> None:
        """Write events of a stream."""
        if self.disconnected or self.response_complete:
            return
        self.response_started = True
        if self._capture is not None:
            self._capture.keep(data)
        *whole, self._buffer = (self._buffer + data).split(b"\n\n")
        for event in whole:
            self._add(event, len(event))

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """Write events of a stream that are in parts."""
        self.write(b"".join(parts))

    def write_framed(self, frame: Frame, text: bytes) -> None:
        """Write the events made of a frame and its text."""
        self.write(b"".join((frame.head, text, frame.tail)))

    def end(self, data: bytes = b"") -> None:
        """Write the last events of a stream and complete it."""
        if self.disconnected or self.response_complete:
            return
        self.write(data)
        if not self.disconnected:
            self._complete()
