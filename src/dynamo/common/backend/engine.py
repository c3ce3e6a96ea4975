"""Engines: the classes that an engine of the unified backend SDK implements, and the records that they exchange.

engine, config = await MyEngine.from_args(argv)      # parse the command line; nothing is loaded yet
registration = await engine.start(worker_id)         # load; `generate` may be called from now on
async for chunk in engine.generate(request, context): ...
await engine.abort(context)                          # the caller cancelled the request
await engine.cleanup()                               # once, also after a failed start
"""

from __future__ import annotations  # Deferred: the annotations are part of the interface, and one names `WorkerConfig`.

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, TypedDict

from dynamo.common.backend.publisher import KvEventSource
from dynamo.common.constants import DisaggregationMode

if TYPE_CHECKING:
    from dynamo.common.backend.worker import WorkerConfig
    from dynamo.common.backend.worker_metrics import EngineMetrics
    from dynamo.logits_processing import BaseLogitsProcessor
    from dynamo.runtime.context import Context

RawRequest = dict[str, Any]
"""Body of an OpenAI request."""
RawResponseChunk = dict[str, Any]
"""Body of an OpenAI response, or a part of a streamed one."""

_FORCED_SEQUENCE_KIND = "forced_sequence"
_GENERATION_STAGES = frozenset({DisaggregationMode.AGGREGATED, DisaggregationMode.DECODE})


class GenerateRequest(TypedDict, total=False):
    """Request for tokens. Optional parts may be absent or None."""

    token_ids: Required[list[int]]
    model: str
    sampling_options: dict[str, Any]
    stop_conditions: dict[str, Any]
    output_options: dict[str, Any]
    require_reasoning: bool
    prefill_result: dict[str, Any]
    bootstrap_info: dict[str, Any]
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    mm_routing_info: dict[str, Any]
    encoder_result: dict[str, Any]
    extra_args: dict[str, Any]
    routing: dict[str, Any]


class GenerateChunk(TypedDict, total=False):
    """Tokens generated since the previous chunk. The last chunk has a `finish_reason`."""

    token_ids: Required[list[int]]
    index: Required[int]
    finish_reason: str
    completion_usage: dict[str, int]
    disaggregated_params: dict[str, Any]
    encoder_result: dict[str, Any]
    log_probs: list[float]
    top_logprobs: list[list[dict[str, Any]]]
    engine_data: dict[str, Any]


@dataclass
class LlmRegistration:
    """Properties of an engine for tokens, published on the model's card. None: not published."""

    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    enable_eagle: bool = False
    max_gpu_lora_count: int | None = None


@dataclass
class EngineConfig:
    """Properties of a loaded engine, published on the model's card."""

    model: str
    """Directory in Hugging Face layout, or id on the Hugging Face hub; only a name for a `RawEngine`."""
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: LlmRegistration | None = None
    """None for a `RawEngine`."""
    model_aliases: list[str] = field(default_factory=list)


class BaseEngine(ABC):
    """Lifecycle that engines for tokens and for media share."""

    @classmethod
    @abstractmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BaseEngine, WorkerConfig]:
        """Return the engine, not started, and the worker's configuration; `argv` None is the command line."""

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Load the engine. `worker_id` is the worker's id in discovery, unique among all workers."""

    async def abort(self, context: Context) -> None:  # noqa: B027 -- optional, as all without @abstractmethod
        """Drop a cancelled request."""

    async def is_quiescent(self) -> bool | None:
        """Return whether no KV transfer is pending; None if unknown.

        A stopping prefill worker waits for True, at most `DYN_PREFILL_DRAIN_TIMEOUT_S` seconds.
        """
        return None

    @abstractmethod
    async def cleanup(self) -> None:
        """Free all resources. Called once if `start` was called, also if it failed."""

    async def register_prometheus(self, metrics: EngineMetrics) -> None:  # noqa: B027
        """Add the engine's own metrics to the worker's `/metrics`; see `dynamo.common.backend.metrics`."""

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the data-parallel ranks whose load the engine publishes."""
        return []

    def attach_snapshot_publisher(self, publisher: Any) -> None:  # noqa: B027
        """Receive the publisher of the ranks' load, a `SnapshotPublisher`. Called only if there are such ranks."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return the request that is sent while the worker is idle; None for no health checks."""
        return None

    def supported_controls(self) -> set[str]:
        """Return the names of the controls, served at `/engine/control/<name>` of the system port."""
        return set()

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Execute a control and return its result."""
        return {"status": "error", "message": f"unsupported engine control: {control}"}

    def supported_updates(self) -> set[str]:
        """Return the names of the updates, served at `/engine/update/<name>` of the system port."""
        return set()

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """Execute an update and return its result."""
        return {"status": "error", "message": f"unsupported engine update: {update}"}

    async def on_endpoint_ready(self, endpoint: Any) -> None:  # noqa: B027
        """Receive the endpoint once, before it is served. An exception ends the worker."""


class LLMEngine(BaseEngine):
    """Engine for tokens: the frontend applies template and tokenizer, and converts the output to text."""

    @abstractmethod
    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the chunks of a response. Called concurrently."""
        yield  # type: ignore[misc]  # pragma: no cover - makes this an async generator

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return the source of KV events of each rank. Called once after `start`."""
        return []

    async def logits_processor_spec(self) -> LogitsProcessorSpec | None:
        """Return the logits processors of every request; the engine applies them itself."""
        return None


class RawEngine(BaseEngine):
    """Engine for media: receives the body of an OpenAI request and yields that of its response."""

    @abstractmethod
    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        """Yield the response, or the parts of a streamed one. Called concurrently."""
        yield {}  # pragma: no cover - makes this an async generator


class DiffusionEngine(RawEngine):
    """Engine for images and videos."""


@dataclass(frozen=True)
class ForcedTokenSequenceSpec:
    """Logits processor that forces these tokens in order, then the end token."""

    token_ids: tuple[int, ...]
    eos_token_id: int


@dataclass(frozen=True)
class PythonProcessorSpec:
    """Logits processor created by a function; it cannot be serialized."""

    factory: Callable[[], BaseLogitsProcessor]


LogitsProcessorEntry = ForcedTokenSequenceSpec | PythonProcessorSpec


@dataclass(frozen=True)
class LogitsProcessorSpec:
    """Logits processors of every request."""

    entries: tuple[LogitsProcessorEntry, ...]
    generation_only: bool = True
    """Whether prefill and encode workers omit them."""


def is_generation_stage(disaggregation_mode: DisaggregationMode) -> bool:
    """Return whether workers of this mode generate the output: aggregated and decode workers."""
    return disaggregation_mode in _GENERATION_STAGES


def logits_processors_for_request(
    spec: LogitsProcessorSpec | None, *, disaggregation_mode: DisaggregationMode
) -> list[LogitsProcessorEntry]:
    """Return the logits processors that a worker of this mode applies."""
    if spec is not None and (is_generation_stage(disaggregation_mode) or not spec.generation_only):
        return [*spec.entries]
    return []


def serialize_logits_processor_entries(entries: Sequence[LogitsProcessorEntry]) -> list[dict[str, Any]]:
    """Return the entries as JSON objects. Raise `TypeError` for one that cannot be serialized."""
    return [_serialized(entry) for entry in entries]


def deserialize_logits_processor_entries(payload: Sequence[dict[str, Any]]) -> list[LogitsProcessorEntry]:
    """Return the entries of `serialize_logits_processor_entries`. Raise `ValueError` for another kind."""
    return [_deserialized(item) for item in payload]


def _serialized(entry: LogitsProcessorEntry) -> dict[str, Any]:
    if not isinstance(entry, ForcedTokenSequenceSpec):
        raise TypeError(f"cannot serialize a {type(entry).__name__}: must be a ForcedTokenSequenceSpec")
    return {"kind": _FORCED_SEQUENCE_KIND, "token_ids": list(entry.token_ids), "eos_token_id": entry.eos_token_id}


def _deserialized(item: dict[str, Any]) -> LogitsProcessorEntry:
    if item.get("kind") != _FORCED_SEQUENCE_KIND:
        raise ValueError(f"logits processor of kind {item.get('kind')!r}: must be {_FORCED_SEQUENCE_KIND!r}")
    return ForcedTokenSequenceSpec(token_ids=tuple(item["token_ids"]), eos_token_id=item["eos_token_id"])
