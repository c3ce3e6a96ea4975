"""Embedding engine: the thread that computes vectors and its interface to the event loop."""

import asyncio
import contextlib
import logging
import threading
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument, WorkerOverloaded
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.embedder import Embedder, Job, read_pooling
from dynamo.cpu.engine import STOP_TIMEOUT_S
from dynamo.cpu.model import TransformerModel, load_weights
from dynamo.protocols.embeddings import ClassifyRequest, EmbeddingOutput, EmbeddingWork
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbeddingLimits:
    """Limits of a request."""

    vocab_size: int
    context_length: int
    width: int
    """Components of a vector."""


class EmbeddingEngine:
    """`dynamo.backend.engine.LLMEngine` that returns vectors instead of tokens."""

    def __init__(self, config: CpuConfig) -> None:
        self._config = config
        self._orders: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._live: dict[int, tuple[Job, Reply]] = {}
        """Running jobs by the identity of their reply."""
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop
        self._host: EngineHost
        self._embedder: Embedder
        self._limits: EmbeddingLimits

    async def start(self, host: EngineHost) -> EngineConfig:
        self._loop = asyncio.get_running_loop()
        self._host = host
        config = await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._compute, name="dynamo-cpu-embedding", daemon=True)
        self._thread.start()
        return config

    def submit(self, request: PreprocessedRequest | EmbeddingWork | ClassifyRequest, reply: Reply) -> None:
        if self._is_stopping or self._thread is None:
            raise EngineShutdown("the engine is stopped")
        running, waiting = self._config.max_num_seqs, self._config.max_waiting_requests
        if len(self._live) >= running + waiting:
            raise WorkerOverloaded(f"queue full: {running} requests running, {waiting} waiting")
        job = self.job_of(request)
        self._live[id(reply)] = (job, reply)
        self._is_quiet.clear()
        self._orders.put(job)

    def job_of(self, request: PreprocessedRequest | EmbeddingWork | ClassifyRequest) -> Job:
        """Return the request's texts as a job. Raise `InvalidArgument`."""
        assert isinstance(request, EmbeddingWork), "the worker decodes requests by the engine's configuration"
        return to_job(request, self._limits)

    def answer_to(self, job: Job, reply: Reply) -> object:
        """Return the response to a completed job."""
        tokens = sum(len(text) for text in job.texts)
        vectors = [b64encode(vector.astype("<f4").tobytes()).decode() for vector in job.vectors if vector is not None]
        return EmbeddingOutput(embeddings=list(vectors), prompt_tokens=tokens, total_tokens=tokens)

    def cancel(self, reply: Reply) -> None:
        found = self._live.get(id(reply))
        if found is not None:
            self._close(*found)

    async def drain(self) -> None:
        await self._is_quiet.wait()

    async def stop(self) -> None:
        self._is_stopping = True
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the engine's thread did not end within %.0f s", STOP_TIMEOUT_S)
            self._thread = None
        self._fail_all(EngineShutdown("the engine was stopped"))

    def _load(self) -> EngineConfig:
        """Load the model. Runs in a thread because it is slow."""
        config, path = self._config, self._config.directory
        shape = Architecture.read(path)
        longest, rows = config.max_model_len or shape.context_length, config.max_num_batched_tokens
        if longest > shape.rope.reach:
            raise ConfigError(f"--max-model-len {longest}: must be at most {shape.rope.reach}, the model's maximum")
        slots = max(longest, rows)
        model = TransformerModel(shape, load_weights(path, shape), slots=slots, rows_max=rows, longest=longest)
        self._limits = EmbeddingLimits(shape.vocab_size, longest, shape.hidden_size)
        self._embedder = self.embedder_of(model, path)
        return EngineConfig(
            model_path=path,
            served_model_name=config.name,
            device="cpu",
            context_length=longest,
            kv_cache_block_size=config.block_size,
            total_kv_blocks=0,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=rows,
            **self.kind(config.name),
        )

    def embedder_of(self, model: TransformerModel, path: str) -> Embedder:
        """Return the embedder. Raise `ConfigError` for an unsuitable model."""
        pooling = read_pooling(path, self._config.pooling)
        logger.info("embeddings of %d numbers, %s pooling", model.shape.hidden_size, pooling.value)
        return Embedder(model, pooling, self._config.max_num_batched_tokens)

    def kind(self, name: str) -> dict[str, Any]:
        """Return the request and response types for the worker."""
        return {
            "health_check_payload": {"token_ids": [[1]], "model": name},
            "model_type": "Embedding",
            "request_type": EmbeddingWork,
        }

    # The engine's thread.

    def _compute(self) -> None:
        with ErrorBoundary(self._crashed):
            while self._apply():
                done = self._embedder.step()
                if done:
                    self._loop.call_soon_threadsafe(self._deliver, done)

    def _crashed(self, error: Exception) -> None:
        logger.error("the engine failed", exc_info=error)
        with contextlib.suppress(RuntimeError):  # The loop is closed; the process is exiting.
            self._loop.call_soon_threadsafe(self._fail, error)

    def _apply(self) -> bool:
        """Take the queued jobs; block if there is nothing to compute. Return False to stop."""
        while True:
            try:
                job = self._orders.get(block=not self._embedder.has_work)
            except Empty:
                return True
            if job is None:
                return False
            self._embedder.add(job)

    # The loop's thread.

    def _deliver(self, done: Sequence[Job]) -> None:
        for job, reply in [found for found in self._live.values() if any(found[0] is one for one in done)]:
            self._close(job, reply)
            reply.item(self.answer_to(job, reply))
            reply.finish()

    def _close(self, job: Job, reply: Reply) -> None:
        job.is_open = False
        self._live.pop(id(reply), None)
        if not self._live:
            self._is_quiet.set()

    def _fail_all(self, error: Exception) -> None:
        for job, reply in list(self._live.values()):
            self._close(job, reply)
            reply.fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_stopping = True
        self._fail_all(EngineShutdown(f"the engine failed: {error}"))
        self._host.fail(error)


def to_job(request: EmbeddingWork, limits: EmbeddingLimits) -> Job:
    """Convert an upstream request into a job. Raise `InvalidArgument` that names the field."""
    if request.dimensions is not None and not 1 <= request.dimensions <= limits.width:
        raise InvalidArgument(
            f"dimensions {request.dimensions}: this model's embeddings have {limits.width}", param="dimensions"
        )
    cut = request.truncate_prompt_tokens
    length = limits.context_length
    if isinstance(cut, int) and cut > length:
        raise InvalidArgument(
            f"truncate_prompt_tokens {cut}: this model takes {length} tokens", param="truncate_prompt_tokens"
        )
    texts: list[list[int]] = []
    for place, given in enumerate(request.token_ids):
        ids = given[: length if cut == -1 else cut] if isinstance(cut, int) else given
        if not ids:
            raise InvalidArgument(f"input[{place}] has no tokens", param="input")
        if len(ids) > length:
            raise InvalidArgument(
                f"input[{place}] has {len(ids)} tokens, this model takes {length}; "
                "truncate_prompt_tokens would shorten it",
                param="input",
            )
        if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            raise InvalidArgument(
                f"input[{place}] has a token id beyond the model's {limits.vocab_size}", param="input"
            )
        texts.append(ids)
    if not texts:
        raise InvalidArgument("input must not be empty", param="input")
    return Job(texts, request.dimensions)
