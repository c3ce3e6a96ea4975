"""Local requests: requests of this process to its own handlers, without a connection.

The batch runner, KServe and the WebSocket of the Responses API use them. A handler writes its response to the
`LocalRequest` as to any `ResponseStream`; the response is kept for the caller, whole or as the events of a stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from dynamo.core.errors import Cancelled, ResponseTimeout
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


@dataclass(frozen=True, slots=True)
class LocalResponse:
    """Complete response."""

    status: int
    body: bytes
    error: ErrorAnswer | None = None
    """Error of a request that the handler refused."""


class LocalRequest:
    """One request and its response; a `ResponseStream` for the handler."""

    __slots__ = (
        "_buffer",
        "_capture",
        "_handler",
        "_is_cut",
        "_response",
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
    )

    def __init__(
        self,
        handler: RequestHandler,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        account: RequestAccount | None = None,
    ) -> None:
        """`account`: the caller, closed at the end of the response."""
        self.body = bytearray(body)
        self.headers = list(headers)
        self.account = account
        self.header_bytes = b""
        self.error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
        self.on_disconnect: Callable[[], None] | None = None
        self.response_started = self.response_complete = self.disconnected = False
        self.refusal: ErrorAnswer | None = None
        """Error with which the handler refused the request."""
        self._handler = handler
        self._response: LocalResponse | None = None
        self._capture: InternalCapture | None = None
        self._buffer = b""
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._is_cut = False
        self._wake = asyncio.Event()

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
        return self._response or LocalResponse(200, b"".join(event + b"\n\n" for event in self._unread))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Send the request and yield the data of each server-sent event except the final `[DONE]`.

        Closing the generator early acts as a client that disconnects. `refusal` is the error that occurred before the
        first event. Raise `ResponseTimeout` if the response is aborted or the reader is too slow.
        """
        self._handler(self)
        try:
            while True:
                while self._unread:
                    event = self._unread.popleft()
                    self._unread_bytes -= len(event)
                    data = data_of(event)
                    if data and data != DONE:
                        yield data
                if self._is_cut:
                    raise ResponseTimeout("the response was aborted, or its reader was too slow")
                if self.response_complete:
                    return
                await self._next()
        finally:
            self.leave()

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

    async def _next(self) -> None:
        self._wake.clear()
        await self._wake.wait()
        if self.disconnected and not self._is_cut:
            raise Cancelled("the request was cancelled by its caller")

    # Handler interface, as described by `ResponseStream`.

    def header(self, name: bytes) -> bytes | None:
        """Return the first header with that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)

    def drop_body(self) -> None:
        """Free the body, which the handler has read or will not read."""
        self.body = bytearray()

    def capture(self) -> InternalCapture:
        """Keep a copy of everything that is written from now on."""
        self._capture = InternalCapture()
        return self._capture

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
            self._unread.append(event)
            self._unread_bytes += len(event)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._cut()
        self._wake.set()

    def write_chunk(self, chunk: bytes) -> None:
        """Write events that are framed as HTTP chunks."""
        while chunk:
            size, _, rest = chunk.partition(b"\r\n")
            length = int(size, 16)
            self.write(rest[:length])
            chunk = rest[length + 2 :]

    def end(self, data: bytes = b"") -> None:
        """Write the last events of a stream and complete it."""
        if self.disconnected or self.response_complete:
            return
        self.write(data)
        if not self.disconnected:
            self._complete()

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
