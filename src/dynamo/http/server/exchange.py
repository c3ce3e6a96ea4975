"""Exchange: one HTTP request of a hot route, whose response goes directly to the transport.

A server-sent event costs one `transport.write` for all that is ready, instead of a task switch, two dicts and two awaits for
each. `http.server.protocol` reads requests into exchanges and calls their handlers.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from dynamo.core.memory import free_buffer
from dynamo.core.threads import start_in_few_threads
from dynamo.core.uvicorn_parts import STATUS_LINE
from dynamo.http.server.gate import Account
from dynamo.http.server.limits import HttpLimits
from dynamo.http.server.paced_input import InputTurns
from dynamo.serving.choice import Frame
from dynamo.serving.errors import CLIENT_CLOSED_REQUEST, OVERLOADED, ErrorAnswer
from dynamo.serving.request_trace.payload import Capture, Tap

EVENT_STREAM = (
    STATUS_LINE[200] + b"content-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n"
)
STATUS_LINES = {
    **STATUS_LINE,
    CLIENT_CLOSED_REQUEST: b"HTTP/1.1 499 Client Closed Request\r\n",
    OVERLOADED: b"HTTP/1.1 529 Overloaded\r\n",
}

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"
"""Comment of an event stream, as an HTTP chunk."""
CHUNK_SIZES_MAX = 4096
CHUNK_SIZES = [b"%x\r\n" % size for size in range(CHUNK_SIZES_MAX)]
"""Header of an HTTP chunk, by its size."""

FREED_HERE_BYTES = 8 << 20
"""Larger bodies are freed in a thread: a MiB takes some 0.3 ms."""

LONG_BYTES = 256 << 10
"""Longer data of a response is passed to the transport in pieces of this size, each after the client has read the one before."""

HotHandler = Callable[["Exchange"], None]
"""Called on the loop once a request is complete; it responds now or later, and always ends the exchange."""


class _NoEvent:
    """Substitute for the asyncio.Event that uvicorn sets on a cycle."""

    def set(self) -> None:
        """Do nothing: no task waits for the event."""


_NO_EVENT = _NoEvent()


class BodyBudget:
    """Bytes of request bodies in memory, over all connections."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int = 0) -> None:
        """`bytes_max` 0: unlimited."""
        self.bytes_max = bytes_max
        self.held = 0

    def has_capacity(self) -> bool:
        """Return whether the bodies are within the limit."""
        return not self.bytes_max or self.held <= self.bytes_max


class LongData:
    """Data of a response that is passed to the transport piece by piece, and what follows it."""

    __slots__ = ("behind", "is_ending", "pieces")

    def __init__(self) -> None:
        self.pieces: deque[bytes | memoryview] = deque()
        self.behind = 0
        """Bytes of what follows that is not long."""
        self.is_ending = False
        """Whether the response is complete after the last piece."""

    def add(self, part: bytes) -> None:
        """Add a part, in pieces that are not copied."""
        if len(part) <= LONG_BYTES:
            self.pieces.append(part)
        else:
            view = memoryview(part)
            self.pieces.extend(view[start : start + LONG_BYTES] for start in range(0, len(part), LONG_BYTES))


class ExchangeConnection(Protocol):
    """What an exchange needs of its connection (`http.server.protocol.HttpProtocol`)."""

    transport: asyncio.Transport
    fd: int
    """The socket, if the transport passes data to it unchanged; else -1."""
    headers: list[tuple[bytes, bytes]]
    """Headers of the request that is being read."""
    url: bytes
    """Its target: path and query."""
    limits: HttpLimits
    bodies: BodyBudget
    exchanges: "set[Exchange]"
    """Unanswered hot requests."""
    turns: InputTurns | None
    """Shared by all connections of a service."""
    is_stalled: bool
    """Whether the transport's buffer is over its high-water mark."""

    def cut_slow_reader(self) -> None:
        """Drop the data of a client that has stopped reading, and end its generations."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the loss of the connection."""

    def linger(self) -> None:
        """Close after the rest of the request was read and dropped."""

    def on_response_complete(self) -> None:
        """Continue with the next request of the connection."""


class Exchange:
    """One request on a hot route; for uvicorn, the current cycle of the connection."""

    __slots__ = (
        "_long",
        "account",
        "body",
        "disconnected",
        "error_body",
        "expect_100_continue",
        "fd",
        "handler",
        "header_bytes",
        "headers",
        "held_bytes",
        "is_cut",
        "is_direct",
        "is_event_stream",
        "is_refused",
        "is_stalled",
        "is_whole",
        "keep_alive",
        "message_event",
        "more_body",
        "on_disconnect",
        "protocol",
        "response_complete",
        "response_started",
        "status",
        "takes_interim",
        "transport",
    )

    def __init__(self, protocol: ExchangeConnection, handler: HotHandler, *, keep_alive: bool) -> None:
        self.protocol = protocol
        self.transport = protocol.transport
        self.fd = protocol.fd
        self.is_direct = False
        """Whether the transport holds no data, so that more may be written to the socket itself."""
        self.handler = handler
        self.headers: list[tuple[bytes, bytes]] = protocol.headers
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.held_bytes = 0
        """Bytes of the body that count against the budget of all bodies."""
        self.more_body = True
        self.is_refused = False
        """Whether the response is known already, so that the body is not kept."""
        self.is_cut = False
        """Whether the rest of the body is not awaited."""
        self.takes_interim = False
        """Whether interim (1xx) responses may be sent: HTTP/1.1."""
        self.is_event_stream = False
        self.is_stalled = protocol.is_stalled
        """As the connection's; it is read for every token, and the connection has too many attributes for that."""
        self.is_whole = False
        self.response_started = False
        self.response_complete = False
        self.status = 0
        """Status that was sent; 0 before."""
        self.disconnected = False
        self.message_event = _NO_EVENT
        self.account: Account | None = None
        """Account of the caller; None on a server without keys."""
        self.header_bytes = b""
        """Extra response headers, each `name: value\\r\\n`."""
        self.error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
        """Formats an error of this route."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called once if the client disconnects before the response is complete."""
        self._long: LongData | None = None
        """What waits until the client has read what is before it; None unless there is any."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first header with that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send a complete response."""
        if self.disconnected or self.response_complete or self._long is not None:
            return
        close = b"" if self.keep_alive else b"connection: close\r\n"
        head = b"%scontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
            STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
            content_type,
            len(body),
            self.header_bytes,
            close,
        )
        self.response_started, self.status = True, status
        if len(body) > LONG_BYTES:
            self._send_long((head, body), ends=True)
            return
        self.transport.write(head + body)
        self._complete()

    def refuse(self, error: ErrorAnswer) -> None:
        """Send an error as the complete response."""
        if error.retry_after_s is not None:
            self.header_bytes += b"retry-after: %d\r\n" % error.retry_after_s
        self.respond(error.status, self.error_body(error))

    def write(self, data: bytes) -> None:
        """Write events of a stream; the first call also sends the status and the headers."""
        if not data:
            return  # An empty chunk would end the response.
        if len(data) > LONG_BYTES:
            self.write_parts((data,))
            return
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if not self.response_started:
            chunk = self._event_stream_head() + chunk
        self._send(chunk)

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """Write events of a stream that are in parts; long ones are not joined, which takes milliseconds for 10 MB."""
        size = sum(map(len, parts))
        if size <= LONG_BYTES:
            self.write(b"".join(parts))
            return
        if self.disconnected or self.response_complete:
            return
        start = b"%x\r\n" % size
        if not self.response_started:
            start = self._event_stream_head() + start
        self._send_long((start, *parts, b"\r\n"))

    def _event_stream_head(self) -> bytes:
        """Return the status and the headers of a stream of events, which begins with them."""
        self.response_started = self.is_event_stream = True
        self.status = 200
        close = b"" if self.keep_alive else b"connection: close\r\n"
        return b"%b%b%b\r\n" % (EVENT_STREAM, self.header_bytes, close)

    def begin(self) -> None:
        """Send the status and the headers of a stream of events that has not begun."""
        if not self.response_started:
            self._send(self._event_stream_head())

    def comment(self) -> None:
        """Write a comment, which begins a stream that has not begun."""
        self.write(b":\n\n")

    def open(self, content_type: bytes) -> None:
        """Begin a stream that does not consist of events; `write` follows in the same turn of the loop."""
        if self.disconnected or self.response_started:
            return
        self.response_started, self.status = True, 200
        close = b"" if self.keep_alive else b"connection: close\r\n"
        head = b"%bcontent-type: %b\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n%b%b\r\n"
        self.transport.write(head % (STATUS_LINE[200], content_type, self.header_bytes, close))

    def write_framed(self, frame: Frame, text: bytes) -> None:
        """Write the events made of a frame and its text, to a stream that `write` has begun.

        Joins once, because it runs for every token of every stream.
        """
        if self.disconnected or self.response_complete:
            return
        size = frame.size + len(text)
        start = CHUNK_SIZES[size] if size < CHUNK_SIZES_MAX else b"%x\r\n" % size
        self.write_chunk(b"".join((start, frame.head, text, frame.tail, b"\r\n")))

    def write_chunk(self, chunk: bytes) -> None:
        """Write HTTP chunks of a stream that has begun: to the socket as far as it takes them, the rest to the transport.

        The transport would write them at the end of the loop's turn, after entering each in its queues.
        """
        if not self.is_direct:
            transport = self.transport
            self.is_direct = (
                self.fd >= 0
                and self._long is None
                and not transport.get_write_buffer_size()
                and not transport.is_closing()
            )
        if self.is_direct:
            try:
                sent = os.write(self.fd, chunk)
            except OSError:  # The socket is full, or the transport meets the same error and handles it.
                sent = 0
            if sent == len(chunk):
                return
            chunk = chunk[sent:]
        self._send(chunk)

    def _send(self, chunk: bytes) -> None:
        """Write bytes of a response that has begun."""
        if self.disconnected or self.response_complete:
            return
        self.is_direct = False
        long = self._long
        if long is not None:
            long.pieces.append(chunk)
            long.behind += len(chunk)
            if long.behind > self.protocol.limits.unsent_bytes:
                self.protocol.cut_slow_reader()
            return
        self.transport.write(chunk)
        if self.is_stalled and self.transport.get_write_buffer_size() > self.protocol.limits.unsent_bytes:
            self.protocol.cut_slow_reader()

    def _send_long(self, parts: Sequence[bytes], *, ends: bool = False) -> None:
        """Write parts of a response piece by piece; `ends`: they are the last. They stay in memory, uncopied, until read."""
        self.is_direct = False
        if self._long is None:
            self._long = LongData()
        for part in parts:
            self._long.add(part)
        self._long.is_ending = ends
        self.resume()

    def resume(self) -> None:
        """Write further pieces of long data, up to the transport's high-water mark."""
        long = self._long
        if long is None:
            return
        while long.pieces:
            if self.is_stalled:
                return
            self.transport.write(long.pieces.popleft())
        self._long = None
        if long.is_ending:
            self._complete()

    def end(self, data: bytes = b"") -> None:
        """Write the last events of a stream and complete it."""
        if self.disconnected or self.response_complete or (self._long is not None and self._long.is_ending):
            return
        if not self.response_started or len(data) > LONG_BYTES:
            self.write(data)
            data = b""
        last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        if self._long is not None:
            self._long.pieces.append(last)
            self._long.is_ending = True
            return
        self.transport.write(last)
        self._complete()

    def abort(self) -> None:
        """Close the connection at once: a response that has begun cannot be completed."""
        self.is_direct, self.fd = False, -1
        self.transport.abort()

    def capture(self) -> Capture:
        """Keep a copy of everything that is written from now on."""
        self.is_direct, self.fd = False, -1
        tap = Tap(self.transport)
        self.transport = tap  # type: ignore[assignment]  # implements all transport methods that exchanges use
        return tap

    def left(self) -> None:
        """Handle the loss of the connection. Handlers of clients that left at the same time run over several iterations of the loop."""
        self.disconnected = True
        self._long = None
        self._close_account()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None and not self.response_complete:
            turns = self.protocol.turns
            if turns is None:
                callback()
            else:
                turns.run(callback)

    def drop_body(self) -> None:
        """Free the body, which the handler has read or will not read; a large one in a thread."""
        held, self.body = [self.body], bytearray()
        if len(held[0]) > FREED_HERE_BYTES:
            start_in_few_threads(partial(free_buffer, held), "free", 1)
        if self.held_bytes:
            self.protocol.bodies.held -= self.held_bytes
            self.held_bytes = 0

    def probe(self) -> None:
        """Write data that the client ignores, to find out whether the peer still has the connection open."""
        if self.disconnected or self.response_complete or self._long is not None:  # Long data is a probe itself.
            return
        self.is_direct = False
        if self.is_event_stream:
            self.transport.write(COMMENT)
        elif self.takes_interim and not self.response_started:
            self.transport.write(CONTINUE)

    def start(self) -> None:
        """Run the handler; called once the request is complete and earlier ones of the connection are answered."""
        if self.is_whole and not self.disconnected:
            self.handler(self)

    def _complete(self) -> None:
        self.response_complete = True
        self.on_disconnect = None
        self._close_account()
        self.drop_body()
        self.protocol.exchanges.discard(self)
        if self.is_cut:
            self.protocol.linger()
        elif not self.keep_alive:
            self.transport.close()
        self.protocol.on_response_complete()

    def _close_account(self) -> None:
        if self.account is not None:
            self.account.close()
