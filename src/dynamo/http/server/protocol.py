"""Exchange: one HTTP request and its response, written to the transport without a layer between.

uvicorn accepts connections, parses HTTP and runs the ASGI application; `HttpProtocol` takes the few hot routes out
of that path before an ASGI scope is built. A hot handler gets an `Exchange`: the whole body, and methods that
write. A server-sent event costs one `transport.write` for all that is ready, instead of a task switch, two dicts
and two awaits for each (architecture.md §5).

Everything else about a connection (keep-alive, pipelining, shutdown) stays uvicorn's.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.server.cors import as_lines
from dynamo.http.server.gate import OPEN, Account, Gate, Passage
from dynamo.http.server.limits import Limits
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

BODY_BYTES_FREE = 64 << 10
"""Bodies up to this size do not count against the budget of all bodies, so that large ones cannot keep them out."""
BODIES_FULL = ErrorAnswer(
    503,
    "The request bodies that are arriving exceed the limit set by DYN_HTTP_BODIES_LIMIT_MB",
    code="too_many_uploads",
    label="overload",
    retry_after_s=1,
)

FRAMING_BYTES_MAX = 1 << 20
"""What chunk headers and trailers may cost beside the body, and"""
FRAMING_SHARE_MAX = 16
"""for each of its bytes: one that is sent a byte at a time costs six."""

LINGER_BYTES_MAX = 512 << 20
"""How much of a request that was refused early is read and dropped, so that its client gets to reading the refusal;"""
LINGER_S, LINGER_IDLE_S = 30.0, 5.0
"""and for how long, in all and without a byte. A connection that is closed before that is reset, refusal included."""
PROBES_S = (0.0, 0.02, 0.15, 1.0)
"""When a client that half-closed its connection is probed. Clients accept few interim responses, Go's five at most."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"
"""An event stream's comment, as an HTTP chunk."""

HotHandler = Callable[["Exchange"], None]
"""Called on the loop once a request is whole; it answers now or later, and always ends the exchange."""


class _NoEvent:
    """Stands in for the asyncio.Event that uvicorn sets on a cycle."""

    def set(self) -> None:
        """Nobody waits for it."""


class ConnectionCounts:
    """What happens to connections, counted."""

    def __init__(self, registry: MetricsRegistry, prefix: str) -> None:
        def counter(word: str, help: str) -> Any:
            return registry.counter(f"{prefix}_http_{word}_total", help).labels()

        self.open = registry.gauge(f"{prefix}_http_connections", "Connections that are open").labels()
        self.refused = counter("connections_refused", "Connections beyond DYN_HTTP_MAX_CONNECTIONS")
        self.late = counter("requests_late", "Requests that did not arrive whole in time")
        self.oversized = counter("requests_oversized", "Requests with too long headers or a too long body")
        self.slow_readers = counter("slow_readers", "Connections cut because their client did not read")


class BodyBudget:
    """Bytes of request bodies in memory, over all connections."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int = 0) -> None:
        """`bytes_max` 0: any number."""
        self.bytes_max = bytes_max
        self.held = 0

    def has_room(self) -> bool:
        """Return whether the bodies are within the limit."""
        return not self.bytes_max or self.held <= self.bytes_max


class Exchange:
    """One request on a hot route. uvicorn sees it as the connection's current cycle."""

    __slots__ = (
        "account",
        "body",
        "disconnected",
        "error_body",
        "expect_100_continue",
        "handler",
        "header_bytes",
        "headers",
        "held_bytes",
        "is_cut",
        "is_event_stream",
        "is_refused",
        "is_whole",
        "keep_alive",
        "message_event",
        "more_body",
        "on_disconnect",
        "protocol",
        "response_complete",
        "response_started",
        "takes_interim",
        "transport",
    )

    def __init__(self, protocol: "HttpProtocol", handler: HotHandler, *, keep_alive: bool) -> None:
        self.protocol = protocol
        self.transport = protocol.transport
        self.handler = handler
        self.headers: list[tuple[bytes, bytes]] = protocol.headers
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.held_bytes = 0
        """How much of the body counts against the budget of all bodies."""
        self.more_body = True
        self.is_refused = False
        """Whether the response is known already: the body is not kept."""
        self.is_cut = False
        """Whether the rest of the body is not waited for."""
        self.takes_interim = False
        """Whether interim (1xx) responses may be sent: HTTP/1.1."""
        self.is_event_stream = False
        self.is_whole = False
        self.response_started = False
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NO_EVENT
        self.account: Account | None = None
        """Whose request it is, where keys are asked for."""
        self.header_bytes = b""
        """Extra response headers, each `name: value\\r\\n`."""
        self.error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
        """How this route writes an error."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called once if the client leaves before the response is complete."""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """The whole response at once."""
        if self.disconnected or self.response_complete:
            return
        close = b"" if self.keep_alive else b"connection: close\r\n"
        head = b"%scontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
            STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
            content_type,
            len(body),
            self.header_bytes,
            close,
        )
        self.response_started = True
        self.transport.write(head + body)
        self._complete()

    def refuse(self, error: ErrorAnswer) -> None:
        """An error before anything was sent."""
        if error.retry_after_s is not None:
            self.header_bytes += b"retry-after: %d\r\n" % error.retry_after_s
        self.respond(error.status, self.error_body(error))

    def write(self, data: bytes) -> None:
        """Some events of a stream; the first call sends the status and the headers with them."""
        if not data:
            return  # An empty chunk would end the response.
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if not self.response_started:
            self.response_started = self.is_event_stream = True
            close = b"" if self.keep_alive else b"connection: close\r\n"
            chunk = b"%b%b%b\r\n%b" % (EVENT_STREAM, self.header_bytes, close, chunk)
        self.write_chunk(chunk)

    def open(self, content_type: bytes) -> None:
        """Begins a stream that is none of events; `write` follows in the same turn of the loop."""
        if self.disconnected or self.response_started:
            return
        self.response_started = True
        close = b"" if self.keep_alive else b"connection: close\r\n"
        head = b"%bcontent-type: %b\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n%b%b\r\n"
        self.transport.write(head % (STATUS_LINE[200], content_type, self.header_bytes, close))

    def write_chunk(self, chunk: bytes) -> None:
        """Some events, framed already, of a stream that `write` has begun."""
        if self.disconnected or self.response_complete:
            return
        self.transport.write(chunk)
        if self.protocol.is_stalled and self.transport.get_write_buffer_size() > self.protocol.limits.unsent_bytes:
            self.protocol.cut_slow_reader()

    def end(self, data: bytes = b"") -> None:
        """The last events of a stream."""
        if self.disconnected or self.response_complete:
            return
        if not self.response_started:
            self.write(data)
            data = b""
        if data:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self.transport.write(b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        """Close the connection at once: a response that has begun cannot be completed."""
        self.transport.abort()

    def capture(self) -> Capture:
        """Keep a copy of everything that is written from now on."""
        tap = Tap(self.transport)
        self.transport = tap  # type: ignore[assignment]  # a transport as far as exchanges use one
        return tap

    def left(self) -> None:
        """The connection is gone."""
        self.disconnected = True
        self._close_account()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None and not self.response_complete:
            callback()

    def drop_body(self) -> None:
        """Free the body: its handler has read it, or it will not be read."""
        self.body = bytearray()
        if self.held_bytes:
            self.protocol.bodies.held -= self.held_bytes
            self.held_bytes = 0

    def probe(self) -> None:
        """Write what a client ignores, to find out whether the peer still has the connection open."""
        if self.disconnected or self.response_complete:
            return
        if self.is_event_stream:
            self.transport.write(COMMENT)
        elif self.takes_interim and not self.response_started:
            self.transport.write(CONTINUE)

    def start(self) -> None:
        """Runs the handler, once the request is whole and it is its turn."""
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


_NO_EVENT = _NoEvent()


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with a short way for the hot routes, limits, and a gate."""

    hot_routes: Mapping[tuple[bytes, bytes], HotHandler] = {}
    """(method, path) to handler."""
    error_bodies: Mapping[bytes, Callable[[ErrorAnswer], bytes]] = {}
    """Paths whose errors look otherwise than OpenAI's."""
    limits = Limits()
    connections_max = 1 << 20
    counts: ConnectionCounts
    gate: Gate | None = None
    bodies = BodyBudget()
    """Shared by all connections of a service."""

    is_in_head = False
    """True between the first byte of a request and the end of its headers."""
    head_bytes = 0
    body_bytes = 0
    """How much of the request's body has come."""
    message_bytes = 0
    """How much was read since its head, whatever it was."""
    requests = 0
    """How many requests this connection has brought."""
    is_stalled = False
    """True while the transport's buffer is over its high-water mark."""
    stalled_at = 0.0
    """The loop's time at which it went over it."""
    received_at: float | None = None
    """The loop's time at which an unfinished request began to arrive, or the connection on which none has yet."""
    is_half_closed = False
    """Whether the client has ended its side, and waits for the response."""
    is_lingering = False
    """Whether the last response was sent, and what the client still sends is dropped."""
    linger_bytes = 0
    lingers_since = 0.0
    lingered_at = 0.0
    """The loop's time of the last byte that was dropped."""
    _probing: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchanges: set[Exchange] = set()
        """The hot requests of this connection that are not answered yet."""
        self.accounts: set[Account] = set()
        """The accounts of its plain requests that are not answered yet."""

    # The connection.

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.is_stalled = True
        self.stalled_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client caught up."""
        self.is_stalled = False
        super().resume_writing()

    def cut_slow_reader(self) -> None:
        """The client has stopped reading: what waits for it is dropped, and its generations end."""
        self.counts.slow_readers.inc()
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """A client is there; it has as long for its first byte as for the rest."""
        super().connection_made(transport)
        self.received_at = self.loop.time()
        self.counts.open.inc()
        if len(self.connections) > self.connections_max:
            self.counts.refused.inc()
            self._reject(
                ErrorAnswer(503, "Too many connections", code="too_many_connections", retry_after_s=1), lingers=False
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """End every unfinished exchange, and free what of its requests no handler has."""
        super().connection_lost(exc)
        self.counts.open.dec()
        if self._probing is not None:
            self._probing.cancel()
        for exchange in list(self.exchanges):
            exchange.left()
            if not exchange.is_whole or self._is_waiting(exchange):
                exchange.drop_body()
        self.exchanges.clear()
        self.pipeline.clear()
        # The exchange refers to this connection: without this, both stay until the garbage collector looks for cycles.
        self.cycle = None  # type: ignore[assignment]
        for account in self.accounts:
            account.close()
        self.accounts.clear()

    def sweep(self, now_s: float) -> None:
        """Ends what waits too long: for a request, for the rest of one, or for its client to read."""
        limits = self.limits
        if self.is_lingering:
            if now_s - self.lingers_since > LINGER_S or now_s - self.lingered_at > LINGER_IDLE_S:
                self.transport.abort()
        elif self.is_stalled and 0 < limits.stalled_s < now_s - self.stalled_at:
            self.cut_slow_reader()
        elif self.pipeline:
            return  # We do not read what comes behind a request that waits for its turn.
        elif self.received_at is not None and 0 < limits.arrival_s < now_s - self.received_at:
            self.counts.late.inc()
            has_begun = self.is_in_head or (self.cycle is not None and not self.cycle.response_complete)
            if has_begun and not self._is_answering():
                self._reject(ErrorAnswer(408, "The request did not arrive in time", code="request_timeout"))
            else:
                self.transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for the responses to whole requests; without one, it is closed.

        A client that only ended its side and one that closed the connection look the same here; writing to the latter
        fails once its reset has come, so that it is probed.
        """
        cycle: Any = self.cycle
        is_waiting = cycle is not None and not cycle.response_complete and not cycle.more_body
        if self.is_lingering or self.is_in_head or not is_waiting or self.scheme == "https":
            return None
        self.is_half_closed = True
        self._probe(0)
        return True

    def _probe(self, number: int) -> None:
        for exchange in self.exchanges:
            if not self._is_waiting(exchange):
                exchange.probe()
        if number + 1 < len(PROBES_S) and not self.transport.is_closing():
            wait_s = PROBES_S[number + 1] - PROBES_S[number]
            self._probing = self.loop.call_later(wait_s, self._probe, number + 1)

    def on_response_complete(self) -> None:
        """Go on with the next request of the connection, if it may have one."""
        if self.is_lingering:
            return
        super().on_response_complete()
        cycle: Any = self.cycle
        if self.is_half_closed and not self.pipeline and (cycle is None or cycle.response_complete):
            self.transport.close()

    def linger(self) -> None:
        """Close the connection once the client has read the last response, as far as that can be known.

        To close it while the client sends resets it, and the client loses a response that it has not read.
        """
        if self.transport.is_closing() or self.is_lingering:
            return
        self.is_lingering = True
        self.received_at = None
        self.lingers_since = self.lingered_at = self.loop.time()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def shutdown(self) -> None:
        """Close the connection, or have it closed after the responses under way."""
        if self.is_lingering:
            self.transport.close()
        else:
            super().shutdown()

    # A request as it arrives.

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; counts what of a request's head is there."""
        if self.is_lingering:
            self.linger_bytes += len(data)
            self.lingered_at = self.loop.time()
            if self.linger_bytes > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        self._read = data
        super().data_received(data)
        self._read = b""
        if self.is_in_head:
            self.head_bytes += len(data)
            if self.head_bytes > self.limits.header_bytes:
                self.is_in_head = False
                self._refuse_head()
        elif self.received_at is not None:
            self.message_bytes += len(data)
            if self.message_bytes > FRAMING_BYTES_MAX + FRAMING_SHARE_MAX * self.body_bytes:
                self.received_at = None
                self.counts.oversized.inc()
                self._reject(ErrorAnswer(400, "The body is nearly all chunk headers or trailers"))

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        self.received_at = self.loop.time()
        self.is_in_head = True
        self.head_bytes = self.body_bytes = self.message_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Judges the request; one that asks for another protocol before it sends its body is read as if it did not."""
        if self.parser.should_upgrade() and self._has_body():
            self._again = self._head_without_upgrade()
            return
        self._judge()
        self.headers = []  # What comes after the body are trailers, which nobody asked for.

    def _judge(self) -> None:
        """Decides who answers, and takes a hot route out of the ASGI path."""
        self.is_in_head = False
        self.requests += 1
        if self.transport.is_closing() or self.is_lingering:
            self._begin(_ignore, keep_alive=False)
            return
        if self._is_head_too_long():
            self._begin(_ignore, keep_alive=False)
            self._refuse_head()
            return
        method, path = self.parser.get_method(), self.url.partition(b"?")[0]
        if not path.startswith(b"/"):  # `http://host/path` is the same path, as a proxy is asked for it.
            path = httptools.parse_url(self.url).path or b"/"
        handler = self.hot_routes.get((method, path))
        passage = OPEN if self.gate is None else self.gate.judge(method, path, self.headers)
        if passage.refusal is not None or passage.is_preflight:
            handler = partial(_turn_away, passage)
        length = self._content_length()
        if handler is None and length <= self.limits.body_bytes:
            super().on_headers_complete()
            self._note_plain(passage)
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        is_too_long = length > self.limits.body_bytes
        exchange = self._begin(
            handler or _ignore, keep_alive=keep_alive and not self._is_last(), awaits_body=not is_too_long
        )
        exchange.takes_interim = self.parser.get_http_version() == "1.1"
        exchange.is_refused = passage.refusal is not None
        exchange.account = passage.account
        exchange.header_bytes = as_lines(passage.headers)
        exchange.error_body = self.error_bodies.get(path, ErrorAnswer.body)
        if is_too_long:
            self._refuse_body(exchange, self._body_too_long())

    def _begin(self, handler: HotHandler, *, keep_alive: bool, awaits_body: bool = True) -> Exchange:
        """The next request is an exchange; it has its turn when those before it are answered."""
        exchange: Any = Exchange(self, handler, keep_alive=keep_alive)
        before, self.cycle = self.cycle, exchange
        self.exchanges.add(exchange)
        if before is not None and not before.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))
        elif self.expect_100_continue and awaits_body and not self.is_lingering and not self.transport.is_closing():
            self.transport.write(CONTINUE)
        return exchange  # type: ignore[no-any-return]

    def on_body(self, body: bytes) -> None:
        """Gathers the body of a hot request, up to the limit."""
        exchange: Any = self.cycle
        self.body_bytes += len(body)
        if not isinstance(exchange, Exchange):
            if self.body_bytes <= self.limits.body_bytes:
                super().on_body(body)
            elif not self.transport.is_closing() and not self.is_lingering:
                self.counts.oversized.inc()
                exchange.disconnected = True  # Its application reads no further.
                exchange.message_event.set()
                self._reject(self._body_too_long())
        elif not exchange.response_complete and not exchange.is_refused:
            self._keep(exchange, body)

    def _keep(self, exchange: Exchange, body: bytes) -> None:
        """Add to the body of a request, within the limits of one body and of all."""
        exchange.body += body
        size = len(exchange.body)
        if size > self.limits.body_bytes:
            self._refuse_body(exchange, self._body_too_long())
        elif size > BODY_BYTES_FREE:
            self.bodies.held += size - exchange.held_bytes
            exchange.held_bytes = size
            if not self.bodies.has_room():
                self._refuse_body(exchange, BODIES_FULL)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._again is not None:
            return
        self.received_at = None
        exchange: Any = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_message_complete()
        elif not exchange.response_complete and not exchange.is_cut:
            exchange.is_whole = True
            exchange.more_body = False
            if not self._is_waiting(exchange):
                exchange.start()

    def _unsupported_upgrade_warning(self) -> None:
        """What may be upgraded is a hot route's to decide (`llm.http.websocket`); a body behind the head is read on.

        Java's client asks every server for HTTP/2 like that. The parser, which waits for another protocol then, has
        left the body out.
        """
        stopped = sys.exc_info()[1]
        if self._again is None or not isinstance(stopped, httptools.HttpParserUpgrade):
            return
        head, self._again = self._again, None
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + self._read[stopped.args[0] :])

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    # A plain route's request: uvicorn's own cycle, which learns what was decided of it.

    def _note_plain(self, passage: Passage) -> None:
        cycle: Any = self.cycle
        if self._is_last():
            cycle.keep_alive = False
        if passage.headers:
            cycle.default_headers = [*cycle.default_headers, *passage.headers]
        if passage.account is not None:
            self.accounts.add(passage.account)
            self.scope["state"]["account"] = passage.account
            cycle.on_response = partial(self._plain_complete, passage.account)

    def _plain_complete(self, account: Account) -> None:
        account.close()
        self.accounts.discard(account)
        self.on_response_complete()

    # Refusals.

    def _is_waiting(self, exchange: Any) -> bool:
        """Return whether a request waits for the responses to those before it."""
        return any(cycle is exchange for cycle, _ in self.pipeline)

    def _is_last(self) -> bool:
        return 0 < self.limits.requests_per_connection <= self.requests

    def _is_answering(self) -> bool:
        """Whether an answer is under way that another one must not be written into, or before."""
        cycle: Any = self.cycle
        if self.pipeline:
            return True
        if cycle is None or cycle.response_complete:
            return False
        return bool(cycle.response_started or not cycle.more_body)

    def _content_length(self) -> int:
        for name, value in self.headers:
            if name == b"content-length":
                return int(value) if value.isdigit() else 0
        return 0

    def _has_body(self) -> bool:
        return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in self.headers)  # fmt: skip

    def _head_without_upgrade(self) -> bytes:
        """The head of the request, but for what asks for another protocol."""
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self.parser.get_method(), self.url, as_lines(kept))

    def _is_head_too_long(self) -> bool:
        limits, headers = self.limits, self.headers
        if len(headers) > limits.headers:
            return True
        if self.head_bytes + len(self._read) <= limits.header_bytes:
            return False
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers) > limits.header_bytes

    def _refuse_head(self) -> None:
        self.counts.oversized.inc()
        most = f"{self.limits.headers} headers, {self.limits.header_bytes >> 10} KB"
        self._reject(ErrorAnswer(431, f"The headers exceed the limit of {most}", code="headers_too_large"))

    def _body_too_long(self) -> ErrorAnswer:
        message = f"Request body exceeds the limit of {self.limits.body_bytes >> 20} MB set by DYN_HTTP_BODY_LIMIT_MB"
        return ErrorAnswer(413, message, code="payload_too_large", label="validation")

    def _refuse_body(self, exchange: Exchange, error: ErrorAnswer) -> None:
        """Refuse a request whose body is not read to its end, when it is its turn."""
        exchange.keep_alive = False
        exchange.is_refused = exchange.is_cut = exchange.is_whole = True
        exchange.drop_body()
        exchange.handler = lambda exchange: exchange.refuse(error)
        self.counts.oversized.inc()
        self.received_at = None
        if not self._is_waiting(exchange):
            exchange.start()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is answered in the same form as every other error."""
        self._reject(ErrorAnswer(400, msg))

    def _reject(self, error: ErrorAnswer, *, lingers: bool = True) -> None:
        """Send why no request is read from this connection any more, and close it."""
        if self._is_answering():
            self.transport.abort()
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINES[error.status] + head + body)
        if lingers:
            self.linger()
        else:
            self.transport.close()

    _read = b""
    """What is being parsed."""
    _again: bytes | None = None
    """The head of a request that asked for another protocol, to be read again without that."""


def _turn_away(passage: Passage, exchange: Exchange) -> None:
    """The answer to a request that the gate did not let pass."""
    if passage.refusal is None:
        exchange.respond(204, b"", b"text/plain")
    else:
        exchange.refuse(passage.refusal)


def _ignore(exchange: Exchange) -> None:
    """Nothing is answered any more: the connection is closing."""
