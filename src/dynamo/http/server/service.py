"""HTTP service: the listening socket, its routes and its shutdown.

The token routes run on `Exchange`s (`http.server.exchange`); everything else is a small Starlette application.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tls import PemFile, TlsIdentity, server_context
from dynamo.core.uvicorn_parts import Config, ServerState
from dynamo.http.extensions import FrontendRoute
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.table import RouteContext, RouteGroup, refuse, routes_of
from dynamo.http.server.cors import Cors
from dynamo.http.server.exchange import BodyBudget
from dynamo.http.server.gate import Gate, KeyMetrics, Keys
from dynamo.http.server.limits import ConnectionCounts, HttpLimits
from dynamo.http.server.paced_input import InputTurns
from dynamo.http.server.protocol import HttpProtocol
from dynamo.http.server.siblings import Siblings
from dynamo.http.server.tls_turns import HANDSHAKE_S, tls_connections
from dynamo.serving.errors import CLIENT_CLOSED_REQUEST, ErrorAnswer, answer_to
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.text.request_template import RequestTemplate

logger = logging.getLogger(__name__)

SWEEP_S = 2.0
COMMIT_S = 0.05
"""Shortest interval of `_commit`."""


class HttpOptions(Struct, frozen=True):
    """Options of one service."""

    groups: Sequence[RouteGroup]
    """Groups of routes that it serves."""
    limits: HttpLimits = field(default_factory=HttpLimits.from_environment)
    cors: Cors | None = None
    keys: Keys | None = None
    metrics_prefix: str = "dynamo_frontend"
    apis: ApiOptions = field(default_factory=ApiOptions)
    template: RequestTemplate | None = None
    extensions: Sequence[FrontendRoute] = ()
    siblings: Siblings | None = None
    """The other processes that share the port."""
    identity: TlsIdentity | None = None
    """Certificate of the listener, reloaded while it serves."""


class FrontendServer:
    """The frontend's HTTP server."""

    def __init__(
        self,
        pipeline: Pipeline,
        models: Models,
        registry: MetricsRegistry,
        is_sound: Callable[[], bool],
        options: HttpOptions,
    ) -> None:
        """`is_sound` returns whether all required background tasks are running; `/health` calls it."""
        self._options = options
        self._counts = ConnectionCounts(registry, self._options.metrics_prefix)
        self._bodies = BodyBudget(self._options.limits.bodies_bytes)
        held = registry.gauge(f"{self._options.metrics_prefix}_http_body_bytes", "Request bodies in memory")
        held.labels().follow(lambda: self._bodies.held)
        self._key_metrics = KeyMetrics(registry, self._options.metrics_prefix)
        self._pipeline = pipeline
        self._models = models
        chosen = self._options
        context = RouteContext(
            pipeline,
            models,
            registry,
            is_sound,
            apis=chosen.apis,
            metrics_prefix=chosen.metrics_prefix,
            template=chosen.template,
            extensions=chosen.extensions,
            siblings=chosen.siblings,
            keys=chosen.keys,
        )
        self._routes = routes_of(context, chosen.groups)
        self._server: asyncio.Server | None = None
        self._state = ServerState()
        self._sweeper: asyncio.TimerHandle | None = None
        self._committer: asyncio.TimerHandle | None = None
        self._commenter: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept requests on a bound socket."""
        config = Config(
            self._application(), loop="none", lifespan="off", interface="asgi3", ws="none", log_config=None, access_log=False,
            proxy_headers=False, timeout_keep_alive=self._options.limits.keep_alive_s,  # type: ignore[arg-type]
        )  # fmt: skip
        config.load()
        loop, make = asyncio.get_running_loop(), partial(self._protocol_class(), config, self._state, {})
        paced = None if tls is None else tls_connections(loop, make, tls)
        plain = tls is None or paced is not None
        self._server = await loop.create_server(
            paced or make,
            sock=listener,
            ssl=None if plain else tls,
            ssl_handshake_timeout=None if plain else HANDSHAKE_S,
            backlog=setting("DYN_HTTP_LISTEN_BACKLOG", 4096, int),
        )
        if self._options.siblings is not None:
            await self._options.siblings.start()
        for begin in self._routes.on_start:
            begin()
        self._sweep()
        self._commit()
        if self._options.limits.comment_s > 0:
            self._keep_alive()

    async def stop(self, budget_s: float) -> None:
        """Refuse new requests, let those in progress end within the budget, and close."""
        await self._pipeline.drain(budget_s)
        for timer in (self._sweeper, self._committer, self._commenter):
            if timer is not None:
                timer.cancel()
        if self._options.siblings is not None:
            await self._options.siblings.close()
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        for close in self._routes.on_stop:
            await close()

    def _protocol_class(self) -> type[HttpProtocol]:
        options, gate = self._options, None
        if options.keys is not None or options.cors is not None:
            gate = Gate(self._routes.open_paths(), self._key_metrics, cors=options.cors, keys=options.keys)
        values = {
            "hot_routes": self._routes.hot_handlers(),
            "error_bodies": self._routes.error_bodies(),
            "limits": options.limits,
            "connections_max": options.limits.connections_max(),
            "counts": self._counts,
            "gate": gate,
            "bodies": self._bodies,
            "turns": InputTurns(),
        }
        return type("FrontendProtocol", (HttpProtocol,), values)

    def _sweep(self) -> None:
        """End connections and requests that exceed a timeout, and reload changed keys and certificates."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in list(self._state.connections):
            if isinstance(connection, HttpProtocol):
                connection.sweep(now_s)
        if self._options.limits.silence_s > 0:
            self._pipeline.abandon(self._options.limits.silence_s)
        if self._options.limits.request_s > 0:
            self._pipeline.expire(self._options.limits.request_s)
        self._pipeline.metrics.keep_workers({worker for one in self._models.every_set() for worker in one.worker_ids()})
        if self._options.keys is not None:
            self._options.keys.refresh()
        if self._options.identity is not None:
            self._options.identity.refresh()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def _commit(self) -> None:
        """Send the status of streams that wait for their first event, a tenth of the time or 50 ms late at most."""
        wait_s = self._options.limits.peek_s
        self._pipeline.commit(wait_s)
        self._committer = asyncio.get_running_loop().call_later(max(wait_s / 10, COMMIT_S), self._commit)

    def _keep_alive(self) -> None:
        """Write comments into idle streams, at most half an interval late."""
        interval_s = self._options.limits.comment_s
        self._pipeline.keep_alive(interval_s)
        self._commenter = asyncio.get_running_loop().call_later(interval_s / 2, self._keep_alive)

    def _application(self) -> Starlette:
        handlers: dict[Any, Any] = {HTTPException: not_served, Exception: crashed}
        application = Starlette(routes=self._routes.starlette_routes(), exception_handlers=handlers)
        application.router.redirect_slashes = False  # The redirect would contain the client's own `host` header.
        return application


def tls_context(certificate: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    """Return the TLS settings of the listener, None for plain HTTP. Raise `ConfigError`."""
    if certificate is None and key is None:
        if client_ca is not None:
            raise ConfigError("--tls-client-ca-cert-path requires --tls-cert-path and --tls-key-path")
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert-path and --tls-key-path must be given together")
    return server_context(*_identity_files(certificate, key), PemFile("--tls-client-ca-cert-path", client_ca or ""))


def tls_identity(context: ssl.SSLContext, certificate: str | None, key: str | None) -> TlsIdentity:
    """Return the object that reloads the listener's certificate when it was renewed."""
    return TlsIdentity(context, *_identity_files(certificate or "", key or ""))


def _identity_files(certificate: str, key: str) -> tuple[PemFile, PemFile]:
    return PemFile("--tls-cert-path", certificate), PemFile("--tls-key-path", key)


def not_served(request: Request, error: Exception) -> Response:
    """Return the error of an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return refuse(ErrorAnswer(404, f"Route not found: {request.method} {request.url.path}", code="route_not_found"))
    answer = refuse(ErrorAnswer(error.status_code, f"{request.method} is not allowed on {request.url.path}"))
    answer.headers.update(error.headers or {})
    return answer


def crashed(request: Request, error: Exception) -> Response:
    """Log an unexpected error with its traceback, and return a 500 without it; ignore clients that disconnected."""
    if isinstance(error, ClientDisconnect):
        return refuse(ErrorAnswer(CLIENT_CLOSED_REQUEST, "The client disconnected"))
    logger.error("request failed: %s %s", request.method, request.url.path, exc_info=error)
    return refuse(answer_to(error))
