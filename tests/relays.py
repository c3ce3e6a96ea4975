"""RelayCluster: a frontend's pipeline and Python workers of any model type in one process, and a client that calls
them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.scripted_engine.stack import DEADLINE_S, Answer, Wire, parse
from tests.settle import until

from dynamo.core.codec import json_encode
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.table import RouteContext, RouteGroup, RouteTable
from dynamo.http.server.exchange import Exchange
from dynamo.llm.register import register_model
from dynamo.model_card.runtime_config import ModelRuntimeConfig
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.routing.settings import KvRouterOptions
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.runtime.streams import GeneratorHandler
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline

Handler = Callable[..., AsyncIterator[Any]]

NEEDS = {
    WorkerType.Aggregated: [],
    WorkerType.Prefill: [[WorkerType.Decode]],
    WorkerType.Decode: [[WorkerType.Prefill]],
}
"""Worker types that each type depends on."""


class RelayCluster:
    """A frontend, and the requests that its workers received."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        worker: DistributedRuntime,
        group: RouteGroup,
        router_mode: str = "round-robin",
        **options: Any,
    ) -> None:
        """Create the frontend; `options` are those of `Models`."""
        self.worker = worker
        self.registry = MetricsRegistry()
        self.metrics = FrontendMetrics(self.registry)
        options.setdefault("kv_options", KvRouterOptions(use_kv_events=False))
        self.models = Models(runtime, self.metrics, router_mode=router_mode, **options)
        self.pipeline = Pipeline(self.models, self.metrics)
        self.table = RouteTable()
        group(self.table, RouteContext(self.pipeline, self.models, self.registry, lambda: True))
        self.runtime: Callable[[], DistributedRuntime] = DistributedRuntime
        """Factory of runtimes for further workers."""
        self.received_requests: list[Any] = []
        self.ended = asyncio.Event()
        """Set when a handler was cancelled before its end."""

    async def serve(
        self,
        name: str,
        kind: ModelType,
        handler: Handler,
        *,
        directory: str | None = None,
        data: Mapping[str, Any] | None = None,
        worker: DistributedRuntime | None = None,
        role: WorkerType = WorkerType.Aggregated,
    ) -> None:
        """Serve a model with a handler, on `worker` or on the shared runtime; with `directory` it receives tokens."""
        worker = worker or self.worker

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            self.received_requests.append(request)
            try:
                async for one in handler(request):
                    yield one
            except GeneratorExit:
                self.ended.set()
                raise

        component = "prefill" if role == WorkerType.Prefill else name
        endpoint = worker.endpoint(f"tests.{component}.generate")
        config = ModelRuntimeConfig()
        for key, value in (data or {}).items():
            config.set_engine_specific(key, value)
        await register_model(
            ModelInput.Text if directory is None else ModelInput.Tokens,
            kind,
            endpoint,
            directory or name,
            name,
            worker_type=role,
            needs=NEEDS[role],
            runtime_config=config,
            skip_model_assets=directory is None,
        )
        await endpoint.serve(GeneratorHandler(generate, worker.tasks))
        await until(lambda: worker.instance_id in self._present(name), f"{name} is not served")

    def _present(self, name: str) -> list[int]:
        return [one for served in self.models.every_set() if served.name == name for one in served.worker_ids()]

    def begin(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> tuple[Exchange, Wire]:
        """Start a request and return its exchange and wire."""
        handler = self.table.hot_handlers()[method.encode(), path.encode()]
        wire = Wire(headers or {})
        exchange = Exchange(wire, handler, keep_alive=True)  # type: ignore[arg-type]
        exchange.body = bytearray(body if isinstance(body, bytes) else json_encode(body))
        handler(exchange)
        return exchange, wire

    async def send_request(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> Answer:
        """Send a request and return the complete response."""
        _, wire = self.begin(path, body, headers, method)
        async with asyncio.timeout(DEADLINE_S):
            await wire.complete.wait()
        return parse(bytes(wire.data))


@asynccontextmanager
async def open_relays(
    group: RouteGroup, router_mode: str = "round-robin", **options: Any
) -> AsyncIterator[RelayCluster]:
    """Open a frontend with these routes and without workers; KV routing predicts the cached blocks."""
    store, hub, bus = MemoryStore(), MemoryHub(), MemoryBus()

    def runtime() -> DistributedRuntime:
        return DistributedRuntime(
            None,
            MemoryDiscovery(store),
            lambda dispatcher, _: MemoryPlane(dispatcher, hub),
            event_plane=lambda _: MemoryEventPlane(bus),
        )

    frontend, worker = runtime(), runtime()
    relays = RelayCluster(frontend, worker, group, router_mode, **options)
    relays.runtime = runtime
    try:
        relays.models.start()
        await relays.models.wait_synced(DEADLINE_S)
        yield relays
    finally:
        await relays.pipeline.drain(0.0)
        await relays.models.close()
        await worker.shutdown(drain_timeout_s=0.0)
        await frontend.shutdown(drain_timeout_s=0.0)
