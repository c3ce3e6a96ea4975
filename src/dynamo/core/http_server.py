"""HTTP server: serves one ASGI application with uvicorn, within limits on connections, heads, bodies and waits.

    server = HttpServer(application, ServerLimits(body_bytes=1 << 20))
    await server.start(bind("0.0.0.0", port, "--port")); ...; await server.close()

For small servers: the state of a process, its metrics, a JSON service. Token streams use `http.server.protocol`.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo.core.metrics_page import MetricsPage
from dynamo.core.uvicorn_parts import STATUS_LINE, Config, HttpToolsProtocol, ServerState

logger = logging.getLogger(__name__)

POLL_S = 0.01
TLS_HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one server."""

    head_bytes: int = 16_384
    body_bytes: int = 1 << 20
    connections: int = 256
    """Enough for probes, scrapers and every frontend of a large cluster."""
    idle_s: float = 30.0
    """Timeout of a connection without a complete request, and of a client that does not read its response."""
    drain_s: float = 0.0
    """Time in which `close` lets requests in progress complete."""


def plain_text(status: int, text: str) -> Response:
    """Return a plain-text response."""
    return Response(text, status, headers={"content-type": "text/plain"})


async def metrics_response(request: Request, page: MetricsPage) -> Response:
    """Return metrics in the format that the scraper accepts."""
    content_type, body = await page.respond(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


class HttpServer:
    """Server of one ASGI application, which receives request bodies whole; `refuse` makes the server's own responses."""

    def __init__(
        self,
        application: ASGIApp,
        limits: ServerLimits,
        refuse: Callable[[int, str], Response] = plain_text,
    ) -> None:
        self._application = application
        self.limits = limits
        self._refuse = refuse
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "port before start()"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._state.connections)

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept requests on a bound socket, over TLS where a context is given."""
        config = Config(
            self._serve, loop="none", lifespan="off", interface="asgi3", ws="none", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False,
        )  # fmt: skip
        config.load()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _BoundedProtocol(config, self._state, self.limits),
            sock=listener,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_S,
        )

    async def close(self) -> None:
        """Accept no more connections, let requests in progress complete within `drain_s`, then close."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_s):
                while self._state.connections:  # noqa: ASYNC110 - uvicorn keeps a set, and no event
                    await asyncio.sleep(POLL_S)
        for connection in list(self._state.connections):
            if isinstance(connection, _BoundedProtocol):
                connection.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then run the application; log what it raises, and respond with 500 if it did not."""
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            body = await _read_body(scope, receive, self.limits.body_bytes)
            if body is None:
                response = self._refuse(413, f"the body is longer than {self.limits.body_bytes} bytes")
                response.headers["connection"] = "close"  # The rest of the body is not read.
                await response(scope, receive, send)
                return
            await self._application(scope, _replay(body, receive), watched_send)
        except ClientDisconnect:
            return
        except Exception:  # Request boundary: the client gets an error response, whatever failed.
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not has_begun:
                await self._refuse(500, "Internal error")(scope, receive, send)


async def _read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes | None:
    """Return the whole body; None if it is too long. Raise `ClientDisconnect`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > bytes_max:
            return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > bytes_max:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the whole body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits, which also answers clients that half-closed their connection."""

    def __init__(self, config: Config, state: ServerState, limits: ServerLimits) -> None:
        super().__init__(config, state, {})
        self._limits = limits
        self._head_bytes = 0
        """Bytes received of a head that is incomplete."""
        self._is_half_closed = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._limits.connections:
            self._close_with(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._idle_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
            self._close_with(400, "request head too long")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the idle timeout: it covers the wait for a request, not the response."""
        super().on_message_complete()
        self._head_bytes = 0
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def on_response_complete(self) -> None:
        """Continue with the next request of the connection, if it may have one."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # The idle timeout replaces it: it also covers an incomplete request.
        if not self.pipeline and self.cycle.response_complete:
            self._wait()
            if self._is_half_closed:
                self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for the response to a whole request; without one, it is closed."""
        cycle = self.cycle
        self._is_half_closed = cycle is not None and not cycle.response_complete and not cycle.more_body
        return self._is_half_closed

    def pause_writing(self) -> None:
        """Stop writing; abort the connection if the client does not read in time."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.idle_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not a request; during a response, which it would corrupt, abort the connection."""
        self._close_with(400, msg)

    def _close_with(self, status: int, message: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(message)
        self.transport.write(STATUS_LINE[status] + head + message.encode())
        self.transport.close()

    def _wait(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(self._limits.idle_s, self.transport.close)
