"""Embedded frontend: models, pipeline and servers inside another program, from start to stop."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo.core.config import setting
from dynamo.core.listening import bind
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.extensions import FrontendRoute
from dynamo.http.routes.groups import GROUPS
from dynamo.http.routes.table import RouteGroup
from dynamo.http.server.service import FrontendServer, HttpOptions
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import MigrationPolicy
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline

logger = logging.getLogger(__name__)

DISCOVERY_WAIT_S = 5.0  # Models that were published before the start are served from the first request on.


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """Options of one frontend."""

    host: str = "0.0.0.0"  # noqa: S104 - upstream's default
    port: int | None = 8080
    """Port of HTTP, None for no HTTP."""
    port_option: str = "--http-port"
    """Name of that option in errors."""
    tls: ssl.SSLContext | None = None
    router_mode: str = "round-robin"
    namespace: str | None = None
    namespace_prefix: str | None = None
    metrics_prefix: str = "dynamo_frontend"
    migration: MigrationPolicy = field(default_factory=MigrationPolicy)
    extensions: Sequence[FrontendRoute] = ()
    groups: Sequence[RouteGroup] = GROUPS
    """Groups of HTTP routes."""


class ProtocolServer(Protocol):
    """Server of another protocol than HTTP."""

    async def start(self) -> None:
        """Start to serve requests."""

    async def stop(self, budget_s: float) -> None:
        """Refuse new requests, let those in progress end within the budget, and close."""


class ServedFrontend:
    """Frontend over a runtime's models, from `start` to `stop`."""

    def __init__(self, runtime: DistributedRuntime, options: FrontendOptions, registry: MetricsRegistry) -> None:
        self._options = options
        metrics = FrontendMetrics(registry, options.metrics_prefix)
        self.is_sound = runtime.health.is_sound
        self.models = Models(
            runtime,
            metrics,
            router_mode=options.router_mode,
            namespace=options.namespace,
            namespace_prefix=options.namespace_prefix,
        )
        self.pipeline = Pipeline(self.models, metrics, options.migration)
        self.servers: list[ProtocolServer] = []
        """Servers of other protocols over the same models, started before HTTP."""
        http = HttpOptions(metrics_prefix=options.metrics_prefix, extensions=options.extensions, groups=options.groups)
        self._http = FrontendServer(self.pipeline, self.models, registry, self.is_sound, http)

    async def start(self, listener: socket.socket | None = None) -> int:
        """Start to serve requests; return the port of HTTP, 0 without. Raise `ConfigError` if a port cannot be bound.

        `listener`: bound socket for HTTP, instead of the port of the options.
        """
        if listener is None and self._options.port is not None:
            listener = bind(self._options.host, self._options.port, self._options.port_option)
        self.models.start()
        await self.models.wait_synced(DISCOVERY_WAIT_S)
        for server in self.servers:
            await server.start()
        if listener is None:
            return 0
        await self._http.start(listener, self._options.tls)
        host, port = listener.getsockname()[:2]
        logger.info("frontend ready: http://%s:%d", host, port)
        return int(port)

    async def stop(self) -> None:
        """Refuse new requests, wait up to `DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS` for active ones, and close."""
        budget_s = setting("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 5.0, float)
        await asyncio.gather(self._http.stop(budget_s), *(server.stop(budget_s) for server in self.servers))
        await self.models.close()


async def run_frontend(frontend: ServedFrontend, *ends: asyncio.Event, listener: socket.socket | None = None) -> None:
    """Start the frontend, wait for one of the events, and stop it."""
    waits = [asyncio.ensure_future(end.wait()) for end in ends]
    try:
        await frontend.start(listener)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
        await frontend.stop()
