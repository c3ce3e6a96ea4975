"""Embedded frontend: models, pipeline and HTTP service inside another program, from start to stop."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.core.config import setting
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.extensions import FrontendRoute
from dynamo.http.server.service import HttpOptions, HttpService, bind
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
    port: int = 8080
    tls: ssl.SSLContext | None = None
    router_mode: str = "round-robin"
    namespace: str | None = None
    namespace_prefix: str | None = None
    metrics_prefix: str = "dynamo_frontend"
    migration: MigrationPolicy = field(default_factory=MigrationPolicy)
    extensions: Sequence[FrontendRoute] = ()


class ServedFrontend:
    """Frontend over a runtime's models, from `start` to `stop`."""

    def __init__(self, runtime: DistributedRuntime, options: FrontendOptions, registry: MetricsRegistry) -> None:
        self._options = options
        metrics = FrontendMetrics(registry, options.metrics_prefix)
        self._models = Models(
            runtime,
            metrics,
            router_mode=options.router_mode,
            namespace=options.namespace,
            namespace_prefix=options.namespace_prefix,
        )
        self._pipeline = Pipeline(self._models, metrics, options.migration)
        http = HttpOptions(metrics_prefix=options.metrics_prefix, extensions=options.extensions)
        self._service = HttpService(self._pipeline, self._models, registry, runtime.health.is_sound, http)

    async def start(self, listener: socket.socket | None = None) -> int:
        """Start to serve requests; return the port. Raise `ConfigError` if the port cannot be bound."""
        if listener is None:
            listener = bind(self._options.host, self._options.port)
        self._models.start()
        await self._models.wait_synced(DISCOVERY_WAIT_S)
        await self._service.start(listener, self._options.tls)
        host, port = listener.getsockname()[:2]
        logger.info("frontend ready: http://%s:%d", host, port)
        return int(port)

    async def stop(self) -> None:
        """Refuse new requests, wait up to `DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS` for active ones, and close."""
        await self._service.stop(setting("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 5.0, float))
        await self._models.close()


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
