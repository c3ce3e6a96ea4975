"""InternalExchange: a request that this process asks of one of its own routes, without a socket.

What a handler writes is kept for the one who asks: as a whole body, or as the events of a stream, as they come.
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

UNREAD_BYTES_MAX = 4 << 20  # As for a client: who is this far behind is not reading.

DATA = b"data: "
DONE = b"[DONE]"


def data_of(event: bytes) -> bytes:
    """Return the data of a server-sent event, named or not; nothing for a comment."""
    start = 0 if event.startswith(DATA) else event.find(b"\n" + DATA) + 1
    return event[start + len(DATA) :] if start or event.startswith(DATA) else b""


@dataclass(frozen=True, slots=True)
class InternalAnswer:
    """A whole answer."""

    status: int
    body: bytes
    error: ErrorAnswer | None = None
    """What was wrong, where the handler refused the request."""


class InternalExchange(Exchange):
    """One request and its answer."""

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

    # The one who asks.

    async def whole(self) -> InternalAnswer:
        """Send the request and return the whole answer; cancellation acts as a client that disconnects.

        A response that was cut off is answered with status 500.
        """
        self.start()
        try:
            while not self.response_complete and not self._is_cut:
                await self._next()
        finally:
            self.leave()
        if self._is_cut:
            error = ErrorAnswer(500, "the response broke off before its end")
            return InternalAnswer(error.status, self.error_body(error), error)
        return self._answer or InternalAnswer(200, b"".join(event + b"\n\n" for event in self._unread))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Asks, and gives the data of each server-sent event; without the one that says there are no more.

        Leaving early is a client's leaving. `refusal` says afterwards what was wrong before the first event.
        Raises `ResponseTimeout` for a reader that is too slow.
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
                    raise ResponseTimeout("the response was cut off: it broke off, or its reader was too slow")
                if self.response_complete:
                    return
                await self._next()
        finally:
            self.leave()

    @property
    def refusal(self) -> ErrorAnswer | None:
        """What the request was refused for."""
        return self._error

    def leave(self) -> None:
        """Nobody wants the answer, or more of it."""
        if not self.disconnected:
            self.left()
            self._wake.set()

    async def _next(self) -> None:
        self._wake.clear()
        await self._wake.wait()
        if self.disconnected and not self._is_cut:
            raise Cancelled("the request was left")

    # The handler.

    def capture(self) -> InternalCapture:
        """Keep a copy of everything that is written from now on."""
        self._capture = InternalCapture()
        return self._capture

    def abort(self) -> None:
        """End a response that has begun and cannot be completed; the reader gets `ResponseTimeout`."""
        self._cut()

    def open(self, content_type: bytes) -> None:
        """Begin a stream of something else than events."""
        self.response_started = True

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """The whole response at once."""
        if self.disconnected or self.response_complete:
            return
        self.response_started = True
        if self._capture is not None:
            self._capture.keep_body(body)
        self._answer = InternalAnswer(status, body, self._error)
        self._complete()

    def refuse(self, error: ErrorAnswer) -> None:
        """An error before anything was sent."""
        self._error = error
        self.respond(error.status, self.error_body(error))

    def write(self, data: bytes) -> None:
        """Some events of a stream."""
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
        """Some events, framed as HTTP chunks."""
        while chunk:
            size, _, rest = chunk.partition(b"\r\n")
            length = int(size, 16)
            self.write(rest[:length])
            chunk = rest[length + 2 :]

    def end(self, data: bytes = b"") -> None:
        """The last events of a stream."""
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
