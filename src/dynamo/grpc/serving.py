"""Embedded KServe frontend: models, pipeline and gRPC service inside another program, from start to stop."""

import asyncio

from dynamo.core.config import setting
from dynamo.core.metrics import MetricsRegistry
from dynamo.grpc.service import KserveOptions, KserveService
from dynamo.http.embedded import DISCOVERY_WAIT_S, FrontendOptions
from dynamo.http.routes.metrics_group import metrics_group
from dynamo.http.server.service import HttpOptions, HttpService, bind
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline


class ServedKserve:
    """KServe frontend over a runtime's models, from `start` to `stop`."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        options: FrontendOptions,
        grpc_options: KserveOptions,
        registry: MetricsRegistry,
        metrics_port: int | None = None,
    ) -> None:
        """`metrics_port`: port of metrics and health, None for no such port."""
        self._options = options
        self._metrics_port = metrics_port
        metrics = FrontendMetrics(registry, options.metrics_prefix)
        self._models = Models(
            runtime,
            metrics,
            router_mode=options.router_mode,
            namespace=options.namespace,
            namespace_prefix=options.namespace_prefix,
        )
        self._pipeline = Pipeline(self._models, metrics, options.migration)
        self._service = KserveService(self._pipeline, self._models, runtime.health.is_sound, grpc_options)
        http = HttpOptions(metrics_prefix=options.metrics_prefix, groups=(metrics_group,))
        self._http = HttpService(self._pipeline, self._models, registry, runtime.health.is_sound, http)

    def bind(self) -> int:
        """Bind the port and return it. Raise `ConfigError` if it cannot be bound."""
        return self._service.bind()

    async def start(self) -> None:
        """Start to serve requests. Raise `ConfigError` if a port cannot be bound."""
        self._models.start()
        await self._models.wait_synced(DISCOVERY_WAIT_S)
        await self._service.start()
        if self._metrics_port is not None:
            listener = bind(self._options.host, self._metrics_port, flag="http_metrics_port")
            await self._http.start(listener, self._options.tls)

    async def stop(self) -> None:
        """Refuse new requests, wait up to `DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS` for active ones, and close."""
        budget_s = setting("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 5.0, float)
        await asyncio.gather(self._service.stop(budget_s), self._http.stop(budget_s))
        await self._models.close()


async def run_kserve(frontend: ServedKserve, *ends: asyncio.Event) -> None:
    """Start the frontend, wait for one of the events, and stop it."""
    waits = [asyncio.ensure_future(end.wait()) for end in ends]
    try:
        await frontend.start()
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
        await frontend.stop()
