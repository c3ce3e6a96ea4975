"""ServedEngine: an engine of the unified backend SDK as an engine of `dynamo.backend`.

    EngineWorker ── start / submit / cancel / stop ──▶ ServedEngine ── start / generate / abort / cleanup ──▶ the engine

The worker owns discovery, endpoint, admission, drain and metrics; this class converts calls and records only.
"""

import asyncio
import functools
import logging
import operator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from dynamo.backend.engine import EngineConfig as Registration
from dynamo.backend.engine import EngineHost
from dynamo.common.backend.bindings import DisaggregationMode, EngineConfig, LlmRegistration, WorkerConfig
from dynamo.common.backend.engine import BaseEngine, LLMEngine
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.worker_metrics import EngineMetrics, SnapshotPublisher
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.core.errors import InvalidArgument
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.publisher import KvEventPublisher
from dynamo.model_card.card import architectural_context_length, read_json
from dynamo.model_card.hub import resolve_model
from dynamo.model_card.types import ModelInput, ModelType
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.kv_events import KvEvent
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import EngineRoute
from dynamo.runtime.streams import GeneratorHandler, bare_token

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16  # Upstream's default, if the engine reports none.
ABORT_S = 5.0  # Time for the engine to end aborted requests before `cleanup`.
ENDPOINT_TYPES = {
    "chat": ModelType.Chat,
    "completions": ModelType.Completions,
    "embedding": ModelType.Embedding,
    "embeddings": ModelType.Embedding,
    "image": ModelType.Images,
    "images": ModelType.Images,
    "audio": ModelType.Audios,
    "audios": ModelType.Audios,
    "video": ModelType.Videos,
    "videos": ModelType.Videos,
    "tensor": ModelType.TensorBased,
}
FINISH_REASONS = frozenset({"stop", "eos", "length", "cancelled", "content_filter"})
ENCODE_NEEDS = (("prefill", "decode"), ("aggregated",))
"""An encode worker precedes a prefill and a decode worker, or an aggregated worker."""


class EngineHandler(GeneratorHandler):
    """Request-plane handler for an engine's `generate`: a cancelled request is aborted in the engine."""

    def __init__(self, engine: Any, tasks: TaskOwner, *, is_raw: bool) -> None:
        super().__init__(engine.generate, tasks)
        self._abort_request = engine.abort
        self._is_raw = is_raw
        self.running: dict[Reply, Context] = {}

    def _read(self, request: Request) -> Any:
        value = super()._read(request)
        if not isinstance(value, dict):
            raise InvalidArgument(f"request: must be a JSON object, not {type(value).__name__}")
        return value if self._is_raw else normalize_request_token_ids(value)

    async def _run(self, value: Any, context: Context, reply: Reply) -> None:
        self.running[reply] = context
        aborted: list[str] = []

        def abort() -> None:
            if not aborted:  # A stopped request that is killed ends twice.
                aborted.append(context.id())
                self._tasks.start(self._abort_request(context), f"abort {context.id()}")

        forget = context.on_end(abort)
        try:
            await super()._run(value, context, reply)
        finally:
            forget()
            del self.running[reply]

    def _write(self, reply: Reply, element: Any) -> None:
        if self._is_raw:
            reply.item(element)
            return
        token = bare_token(element)
        if token is not None:
            reply.token(token)
        else:
            reply.item(output_of(element))


class HostEvents:
    """Sink of an engine's KV events: the sources of its worker."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def put(self, event: KvEvent, dp_rank: int, tier: str) -> None:
        self._host.publish_kv_event(event, dp_rank, tier)

    async def close(self) -> None:
        """Do nothing: the worker closes its sources."""


class ServedEngine:
    """An `LLMEngine` of `dynamo.backend` that delegates to an engine of the SDK."""

    def __init__(self, engine: BaseEngine, config: WorkerConfig, *, is_raw: bool) -> None:
        self._engine = engine
        self._config = config
        self._is_raw = is_raw
        self._has_started = False
        self._tasks = TaskOwner("engine")
        self._handler = EngineHandler(engine, self._tasks, is_raw=is_raw)
        self._publishers: list[KvEventPublisher] = []
        self._query: asyncio.Task[None] | None = None
        self._is_quiescent: bool | None = None

    async def start(self, host: EngineHost) -> Registration:
        """Start the engine in upstream's order: load, metrics, KV events, endpoint, controls, health check."""
        self._has_started = True
        engine, config = self._engine, self._config
        found = bound(await engine.start(host.worker_id))
        name = found.served_model_name or config.served_model_name or config.model_name or found.model
        await engine.register_prometheus(EngineMetrics(host, found.model, name))
        ranks = engine.component_metrics_dp_ranks()
        publishes_events = config.enable_kv_routing and await self._open_kv_sources(host, found.llm)
        if ranks and config.enable_kv_routing:
            engine.attach_snapshot_publisher(SnapshotPublisher(host))
        await engine.on_endpoint_ready(host.endpoint)
        routes = self._routes()
        canary = config.health_check_payload
        if canary is None:
            canary = await engine.health_check_payload()
        path = "" if self._is_raw else await asyncio.to_thread(resolve_model, self._source(found), weights=False)
        llm = found.llm or LlmRegistration()
        return Registration(
            model_path=path,
            served_model_name=name,
            context_length=llm.context_length or own_context_length(path),
            kv_cache_block_size=llm.kv_cache_block_size or BLOCK_TOKENS,
            total_kv_blocks=llm.total_kv_blocks or 0,
            max_num_seqs=llm.max_num_seqs or 0,
            max_num_batched_tokens=llm.max_num_batched_tokens or 0,
            data_parallel_size=llm.data_parallel_size or 1,
            data_parallel_start_rank=llm.data_parallel_start_rank or 0,
            runtime_data={
                **({"encoder_result_handoff": True} if config.route_to_encoder else {}),
                **found.runtime_data,
            },
            health_check_payload=canary or {},
            model_type=model_type_of(config.endpoint_types),
            model_input=config.model_input.value,
            request_type=Request,
            bootstrap_host=llm.bootstrap_host,
            bootstrap_port=llm.bootstrap_port,
            publishes_kv_events=publishes_events,
            model_aliases=found.model_aliases,
            routes=routes,
            takes_prompt_embeds=True,
            needs=needs_of(config),
            enable_eagle=llm.enable_eagle,
            max_gpu_lora_count=llm.max_gpu_lora_count,
            metrics_labels=tuple((key, value) for key, value in config.metrics_labels),
        )

    def submit(self, request: Any, reply: Reply) -> None:
        """Start a request."""
        self._handler(request, reply)

    def cancel(self, reply: Reply) -> None:
        """Cancel a request's context; the engine then aborts it."""
        context = self._handler.running.get(reply)
        if context is not None:
            context.kill()

    def is_quiescent(self) -> bool | None:
        """Return the engine's last answer, None before the first one, and query it again unless the query failed."""
        query = self._query
        if self._has_started and (query is None or (query.done() and query.exception() is None)):
            self._query = self._tasks.start(self._query_quiescence(), "is_quiescent")
        return self._is_quiescent

    async def drain(self) -> None:
        """Return when no request is running."""
        while not await self._tasks.wait(ABORT_S):
            logger.info("%d requests are still running", len(self._handler.running))

    async def stop(self) -> None:
        """Abort the remaining requests and clean up the engine once, if it was started."""
        has_started, self._has_started = self._has_started, False
        for context in list(self._handler.running.values()):
            context.kill()
        await self._tasks.wait(ABORT_S)
        await self._tasks.cancel_and_wait()
        if has_started:
            await self._engine.cleanup()
        for publisher in self._publishers:
            publisher.shutdown()

    async def _query_quiescence(self) -> None:
        self._is_quiescent = await self._engine.is_quiescent()

    def _source(self, found: EngineConfig) -> str:
        """Return the model whose files the card describes."""
        return self._config.model_name or found.model

    async def _open_kv_sources(self, host: EngineHost, llm: LlmRegistration | None) -> bool:
        """Connect the engine's sources of KV events to the worker; return whether there are any."""
        if not isinstance(self._engine, LLMEngine) or self._is_raw:
            return False
        sources = await self._engine.kv_event_sources()
        block_size = None if llm is None else llm.kv_cache_block_size
        if sources and block_size is None:
            logger.warning("KV events are not published: the engine reports no kv_cache_block_size")
        if not sources or llm is None or block_size is None:
            return False
        first = llm.data_parallel_start_rank or 0
        ranks = range(first, first + (llm.data_parallel_size or 1))
        for source in sources:
            if source.dp_rank not in ranks:
                raise InvalidArgument(
                    f"KV events of dp_rank {source.dp_rank}: this worker has {ranks[0]} to {ranks[-1]}"
                )
            self._open(source, host, block_size)
        return self._config.enable_local_indexer

    def _open(self, source: KvEventSource, host: EngineHost, block_size: int) -> None:
        tasks = host.endpoint.runtime.tasks
        publisher = KvEventPublisher.into(HostEvents(host), tasks, block_size, source.dp_rank)
        self._publishers.append(publisher)
        if isinstance(source, PushSource):
            source.on_ready(publisher)
        else:
            publisher.relay(source.endpoint, source.topic)

    def _routes(self) -> dict[str, EngineRoute]:
        engine = self._engine
        controls = {f"control/{one}": (engine.engine_control, "control", one) for one in engine.supported_controls()}
        updates = {f"update/{one}": (engine.engine_update, "update", one) for one in engine.supported_updates()}
        return {path: functools.partial(_manage, *call) for path, call in {**controls, **updates}.items()}


async def _manage(handler: Any, kind: str, name: str, body: Any) -> dict[str, Any]:
    """Call an engine's control or update."""
    if not isinstance(body, dict):
        return {"status": "error", "message": f"engine {kind} request body must be a JSON object"}
    result: dict[str, Any] = await handler(name, body)
    return result


def bound(found: Any) -> EngineConfig:
    """Return an engine's registration with checked values. Raise `TypeError` and `OverflowError`."""
    if isinstance(found, EngineConfig):
        return found
    llm = found.llm
    if llm is not None and not isinstance(llm, LlmRegistration):
        llm = LlmRegistration(**asdict(llm))
    return EngineConfig(found.model, found.served_model_name, found.runtime_data, llm, list(found.model_aliases or ()))


def output_of(chunk: Any) -> EngineOutput:
    """Return a chunk as the request plane's record. Raise `ValueError` or `TypeError` for an invalid chunk."""
    if not isinstance(chunk, Mapping):
        raise ValueError(f"chunk: must be a mapping, not {type(chunk).__name__}")  # noqa: TRY004 -- upstream's type
    if "token_ids" not in chunk:
        raise ValueError("chunk: token_ids is missing")
    token_ids = [operator.index(one) for one in chunk["token_ids"] or ()]
    try:
        output = msgspec.convert({"index": 0, **chunk, "token_ids": token_ids}, EngineOutput)
    except msgspec.ValidationError as error:
        raise ValueError(f"chunk: {error}") from None
    reason = output.finish_reason
    if reason is not None and reason not in FINISH_REASONS and not reason.startswith("error"):
        if not reason.startswith("abort"):
            raise ValueError(f"chunk: finish_reason {reason!r}: must be one of {', '.join(sorted(FINISH_REASONS))}")
        output.finish_reason = "cancelled"
    return output


def model_type_of(endpoint_types: str) -> str:
    """Return the card's model type of a comma-separated list. Raise `InvalidArgument` for an empty or unknown one."""
    names = [name.strip().lower() for name in endpoint_types.split(",") if name.strip()]
    unknown = [name for name in names if name not in ENDPOINT_TYPES]
    if unknown or not names:
        raise InvalidArgument(f"endpoint_types {endpoint_types!r}: must be one or more of {', '.join(ENDPOINT_TYPES)}")
    kinds = ModelType.Empty
    for name in names:
        kinds |= ENDPOINT_TYPES[name]
    return kinds.on_card


def needs_of(config: WorkerConfig) -> list[list[str]] | None:
    """Return the roles that the worker requires, if they are not those of its role alone."""
    match config.disaggregation_mode:
        case DisaggregationMode.Encode:
            return [list(group) for group in ENCODE_NEEDS]
        case DisaggregationMode.Prefill if config.route_to_encoder:
            return [["decode", "encode"]]
        case DisaggregationMode.Aggregated if config.route_to_encoder:
            return [["encode"]]
        case _:
            return None


def own_context_length(path: str) -> int:
    """Return the context length in a model's configuration; 0 if there is none."""
    return (architectural_context_length(read_json(f"{path}/config.json")) or 0) if path else 0


def check_kind(config: WorkerConfig, *, is_raw: bool) -> None:
    """Raise `InvalidArgument` for a configuration that does not suit the engine, or that is not supported."""
    if is_raw == (config.model_input is ModelInput.Tokens):
        wanted = "Text or Tensor for a RawEngine" if is_raw else "Tokens for an LLMEngine"
        raise InvalidArgument(f"model_input {config.model_input.name}: must be {wanted}", param="model_input")
    mode = config.disaggregation_mode
    if config.route_to_encoder and mode not in (DisaggregationMode.Aggregated, DisaggregationMode.Prefill):
        raise InvalidArgument(
            f"route_to_encoder: disaggregation_mode {mode.name}: must be Aggregated or Prefill",
            param="route_to_encoder",
        )
    for name in ("media_decoder", "media_fetcher", "kv_state_endpoint"):
        if getattr(config, name) is not None:
            raise InvalidArgument(f"WorkerConfig: {name} is not supported by this release", param=name)
    model_type_of(config.endpoint_types)
