"""HTTP protocol: `HttpProtocol`, a connection with its limits, gate and hot routes.

uvicorn accepts connections, parses HTTP and runs the ASGI application; `HttpProtocol` takes the few hot routes out
of that path before an ASGI scope is built. A hot handler gets an `Exchange` (`http.server.exchange`): the whole body,
and methods that write.

uvicorn handles everything else of a connection (keep-alive, pipelining, shutdown).
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httptools

from dynamo.core.memory import unwritten_buffer
from dynamo.core.uvicorn_parts import HttpToolsProtocol
from dynamo.http.server.closing import HalfClosedProbes, Lingering
from dynamo.http.server.exchange import CONTINUE, STATUS_LINES, BodyBudget, Exchange, HotHandler
from dynamo.http.server.gate import OPEN, Account, AuthDecision, Gate
from dynamo.http.server.limits import ConnectionCounts, HttpLimits
from dynamo.http.server.paced_input import InputFlow, InputTurns, PacedInput
from dynamo.http.server.request_head import (
    as_lines,
    body_too_long,
    content_length,
    has_body,
    head_too_long,
    is_head_too_long,
    without_upgrade,
)
from dynamo.http.server.tls_turns import SLICE_BYTES as TLS_SLICE_BYTES
from dynamo.serving.errors import ErrorAnswer

BODY_BYTES_FREE = 64 << 10
"""Bodies up to this size do not count against the budget of all bodies, so that large ones cannot block them."""
BODIES_FULL = ErrorAnswer(
    503,
    "The request bodies in transfer exceed the limit set by DYN_HTTP_BODIES_LIMIT_MB",
    code="too_many_uploads",
    label="overload",
    retry_after_s=1,
)

GROWN_BYTES_MAX = 1 << 20
"""Bodies whose length is known to be greater have their memory from the start: one that grows is copied on the event loop."""

FRAMING_BYTES_MAX = 1 << 20
"""Maximum bytes of chunk headers and trailers, in addition to FRAMING_SHARE_MAX for each byte of the body."""
FRAMING_SHARE_MAX = 16
"""Maximum framing bytes per byte of the body: a body in chunks of one byte has six."""

SLICE_BYTES = 1 << 10
"""Bytes parsed at a time, except within bodies: some thirty of the shortest requests."""
WHOLE_BYTES = 4 << 10
"""Maximum size of a read that is parsed at once if it has one request line."""
PIPELINE_MAX = 16
"""Requests of a connection that may wait for the responses to earlier ones; further ones are not parsed."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with a fast path for the hot routes, limits, and a gate."""

    hot_routes: Mapping[tuple[bytes, bytes], HotHandler] = {}
    """Handlers by (method, path)."""
    error_bodies: Mapping[bytes, Callable[[ErrorAnswer], bytes]] = {}
    """Formatters of paths whose errors are not in OpenAI's form."""
    limits = HttpLimits()
    connections_max = 1 << 20
    counts: ConnectionCounts
    gate: Gate | None = None
    bodies = BodyBudget()
    """Shared by all connections of a service."""
    turns: InputTurns | None = None
    """Shared by all connections of a service."""

    fd = -1
    """The socket of a connection without TLS; else -1."""
    is_in_head = False
    """True between the first byte of a request and the end of its headers."""
    head_bytes = 0
    body_bytes = 0
    """Bytes of the request's body that have arrived."""
    announced_bytes = 0
    """Length of the request's body; 0 if its head does not contain it."""
    message_bytes = 0
    """Bytes read since the request's head, including framing."""
    requests = 0
    """Number of requests that this connection has received."""
    is_stalled = False
    """True while the transport's buffer is over its high-water mark."""
    stalled_at = 0.0
    """Loop time at which the buffer exceeded the mark."""
    received_at: float | None = None
    """Loop time at which an incomplete request began to arrive, or at which a connection without one was accepted."""
    is_upgraded = False
    """Whether the rest of the connection is not HTTP."""
    is_half_closed = False
    """Whether the client has closed its sending side and waits for the response."""
    is_lingering = False
    """Whether the last response was sent and further data of the client is dropped."""
    _lingering: Lingering | None = None
    """Data that is dropped while `is_lingering`."""
    _probes: HalfClosedProbes | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchanges: set[Exchange] = set()
        """Unanswered hot requests of this connection."""
        self.accounts: set[Account] = set()
        """Accounts of its unanswered plain requests."""
        self._input = PacedInput(self, self.turns or InputTurns())

    # Connection.

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than the server writes."""
        self._set_stalled(is_stalled=True)
        self.stalled_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        self._set_stalled(is_stalled=False)
        super().resume_writing()
        for exchange in tuple(self.exchanges):
            exchange.resume()

    def _set_stalled(self, *, is_stalled: bool) -> None:
        self.is_stalled = is_stalled
        for exchange in self.exchanges:
            exchange.is_stalled = is_stalled

    def cut_slow_reader(self) -> None:
        """Drop the data of a client that has stopped reading, and end its generations."""
        self.counts.slow_readers.inc()
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Accept a client; its first byte has the same time limit as a request."""
        super().connection_made(transport)
        if self.scheme == "https":  # What waits while reading is paused is decrypted at once.
            transport.set_read_buffer_limits(TLS_SLICE_BYTES)
        else:
            self.fd = descriptor(transport)
        self.flow = InputFlow(transport)
        self.received_at = self.loop.time()
        self.counts.open.inc()
        if len(self.connections) > self.connections_max:
            self.counts.refused.inc()
            self._reject(
                ErrorAnswer(503, "Too many connections", code="too_many_connections", retry_after_s=1), lingers=False
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """End every unfinished exchange, and free the request data that no handler has taken."""
        super().connection_lost(exc)
        self._input.close()
        self.counts.open.dec()
        if self._probes is not None:
            self._probes.cancel()
            self._probes = None  # It refers to this connection.
        for exchange in list(self.exchanges):
            exchange.left()
            if not exchange.is_whole or self._is_waiting(exchange):
                exchange.drop_body()
        self.exchanges.clear()
        self.pipeline.clear()
        # Break the reference cycle with the exchange: both would stay until the garbage collector runs.
        self.cycle = None  # type: ignore[assignment]
        for account in self.accounts:
            account.close()
        self.accounts.clear()

    def sweep(self, now_s: float) -> None:
        """End a connection that exceeds a timeout: for a request, for the rest of one, or for its client to read."""
        limits = self.limits
        if self._lingering is not None:
            if self._lingering.is_over(now_s):
                self.transport.abort()
        elif self.is_stalled and 0 < limits.stalled_s < now_s - self.stalled_at:
            self.cut_slow_reader()
        elif self.pipeline or not self._input.is_empty:
            return  # Data behind a request that waits for its turn is not read.
        elif self.received_at is not None and 0 < limits.arrival_s < now_s - self.received_at:
            self.counts.late.inc()
            has_begun = self.is_in_head or (self.cycle is not None and not self.cycle.response_complete)
            if has_begun and not self._is_answering():
                self._reject(ErrorAnswer(408, "The request did not arrive in time", code="request_timeout"))
            else:
                self.transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open for the responses to complete requests, and probe it; close it if there are none."""
        cycle: Any = self.cycle
        is_waiting = cycle is not None and not cycle.response_complete and not cycle.more_body
        if self.is_lingering or self.is_in_head or not is_waiting or self.scheme == "https":
            return None
        self.is_half_closed = True
        self._probes = HalfClosedProbes(self.loop, self._probe, self.transport.is_closing)
        return True

    def _probe(self) -> None:
        for exchange in self.exchanges:
            if not self._is_waiting(exchange):
                exchange.probe()

    def on_response_complete(self) -> None:
        """Continue with the next request of the connection, if it may have one."""
        if self.is_lingering:
            return
        super().on_response_complete()
        self._input.resume()
        cycle: Any = self.cycle
        if (
            self.is_half_closed
            and not self.pipeline
            and self._input.is_empty
            and (cycle is None or cycle.response_complete)
        ):
            self.transport.close()

    def linger(self) -> None:
        """Close the connection once the client has probably read the last response (`http.server.closing`)."""
        if self.transport.is_closing() or self.is_lingering:
            return
        self.is_lingering = True
        self.received_at = None
        self._unset_keepalive_if_required()
        self._lingering = Lingering(self.loop.time(), len(self._input.clear()))
        self.release_reading()
        self.flow.resume_reading()
        cycle: Any = self.cycle
        if cycle is not None and not isinstance(cycle, Exchange):
            # Its application may still respond; nothing can be sent.
            cycle.disconnected = True
            cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def shutdown(self) -> None:
        """Close the connection, or have it closed after the responses in progress."""
        if self.is_lingering:
            self.transport.close()
        else:
            super().shutdown()

    # Arrival of a request.

    def data_received(self, data: bytes) -> None:
        """Parse data: at once, or in slices if it may contain many requests."""
        if len(data) <= WHOLE_BYTES and self._input.is_empty and self.is_ready() and data.count(b" HTTP/") <= 1:
            self.feed(data)
        else:
            self._input.add(data)

    # Input, by `PacedInput`.

    def is_ready(self) -> bool:
        """Return whether more requests may be parsed."""
        return len(self.pipeline) < PIPELINE_MAX

    def slice_bytes(self) -> int:
        """Return the size of the next slice: the rest of a body, whose length is announced, needs no slices."""
        if self.is_lingering or self.is_upgraded:
            return sys.maxsize
        is_in_body = self.received_at is not None and not self.is_in_head
        return max(SLICE_BYTES, self.announced_bytes - self.body_bytes if is_in_body else 0)

    def hold_reading(self) -> None:
        """Read no more data until all is parsed."""
        self.flow.hold()  # type: ignore[attr-defined]  # uvicorn declares the type of its own.

    def release_reading(self) -> None:
        """Read again, unless a request waits for its turn, or its application is behind."""
        self.flow.release(reads=not self.pipeline)  # type: ignore[attr-defined]

    def feed(self, data: bytes) -> None:
        """Feed the parser, and count the received bytes of the request."""
        if self.is_upgraded:
            return  # A client sends nothing before the response to its upgrade.
        if self._lingering is not None:
            self._lingering.drop(len(data), self.loop.time())
            if self._lingering.is_too_much:
                self.transport.abort()
            return
        self._read, before = data, self.requests
        super().data_received(data)
        self._read = b""
        if self._has_refused():  # While the data was parsed: no further request is read.
            return
        if self.is_in_head:
            if self.requests == before:  # Otherwise other heads precede it in the slice.
                self.head_bytes += len(data)
            if self.head_bytes > self.limits.header_bytes:
                self.is_in_head = False
                self._refuse_head()
        elif self.received_at is not None:
            self.message_bytes += len(data)
            if self.message_bytes > FRAMING_BYTES_MAX + FRAMING_SHARE_MAX * self.body_bytes:
                self.received_at = None
                self.counts.oversized.inc()
                self._reject(ErrorAnswer(400, "The body consists mostly of chunk headers or trailers"))

    def _has_refused(self) -> bool:
        """Return whether the connection only waits for the client to read the last response."""
        return self.is_lingering

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.received_at = self.loop.time()
        self.is_in_head = True
        self.head_bytes = self.body_bytes = self.message_bytes = self.announced_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Evaluate the request; an upgrade offered before a request body is ignored."""
        if self.is_lingering:
            return
        if self.parser.should_upgrade() and has_body(self.headers):
            self._again = without_upgrade(self.parser.get_method(), self.url, self.headers)
            return
        self._judge()
        self.headers = []  # Headers after the body are trailers, which are not used.

    def _judge(self) -> None:
        """Select the handler, and take a hot route out of the ASGI path."""
        self.is_in_head = False
        self.requests += 1
        if self.transport.is_closing() or self.is_lingering:
            self._begin(_ignore, keep_alive=False)
            return
        if is_head_too_long(self.url, self.headers, self.head_bytes + len(self._read), self.limits):
            self._begin(_ignore, keep_alive=False)
            self._refuse_head()
            return
        method, path = self.parser.get_method(), self.url.partition(b"?")[0]
        if not path.startswith(b"/"):  # `http://host/path`, the form of requests to a proxy, is the same path.
            path = httptools.parse_url(self.url).path or b"/"
        handler = self.hot_routes.get((method, path))
        decision = OPEN if self.gate is None else self.gate.judge(method, path, self.headers)
        if decision.refusal is not None or decision.is_preflight:
            handler = partial(_turn_away, decision)
        self.announced_bytes = length = content_length(self.headers)
        if handler is None and length <= self.limits.body_bytes:
            super().on_headers_complete()
            self._note_plain(decision)
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        is_body_too_long = length > self.limits.body_bytes
        exchange = self._begin(
            handler or _ignore, keep_alive=keep_alive and not self._is_last(), awaits_body=not is_body_too_long
        )
        exchange.takes_interim = self.parser.get_http_version() == "1.1"
        exchange.is_refused = decision.refusal is not None
        exchange.account = decision.account
        exchange.header_bytes = as_lines(decision.headers)
        exchange.error_body = self.error_bodies.get(path, ErrorAnswer.body)
        if is_body_too_long:
            self._refuse_body(exchange, body_too_long(self.limits))

    def _begin(self, handler: HotHandler, *, keep_alive: bool, awaits_body: bool = True) -> Exchange:
        """Make an exchange of the next request; it starts when the requests before it are answered."""
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
        """Collect the body of a hot request, up to the limit."""
        exchange: Any = self.cycle
        self.body_bytes += len(body)
        if not isinstance(exchange, Exchange):
            if self.body_bytes <= self.limits.body_bytes:
                super().on_body(body)
            elif not self.transport.is_closing() and not self.is_lingering:
                self.counts.oversized.inc()
                exchange.disconnected = True  # Its application reads no further.
                exchange.message_event.set()
                self._reject(body_too_long(self.limits))
        elif not exchange.response_complete and not exchange.is_refused:
            self._keep(exchange, body)

    def _keep(self, exchange: Exchange, body: bytes) -> None:
        """Add to the body of a request, within the limits of one body and of all."""
        size, announced = self.body_bytes, self.announced_bytes
        if announced <= GROWN_BYTES_MAX or announced > self.limits.body_bytes:
            exchange.body += body
        else:
            if not exchange.body:
                exchange.body = unwritten_buffer(announced)
            exchange.body[size - len(body) : size] = body
        if size > self.limits.body_bytes:
            self._refuse_body(exchange, body_too_long(self.limits))
        elif size > BODY_BYTES_FREE:
            self.bodies.held += size - exchange.held_bytes
            exchange.held_bytes = size
            if not self.bodies.has_capacity():
                self._refuse_body(exchange, BODIES_FULL)

    def on_message_complete(self) -> None:
        """Complete the request, and start it if it is its turn."""
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
        """Leave upgrades to the hot routes (`http.server.websocket`); continue to read a body behind the head.

        Java's client offers every server an upgrade to HTTP/2 in this way. The parser has left out the body because it
        expects another protocol.
        """
        stopped = sys.exc_info()[1]
        if self._again is None or not isinstance(stopped, httptools.HttpParserUpgrade):
            self.is_upgraded = True
            return
        head, self._again = self._again, None
        self.parser = httptools.HttpRequestParser(self)
        self.feed(head + self._read[stopped.args[0] :])

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    # A plain route's request: uvicorn's own cycle, with the gate's decision attached.

    def _note_plain(self, decision: AuthDecision) -> None:
        cycle: Any = self.cycle
        if self._is_last():
            cycle.keep_alive = False
        if decision.headers:
            cycle.default_headers = [*cycle.default_headers, *decision.headers]
        if decision.account is not None:
            self.accounts.add(decision.account)
            self.scope["state"]["account"] = decision.account
            cycle.on_response = partial(self._plain_complete, decision.account)

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
        """Return whether a response is in progress that another one must not interrupt or precede."""
        cycle: Any = self.cycle
        if self.pipeline:
            return True
        if cycle is None or cycle.response_complete:
            return False
        return bool(cycle.response_started or not cycle.more_body)

    def _refuse_head(self) -> None:
        self.counts.oversized.inc()
        self._reject(head_too_long(self.limits))

    def _refuse_body(self, exchange: Exchange, error: ErrorAnswer) -> None:
        """Refuse a request whose body is not read to its end, once the responses before it are complete."""
        exchange.keep_alive = False
        exchange.is_refused = exchange.is_cut = exchange.is_whole = True
        exchange.drop_body()
        exchange.handler = lambda exchange: exchange.refuse(error)
        self.counts.oversized.inc()
        self.received_at = None
        if not self._is_waiting(exchange):
            exchange.start()

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP in the same form as every other error."""
        self._reject(ErrorAnswer(400, msg))

    def _reject(self, error: ErrorAnswer, *, lingers: bool = True) -> None:
        """Send the reason why no further requests are read from this connection, and close it."""
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
    """Data that is being parsed."""
    _again: bytes | None = None
    """Head of a request with an upgrade, to be parsed again without it."""


def descriptor(transport: asyncio.Transport) -> int:
    """Return the descriptor of the transport's socket, to which writing is possible without the transport; -1 for none."""
    found = None if sys.platform == "win32" else transport.get_extra_info("socket")
    return -1 if found is None else found.fileno()


def _turn_away(decision: AuthDecision, exchange: Exchange) -> None:
    """Send the response to a request that the gate did not admit."""
    if decision.refusal is None:
        exchange.respond(204, b"", b"text/plain")
    else:
        exchange.refuse(decision.refusal)


def _ignore(exchange: Exchange) -> None:
    """Send nothing: the connection is closing."""
