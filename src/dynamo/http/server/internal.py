"""InternalExchange: a request of this process to one of its own routes, without a socket.

The output of the handler is kept for the caller: as a whole body, or as the events of a stream, as they arrive.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from dynamo.core.errors import Cancelled, ResponseTimeout
from dynamo.http.server.gate import Account
from dynamo.http.server.protocol import Exchange, HotHandler
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.request_trace.payload import InternalCapture

UNREAD_BYTES_MAX = 4 << 20  # As for a client: a reader that is this far behind has stopped reading.

DATA = b"data: "
DONE = b"[DONE]"


def data_of(event: bytes) -> bytes:
    """Return the data of a server-sent event, named or not; nothing for a comment."""
    start = 0 if event.startswith(DATA) else event.find(b"\n" + DATA) + 1
    return event[start + len(DATA) :] if start or event.startswith(DATA) else b""


@dataclass(frozen=True, slots=True)
class InternalAnswer:
    """Complete response."""

    status: int
    body: bytes
    error: ErrorAnswer | None = None
    """Error of a request that the handler refused."""


class InternalExchange(Exchange):
    """One internal request and its response."""

    __slots__ = ("_answer", "_buffer", "_capture", "_error", "_is_cut", "_unread", "_unread_bytes", "_wake")

    def __init__(
        self,
        handler: HotHandler,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        account: Account | None = None,
    ) -> None:
        self.handler = handler
        self.body = bytearray(body)
        self.headers = list(headers)
        self.account = account
        self.keep_alive = True
        self.more_body = self.is_refused = self.is_cut = self.is_event_stream = self.takes_interim = False
        self.held_bytes = 0
        self.is_whole = True
        self.response_started = self.response_complete = self.disconnected = False
        self.header_bytes = b""
        self.error_body = ErrorAnswer.body
        self.on_disconnect = None
        self._answer: InternalAnswer | None = None
        self._error: ErrorAnswer | None = None
        self._capture: InternalCapture | None = None
        self._buffer = b""
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._is_cut = False
        self._wake = asyncio.Event()

    # Caller interface.

    async def whole(self) -> InternalAnswer:
        """Send the request and return the complete response; cancellation acts as a client that disconnects.

        An aborted response is returned with status 500.
        """
        self.start()
        try:
            while not self.response_complete and not self._is_cut:
                await self._next()
        finally:
            self.leave()
        if self._is_cut:
            error = ErrorAnswer(500, "the response ended prematurely")
            return InternalAnswer(error.status, self.error_body(error), error)
        return self._answer or InternalAnswer(200, b"".join(event + b"\n\n" for event in self._unread))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Send the request and yield the data of each server-sent event except the final `[DONE]`.

        Closing the generator early acts as a client that disconnects. `refusal` is the error that occurred before the
        first event. Raise `ResponseTimeout` if the response is aborted or the reader is too slow.
        """
        self.start()
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

    @property
    def refusal(self) -> ErrorAnswer | None:
        """Error with which the handler refused the request."""
        return self._error

    def leave(self) -> None:
        """Disconnect: the caller needs no more of the response."""
        if not self.disconnected:
            self.left()
            self._wake.set()

    async def _next(self) -> None:
        self._wake.clear()
        await self._wake.wait()
        if self.disconnected and not self._is_cut:
            raise Cancelled("the request was cancelled by its caller")

    # Handler interface.

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
        self._answer = InternalAnswer(status, body, self._error)
        self._complete()

    def refuse(self, error: ErrorAnswer) -> None:
        """Send an error as the complete response."""
        self._error = error
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
        self.left()
        self._wake.set()

    def _complete(self) -> None:
        self.response_complete = True
        self.on_disconnect = None
        self._close_account()
        self._wake.set()
