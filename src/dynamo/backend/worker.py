"""EngineWorker: the lifecycle of an engine behind an endpoint.

    load the engine ─▶ serve its endpoint ─▶ register its model ─▶ …requests… ─▶ stop

The shutdown: leave discovery, keep serving callers with an outdated instance list, refuse new requests, drain, fail the
remaining requests, free the engine, close.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from dynamo.backend.adapters import AdapterService
from dynamo.backend.admission import Admission, TracedReply, request_facts
from dynamo.backend.card import canary_payload, make_card
from dynamo.backend.config import WorkerOptions, grace_period_s, request_queue_limit
from dynamo.backend.controls import serve_auxiliary
from dynamo.backend.disagg import DisaggregationMode, drain_timeout_s
from dynamo.backend.drain import COMPLETE, NOT_APPLICABLE, PENDING, UNKNOWN, DrainState, Service
from dynamo.backend.engine import EngineConfig, KvExportingEngine, LLMEngine
from dynamo.backend.metrics import WorkerMetrics
from dynamo.backend.worker_control import WorkerControl
from dynamo.core import tracing
from dynamo.core.boundaries import logged
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import decode, json_encode
from dynamo.core.errors import EngineShutdown, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC, ForwardPassPublisher
from dynamo.kv_events.jetstream import KvStreamPublisher
from dynamo.kv_events.source import KvEventSource
from dynamo.kv_events.worker_publishers import KV_METRICS_TOPIC, WorkerLoadPublisher
from dynamo.model_card.assets import self_hosted
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.protocols.worker_control import WORKER_CONTROL
from dynamo.routing.topology import read_topology
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import ServeOptions

logger = logging.getLogger(__name__)

QUIET_S = 0.2  # Frontends receive a deregistration within milliseconds; after this time without a request, all have.
DRAIN_S = 30.0  # Upstream's time limit for running requests.
FETCH_POLL_S = 0.05  # Poll interval of a stopping prefill worker for the fetch of its last block.


class EngineWorker:
    """One engine with one endpoint and one instance id; implements `EngineHost` for the engine."""

    def __init__(
        self,
        options: WorkerOptions,
        engine: LLMEngine,
        runtime: DistributedRuntime,
        *,
        on_failure: Callable[[BaseException], None] | None = None,
        clock: Clock | None = None,
        asset_runtime: DistributedRuntime | None = None,
    ) -> None:
        """Set `asset_runtime`, whose system server serves the model's files; shared by the workers of a process."""
        self.options = options
        self.engine = engine
        self.runtime = runtime
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._asset_runtime = asset_runtime or runtime
        self._tracer = tracing.tracer()
        self._clock = clock or SystemClock()
        self._endpoint = runtime.endpoint(str(options.endpoint_id()))
        self._metrics = WorkerMetrics(runtime.metrics, self._endpoint.id, runtime.instance_id)
        self._admission = Admission(
            engine.submit,
            engine.cancel,
            slots=options.engine_request_limit,
            queue_max=request_queue_limit() if options.engine_request_limit is not None else 0,
            watcher=self._metrics,
            clock=self._clock,
        )
        self._metrics.follow(self._admission)
        self.service = Service(
            self._admission,
            runtime.tasks,
            leave=self._leave,
            join=self._join,
            until_quiet=lambda: self._until_quiet(grace_period_s()),
            transfers=self._transfers,
        )
        """Whether the worker is registered in discovery and accepts requests."""
        self._serving: Serving | None = None
        self._control: Serving | None = None
        """Control endpoint, which stays registered while the worker is drained."""
        self._request_type: type[Any] = PreprocessedRequest
        self._takes_prompt_embeds = False
        self._card: ModelDeploymentCard | None = None
        self._adapters: AdapterService | None = None
        self.kv_sources: dict[int, KvEventSource] = {}
        self._kv_stream: KvStreamPublisher | None = None
        self._load: WorkerLoadPublisher | None = None
        self._passes: ForwardPassPublisher | None = None

    async def start(self) -> None:
        """Load, serve and register. Raise the engine's errors; `stop` must be called in any case."""
        runtime, endpoint = self.runtime, self._endpoint
        began = self._clock.now()
        if self.options.durable_kv_events:
            self._kv_stream = KvStreamPublisher(runtime.nats_connection("kv_events"), runtime.metrics, endpoint.id)
            self._kv_stream.start()
        load = await runtime.event_plane.publisher(endpoint.id, KV_METRICS_TOPIC)
        self._load = WorkerLoadPublisher(load.publish, runtime.instance_id)

        topology = await read_topology(clock=self._clock)
        config = await self.engine.start(self)
        self._request_type = config.request_type
        self._takes_prompt_embeds = config.takes_prompt_embeds
        for name, route in config.routes.items():
            runtime.register_engine_route(name, route)
        card = await asyncio.to_thread(make_card, self.options, config)
        if topology is not None:
            topology.put_on(card.runtime_config)
        self._metrics.loaded(config, self._clock.now() - began)
        passes = await runtime.event_plane.publisher(endpoint.id, FORWARD_PASS_TOPIC)
        self._passes = ForwardPassPublisher(passes.publish, str(runtime.instance_id), config.data_parallel_size)
        canary = config.health_check_payload
        options = ServeOptions(
            health_check_payload=canary_payload(config, self.options.role) if canary is None else canary or None,
            metrics_labels=config.metrics_labels,
        )
        for dp_rank in range(config.data_parallel_size):
            await self._kv_source(config.data_parallel_start_rank + dp_rank).open()
        self._serving = await endpoint.serve(self.handle, options, device=config.device)
        self._card = self_hosted(card, endpoint.id, self._asset_runtime.show_file)
        await self._announce("", self._card)
        await self._serve_auxiliary(config, self._card)
        self.service.opened()
        logger.info(
            "worker ready: model %s, instance %x, %d blocks of %d tokens, at %s",
            config.served_model_name,
            runtime.instance_id,
            config.total_kv_blocks,
            config.kv_cache_block_size,
            endpoint,
        )

    async def _serve_auxiliary(self, config: EngineConfig, card: ModelDeploymentCard) -> None:
        """Serve the engine's LoRA adapters and its auxiliary endpoints."""
        routes = dict(config.endpoints)
        if config.adapters is not None:
            self._adapters = AdapterService(
                config.adapters, card, self._announce, self._withdraw, settle=lambda: self._clock.sleep(QUIET_S)
            )
            for name, route in self._adapters.routes().items():
                self.runtime.register_engine_route(name, route)
                routes[name] = route
        facts = {
            "role": self.options.role.value,
            "engine": type(self.engine).__module__.removeprefix("dynamo.").partition(".")[0],
            "model": config.served_model_name,
        }
        control = WorkerControl(self.service, facts, loads=lambda: self._metrics.loads)
        (self._control,) = await serve_auxiliary(self._endpoint, {WORKER_CONTROL: control.answer}, is_internal=True)
        await serve_auxiliary(self._endpoint, routes)

    def handle(self, request: Request, reply: Reply) -> None:
        """Start a request. Raise `InvalidArgument` if it cannot be decoded, and the engine's errors."""
        is_raw = self._request_type is Request
        prepared: Any = request if is_raw else decode(request.body, request.codec, self._request_type)
        if not self._takes_prompt_embeds and isinstance(prepared, PreprocessedRequest) and prepared.prompt_embeds:
            raise InvalidArgument(
                f"prompt_embeds is not supported by the engine of model `{prepared.model}`", param="prompt_embeds"
            )
        if self._tracer is None:
            self._admission.enter(prepared, reply)
        else:
            self._enter_traced(self._tracer, request, prepared, reply)

    def _enter_traced(self, tracer: tracing.Tracer, request: Request, prepared: Any, reply: Reply) -> None:
        facts = {"request_id": request.id, "disagg_role": self.options.role.value, **request_facts(prepared)}
        span = tracer.start("engine.generate", request.headers, **facts)
        if isinstance(prepared, Request):
            prepared.span, prepared.headers = span, {**request.headers, **span.headers()}
        try:
            self._admission.enter(prepared, TracedReply(reply, span))
        except BaseException as error:  # The span ends with whatever the request ended with.
            span.end(error)
            raise

    async def stop(self, grace_s: float = 0.0, drain_s: float = DRAIN_S) -> None:
        """Shut down. Requests that still run fail with `EngineShutdown`; callers may retry on another worker."""
        if self._serving is not None:
            await self.service.stop()
            if self._control is not None:
                await self._control.unregister()
            if self.failure is None:
                await self._until_quiet(grace_s)
            self._admission.refuse()
            await self._serving.drain(drain_s if self.failure is None else 0.0)
            if self.failure is None and self.options.role is DisaggregationMode.PREFILL:
                await self._until_fetched(drain_timeout_s())
        self._admission.cut(EngineShutdown("the worker is shutting down"))
        with logged(logger, "failed to stop the engine"):
            await self.engine.stop()
        for source in self.kv_sources.values():
            await source.close()
        if self._kv_stream is not None:
            await self._kv_stream.close()
        if self._load is not None:
            self._load.close()
        if self._passes is not None:
            self._passes.close()
        await self.runtime.shutdown(drain_timeout_s=0.0)

    # EngineHost: services for the engine ---------------------------------------------------------------------------

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def metrics(self) -> MetricsRegistry:
        return self.runtime.metrics

    @property
    def worker_id(self) -> int:
        return self.runtime.instance_id

    def publish_kv_event(self, event: KvEvent, dp_rank: int = 0, tier: str = "device") -> None:
        self._kv_source(dp_rank).put(event, tier)

    def publish_load(self, load: WorkerLoad) -> None:
        self._metrics.observe_load(load)
        if self._serving is not None:
            self._serving.alive()
        if self._load is not None:
            self._load.put(load)

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        if self._passes is not None:
            self._passes.put(passed, dp_rank)

    def fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = error
        logger.error("engine failed: %s", error, exc_info=error)
        self._admission.cut(EngineShutdown("the engine failed"))
        if self._on_failure is not None:
            self._on_failure(error)

    async def leave_service(self) -> bool:
        was_serving = self.service.state is DrainState.SERVING
        await self.service.drain()
        while self._admission.requests:
            await self._clock.sleep(QUIET_S)
        return was_serving

    async def return_to_service(self) -> None:
        await self.service.resume()

    def _kv_source(self, dp_rank: int) -> KvEventSource:
        source = self.kv_sources.get(dp_rank)
        if source is None:
            source = KvEventSource(self._endpoint, self.runtime.instance_id, dp_rank, self._kv_stream)
            self.kv_sources[dp_rank] = source
        return source

    # Discovery and shutdown ----------------------------------------------------------------------------------------

    async def _announce(self, suffix: str, card: ModelDeploymentCard) -> None:
        """Register a card: the model's own, or an adapter's under a suffix."""
        endpoint = self._endpoint
        record = ModelRecord(
            namespace=endpoint.id.namespace,
            component=endpoint.id.component,
            endpoint=endpoint.id.name,
            instance_id=self.runtime.instance_id,
            card_json=card,
            model_suffix=suffix or UNSET,
        )
        await self.runtime.discovery.put(MODEL_CARDS, self._card_key(suffix), json_encode(record))

    async def _withdraw(self, suffix: str) -> None:
        await self.runtime.discovery.delete(MODEL_CARDS, self._card_key(suffix))

    def _card_key(self, suffix: str) -> str:
        return f"{self._endpoint.record_key}/{suffix}" if suffix else self._endpoint.record_key

    async def _leave(self) -> None:
        if self._serving is not None:
            await self._serving.unregister()
        if self._adapters is not None:
            await self._adapters.leave()
        await self._withdraw("")
        for source in self.kv_sources.values():
            await source.leave()

    async def _join(self) -> None:
        """Register again in the order of the start: a card must appear after its instance and its KV event sources."""
        for source in self.kv_sources.values():
            await source.join()
        if self._serving is not None:
            await self._serving.register()
        if self._card is not None:
            await self._announce("", self._card)
        if self._adapters is not None:
            await self._adapters.join()

    async def _until_quiet(self, grace_s: float) -> None:
        """Return when no request runs and none arrived for `QUIET_S`, or when the grace period has ended."""
        deadline = self._clock.now() + grace_s
        while (left := deadline - self._clock.now()) > 0:
            entered = self._admission.entered
            await self._clock.sleep(min(QUIET_S, left))
            if self._admission.requests == 0 and self._admission.entered == entered:
                return

    def _transfers(self) -> str:
        """Return whether decode workers still have to fetch blocks of finished prefills."""
        engine = self.engine
        if self.options.role is not DisaggregationMode.PREFILL:
            return NOT_APPLICABLE
        is_quiescent = engine.is_quiescent() if isinstance(engine, KvExportingEngine) else None
        return UNKNOWN if is_quiescent is None else COMPLETE if is_quiescent else PENDING

    async def _until_fetched(self, budget_s: float) -> None:
        """Return when decode workers have fetched the blocks of finished prefills, or after `budget_s`."""
        engine = self.engine
        if not isinstance(engine, KvExportingEngine):
            return
        deadline = self._clock.now() + budget_s
        while engine.is_quiescent() is not True:
            left = deadline - self._clock.now()
            if left <= 0:
                logger.warning("decode workers did not fetch all blocks of finished prefills within %g s", budget_s)
                return
            await self._clock.sleep(min(FETCH_POLL_S, left))
