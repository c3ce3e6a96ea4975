"""LLMEngine: the interface between a worker and an inference engine.

The worker handles discovery, requests and events; the engine computes tokens. The interface has five methods:

    config = await engine.start(host)     # load and return the configuration
    engine.submit(request, reply)         # start a request; write tokens to `reply` as steps complete
    engine.cancel(reply)                  # the caller left: stop at the next step
    await engine.drain()                  # wait for the running requests
    await engine.stop()                   # free all resources; may be called twice, and after a failed start

An engine that computes in steps delivers all tokens of a step in one callback on the loop, so that the request
plane can send them in one frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from dynamo.backend.adapters import AdapterEngine
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.embeddings import ClassifyRequest, EmbeddingWork
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad
from dynamo.runtime.component import Endpoint
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import EngineRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Properties of a loaded engine, published on the model's card."""

    model_path: str
    """Directory in Hugging Face layout: tokenizer, chat template, generation config.

    Empty: there are no files, and the worker takes text.
    """
    served_model_name: str
    context_length: int
    """Maximum of prompt and output tokens."""
    kv_cache_block_size: int
    """Tokens per KV block."""
    total_kv_blocks: int
    """KV blocks per data-parallel rank."""
    max_num_seqs: int
    max_num_batched_tokens: int
    data_parallel_size: int = 1
    runtime_data: Mapping[str, Any] = field(default_factory=dict)
    health_check_payload: Mapping[str, Any] | None = None
    """Request of the health check while the worker is idle; None: one token in, one token out; empty: no check."""
    model_type: str | None = None
    """The card's `model_type`; None to use the worker's options."""
    model_input: Literal["Tokens", "Text", "Tensor"] = "Tokens"
    """Whether requests contain token ids, text or tensors."""
    request_type: (
        type[PreprocessedRequest] | type[EmbeddingWork] | type[ClassifyRequest] | type[dict[str, Any]] | type[Request]
    ) = PreprocessedRequest
    """The type into which requests are decoded; `Request`: the engine decodes them."""
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    """Port at which decode workers connect to this prefill worker during the prefill; None: no bootstrap."""
    data_parallel_start_rank: int = 0
    """The first rank of this worker, if other workers have lower ranks."""
    publishes_kv_events: bool = True
    """Whether the engine publishes KV cache events for routers."""
    model_aliases: Sequence[str] = ()
    """Further names of the model."""
    router_config: dict[str, Any] | None = None
    """Routing configuration of this model for frontends; overrides their own mode."""
    routes: Mapping[str, EngineRoute] = field(default_factory=dict)
    """Handlers of `/engine/<name>` on the system port: the controls that this engine supports."""
    takes_prompt_embeds: bool = False
    """Whether the engine accepts prompts as embeddings; the worker rejects them otherwise."""
    endpoints: Mapping[str, EngineRoute] = field(default_factory=dict)
    """Auxiliary endpoints of the worker's component: one request, one response."""
    adapters: AdapterEngine | None = None
    """The engine's LoRA adapters; None if it does not support them."""
    needs: Sequence[Sequence[str]] | None = None
    """The other worker roles that the model requires; None: those that the worker's role requires."""
    enable_eagle: bool = False
    """Whether block hashes of KV events include the next token, as engines with EAGLE compute them."""
    max_gpu_lora_count: int | None = None
    """Adapters that fit into GPU memory."""
    device: Literal["cpu", "cuda"] | None = None
    """Kind of device that computes; None: `cuda` unless the environment hides all GPUs."""
    metrics_labels: tuple[tuple[str, str], ...] = ()
    """Further labels of the endpoint's metrics."""


class EngineHost(Protocol):
    """Services of the worker for its engine. All methods must be called on the loop's thread."""

    @property
    def endpoint(self) -> Endpoint:
        """The worker's endpoint, served once the engine has started."""

    @property
    def metrics(self) -> MetricsRegistry:
        """The registry of the worker's `/metrics` on the system port."""

    @property
    def worker_id(self) -> int:
        """The id of this worker for routers."""

    def publish_kv_event(self, event: KvEvent, dp_rank: int = 0, tier: str = "device") -> None:
        """Publish a change of the cache, or of a lower tier, to the routers. Order is kept."""

    def publish_load(self, load: WorkerLoad) -> None:
        """Publish the load of a rank to the routers; only the latest value counts."""

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        """Publish the work and duration of a step to the planners."""

    def fail(self, error: BaseException) -> None:
        """Report an engine failure: the worker refuses requests, drains and exits."""

    async def leave_service(self) -> bool:
        """Leave discovery and return when all received requests are complete.

        Return False if the worker was already out of service.
        """

    async def return_to_service(self) -> None:
        """Register in discovery again and accept requests."""


class LLMEngine(Protocol):
    """An engine that takes token ids and returns token ids."""

    async def start(self, host: EngineHost) -> EngineConfig:
        """Load the model. Raise `ConfigError` if it cannot be loaded."""

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        """Start a request and return at once. Raise `InvalidArgument` for an unsupported request."""

    def cancel(self, reply: Reply) -> None:
        """Drop a request at the next step; nothing more is written to its reply."""

    async def drain(self) -> None:
        """Return when no request is running or waiting."""

    async def stop(self) -> None:
        """Free the resources of `start`."""


@runtime_checkable
class KvExportingEngine(LLMEngine, Protocol):
    """An engine whose KV blocks are fetched after it has responded: a prefill worker's."""

    def is_quiescent(self) -> bool | None:
        """Return True if no fetch is pending; None if unknown, so that a stopping worker waits for its full timeout."""
