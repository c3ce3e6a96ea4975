"""LLMEngine: what an engine must be able to do to stand behind a worker.

The worker owns the processes' planes; the engine owns tokens. They meet in five methods:

    config = await engine.start(host)     # load; say what you are
    engine.submit(request, reply)         # begin; write tokens to `reply` as steps complete
    engine.cancel(reply)                  # the caller left: stop at the next step
    await engine.drain()                  # wait for what runs
    await engine.stop()                   # free everything; safe to call twice, and after a failed start

An engine that computes in steps hands all tokens of a step over in one callback on the loop, so that the request
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
from dynamo.runtime.request_plane.base import Reply
from dynamo.runtime.system import EngineRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine says about itself once it is loaded; it becomes the model's card."""

    model_path: str
    """Directory in Hugging Face layout: tokenizer, chat template, generation config.

    Empty: there are no files, and the worker takes text.
    """
    served_model_name: str
    context_length: int
    """Prompt and output together, in tokens."""
    kv_cache_block_size: int
    """Tokens in a KV block."""
    total_kv_blocks: int
    """Per data-parallel rank."""
    max_num_seqs: int
    max_num_batched_tokens: int
    data_parallel_size: int = 1
    runtime_data: Mapping[str, Any] = field(default_factory=dict)
    health_check_payload: Mapping[str, Any] | None = None
    """What the canary asks when the worker has been idle; None: one token after one token."""
    model_type: str | None = None
    """What the model is asked for, where that is not for the worker's options to say."""
    model_input: Literal["Tokens", "Text"] = "Tokens"
    """What its requests hold."""
    request_type: type[PreprocessedRequest] | type[EmbeddingWork] | type[ClassifyRequest] | type[dict[str, Any]] = (
        PreprocessedRequest
    )
    """What requests are read as."""
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    """Where decode workers meet this prefill worker while it computes; None: they are sent its result."""
    data_parallel_start_rank: int = 0
    """The first of this worker's ranks, where others have the ranks below it."""
    publishes_kv_events: bool = True
    """Whether routers hear what its cache holds."""
    model_aliases: Sequence[str] = ()
    """Further names of the model."""
    router_config: dict[str, Any] | None = None
    """How frontends are to route to workers of this kind, whatever their own mode."""
    routes: Mapping[str, EngineRoute] = field(default_factory=dict)
    """What the system port answers at `/engine/<name>`: the controls that this engine has."""
    takes_prompt_embeds: bool = False
    """Whether it reads prompts given as embeddings; the worker refuses them otherwise."""
    endpoints: Mapping[str, EngineRoute] = field(default_factory=dict)
    """Small endpoints of the worker's component: a question, an answer."""
    adapters: AdapterEngine | None = None
    """The engine's LoRA adapters, where it takes any."""


class EngineHost(Protocol):
    """What the worker offers its engine. All methods are to be called on the loop's thread."""

    @property
    def metrics(self) -> MetricsRegistry:
        """Families made here are shown at `/metrics` of the worker's system port."""

    @property
    def worker_id(self) -> int:
        """By which routers know this worker."""

    def publish_kv_event(self, event: KvEvent, dp_rank: int = 0, tier: str = "device") -> None:
        """Tells the routers what the cache now holds, or a tier below it. Order is kept."""

    def publish_load(self, load: WorkerLoad) -> None:
        """Tells the routers how busy this rank is; only the newest counts."""

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        """Tells the planners what a step computed, and how long it took."""

    def fail(self, error: BaseException) -> None:
        """The engine cannot go on: the worker refuses, drains and exits."""

    async def leave_service(self) -> bool:
        """Returns when nobody finds this worker any more and everything that it was asked is answered.

        False where somebody else had taken it out of service before.
        """

    async def return_to_service(self) -> None:
        """It is found again, and takes requests."""


class LLMEngine(Protocol):
    """An engine that takes token ids and answers token ids."""

    async def start(self, host: EngineHost) -> EngineConfig:
        """Loads the model. Raises `ConfigError` if that cannot be."""

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        """Begins a request and returns at once. Raises `InvalidArgument` for one it cannot serve."""

    def cancel(self, reply: Reply) -> None:
        """Drops a request at the next step; nothing more is written to its reply."""

    async def drain(self) -> None:
        """Returns when nothing runs and nothing waits."""

    async def stop(self) -> None:
        """Frees what `start` took."""


@runtime_checkable
class LendingEngine(LLMEngine, Protocol):
    """An engine whose blocks others fetch after it has answered: a prefill worker's."""

    def is_quiescent(self) -> bool | None:
        """True: nobody fetches any more. None: it cannot tell, and a stopping worker waits its whole time."""
