"""Engine: the thread that computes steps and its interface to the event loop.

The loop's thread accepts requests and delivers outputs; the engine's thread computes one step after another. Orders pass
through a queue in one direction; in the other, each step makes one callback, which writes all outputs of the step at once so
that the request plane can send them together.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo.backend.disagg import DisaggregationMode, bootstrap_of, prefill_source_of
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.errors import ConfigError, DynamoException, EngineShutdown, InvalidArgument, Unknown, WorkerOverloaded
from dynamo.cpu.adapter import Adapter
from dynamo.cpu.adapters import Adapters
from dynamo.cpu.architecture import Architecture, cache_size
from dynamo.cpu.attention import cache_bytes
from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.compiler import ChildTrial, Compiler, CompilerMetrics
from dynamo.cpu.config import DEMO_MODEL, CpuConfig
from dynamo.cpu.controls import CpuControls
from dynamo.cpu.convert import CpuLimits, Defaults, to_generation
from dynamo.cpu.core import Core, StepOutcome, StepOutput
from dynamo.cpu.disagg import fetch_from, fetch_of, meeting_of
from dynamo.cpu.generation import ActiveGeneration, Fetch
from dynamo.cpu.guided import Grammars, Guide
from dynamo.cpu.kv_exporter import KvExporter
from dynamo.cpu.kv_fetcher import FetchMetrics, KvFetcher, open_puller
from dynamo.cpu.layout import layout_of
from dynamo.cpu.model import TransformerModel, load_weights
from dynamo.cpu.orders import (
    Add,
    ControlCall,
    Drop,
    Fetched,
    FirstTokenReceived,
    Order,
    ReleaseExport,
    Stop,
    TiersChanged,
)
from dynamo.cpu.scheduler import Scheduler
from dynamo.cpu.tiers import CacheTiers, open_tiers
from dynamo.cpu.trace import StepTrace
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.consolidator import TierEvent
from dynamo.kvbm.transfer.base import Deadline, Layout, Region, TransferError, Transport
from dynamo.kvbm.transfer.puller import Pulled
from dynamo.kvbm.transfer.source import SourceOptions
from dynamo.protocols.engine import RESUMES_SAMPLING, BootstrapInfo, EngineOutput, PreprocessedRequest
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad
from dynamo.protocols.native import VLLM_CAPABILITY
from dynamo.routing.prefill_plan import LOCAL_PREFILL
from dynamo.runtime.config import tcp_options
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)

STEPS_AHEAD_MAX = 64  # Steps whose outputs the loop has not delivered; further steps would only fill memory.
STOP_TIMEOUT_S = 30.0  # The longest step is one chunk of a prompt: a second, not half a minute.

LOAD_INTERVAL_S = 0.1  # Routers balance seconds of work; an event per token would only add cost.


class Reporter:
    """Publisher of KV events and load through the host, on the loop's thread."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._published: WorkerLoad | None = None
        self._published_at = 0.0

    def report(
        self,
        events: list[KvEvent],
        load: WorkerLoad,
        now: float,
        *,
        is_idle: bool,
        passed: ForwardPass | None = None,
        tier_events: Iterable[TierEvent] = (),
    ) -> None:
        """Report after a step. The load is published if it changed and the interval has passed, or if the engine is idle."""
        for event in events:
            self._host.publish_kv_event(event)
        for event, tier in tier_events:
            self._host.publish_kv_event(event, tier=tier)
        if passed is not None:
            self._host.publish_forward_pass(passed)
        is_due = self._published is None or is_idle or now - self._published_at >= LOAD_INTERVAL_S
        if is_due and load != self._published:
            self._published, self._published_at = load, now
            self._host.publish_load(load)


class CpuEngine:
    """`dynamo.backend.engine.LLMEngine` on numpy."""

    def __init__(self, config: CpuConfig) -> None:
        self._config = config
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._steps_ahead = threading.BoundedSemaphore(STEPS_AHEAD_MAX)
        self._thread: threading.Thread | None = None
        self._calls: set[ControlCall] = set()
        self.trace: StepTrace | None = None
        """Recorder of every step, while a profile is running."""
        self.is_asleep = False
        self._live: dict[int, ActiveGeneration] = {}
        """Running requests by the identity of their reply."""
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop
        self._host: EngineHost
        self._reporter: Reporter
        self._core: Core
        self._tiers: CacheTiers | None = None
        self._limits: CpuLimits
        self._adapters: Adapters
        self._defaults: Defaults
        self._compiler: Compiler
        self._exporter: KvExporter | None = None
        """Block exporter of a prefill worker."""
        self._fetcher: KvFetcher | None = None
        """Block fetcher of a decode worker."""
        self._fetch_metrics: FetchMetrics | None = None
        self._layout: Layout
        self._thoughts_end = thoughts_end_of(config.reasoning_parser)

    async def start(self, host: EngineHost) -> EngineConfig:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._reporter = Reporter(host)
        config = await asyncio.to_thread(self._load)
        if self._tiers is not None:
            self._tiers.start(host.metrics)
            config = replace(
                config,
                routes={**config.routes, "kvbm": self._tiers.route},
                runtime_data={**config.runtime_data, **self._tiers.runtime_data},
            )
        controls = CpuControls(self, host, self._config, self._adapters, has_tiers=self._tiers is not None)
        config = replace(
            config,
            routes={**config.routes, **controls.routes()},
            endpoints=controls.endpoints(),
            adapters=self._adapters if self._config.enable_lora else None,
        )
        grammars = Grammars(config.model_path, self._limits.vocab_size)
        trial = ChildTrial(config.model_path, self._limits.vocab_size)
        self._compiler = Compiler(grammars, CompilerMetrics(host.metrics, config.served_model_name), trial)
        if self._exporter is not None:
            self._exporter.show(host.metrics, config.served_model_name)
        if self._fetcher is not None:
            self._fetch_metrics = FetchMetrics(host.metrics, config.served_model_name)
        self._reporter.report([], self._core.load(), self._loop.time(), is_idle=True)
        self._thread = threading.Thread(target=self._compute, name="dynamo-cpu-engine", daemon=True)
        self._thread.start()
        return config

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if self._is_stopping or self._thread is None:
            raise EngineShutdown("the engine is stopped")
        if self.is_asleep:
            raise EngineShutdown("the engine is asleep")
        running, waiting = self._config.max_num_seqs, self._config.max_waiting_requests
        if len(self._live) >= running + waiting:
            raise WorkerOverloaded(f"queue full: {running} requests running, {waiting} waiting")
        generation = self._generation(request, reply)
        guided = request.sampling_options.guided_decoding
        if guided is not None:
            thoughts_end = self._thoughts_end if request.require_reasoning is True else None
            self._compiler.request_guide(guided, thoughts_end, partial(self._guide, generation))
        self._live[id(reply)] = generation
        self._is_quiet.clear()
        if guided is None:
            self._orders.put(Add(generation))

    def _generation(self, request: PreprocessedRequest, reply: Reply) -> ActiveGeneration:
        """Return this worker's part of a request."""
        adapter = self._adapters.of(request.routing.lora_name if request.routing is not None else None)
        if self._exporter is not None:
            generation = to_generation(prompt_of(request), reply, self._limits, self._defaults, adapter)
            generation.is_prefill = True
            info = bootstrap_of(request)
            if info is not None and self._exporter.server is not None:
                generation.meeting = meeting_of(info)
                self._exporter.server.open(generation.meeting.room, generation.meeting.key)
            return generation
        generation = to_generation(request, reply, self._limits, self._defaults, adapter)
        if self._fetcher is not None:
            generation.fetch = self._fetch(request, adapter)
            if generation.fetch is not None and request.output_options.prompt_logprobs is not None:
                assert self._fetch_metrics is not None, "a decode worker without its metrics"
                self._fetch_metrics.computed_here("prompt_logprobs")
        return generation

    def _fetch(self, request: PreprocessedRequest, adapter: Adapter | None) -> Fetch | None:
        """Return the fetch of the request's prompt; None if this worker computes the prompt itself."""
        result = prefill_source_of(request)
        assert self._fetch_metrics is not None, "a decode worker without its metrics"
        if result is None:
            self._fetch_metrics.computed_here("told")
            return None
        asks_logprobs = request.output_options.logprobs is not None
        origin = None if adapter is None else adapter.fingerprint
        if isinstance(result, BootstrapInfo):
            return fetch_from(
                result, request.token_ids, self._layout, self._limits.vocab_size, asks_logprobs=asks_logprobs,
                adapter=origin,
            )  # fmt: skip
        try:
            return fetch_of(
                result.disaggregated_params,
                request.token_ids,
                self._layout,
                self._limits.vocab_size,
                Deadline.after(self._config.kv_transfer_timeout),
                asks_logprobs=asks_logprobs,
                adapter=origin,
            )
        except TransferError as error:
            logger.warning("request for %s: computing the prompt on this worker: %s", request.model, error)
            self._fetch_metrics.computed_here(error.kind)
            return None

    def is_quiescent(self) -> bool:
        """Return whether no decode worker still has blocks to fetch from this worker."""
        return self._exporter is None or self._exporter.is_quiescent

    def cancel(self, reply: Reply) -> None:
        generation = self._live.get(id(reply))
        if generation is not None:
            self._close(generation)
            self._orders.put(Drop(generation))

    @property
    def core(self) -> Core:
        """Return the core; use it only inside `between_steps`."""
        return self._core

    async def between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` on the engine's thread between two steps. Raise the exception of `work`."""
        if self._is_stopping or self._thread is None:
            raise EngineShutdown("the engine is stopped")
        call = ControlCall(work, self._loop.create_future())
        self._calls.add(call)
        self._orders.put(call)
        try:
            await call.done
        finally:
            self._calls.discard(call)

    def abort(self, request_id: str) -> None:
        """Abort a request; no effect if it has ended."""
        for generation in [one for one in self._live.values() if one.reply.request_id == request_id]:
            reply = generation.reply
            self.cancel(reply)
            reply.item(EngineOutput([], 0, finish_reason="cancelled"))
            reply.finish()

    async def drain(self) -> None:
        await self._is_quiet.wait()

    async def stop(self) -> None:
        self._is_stopping = True
        if self._thread is not None:
            await self._compiler.close()
            self._orders.put(Stop())
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the engine's thread did not end within %.0f s", STOP_TIMEOUT_S)
            self._thread = None
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close)
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        if self._fetcher is not None:
            await asyncio.to_thread(self._fetcher.close)
        self._fail_all(EngineShutdown("the engine was stopped"))

    def _load(self) -> EngineConfig:
        """Load the model. Runs in a thread because it is slow."""
        config, path = self._config, self._config.directory
        if path == DEMO_MODEL:
            logger.warning("this is the bundled demo model, trained only on this project and small sums")
        shape = Architecture.read(path)
        if shape.labels:
            raise ConfigError(f"{path}: the model is a classifier; add --classify-worker")
        context_length, blocks = cache_size(config, shape)
        model = TransformerModel(
            shape,
            load_weights(path, shape),
            slots=blocks * config.block_size,
            rows_max=config.max_num_batched_tokens,
            longest=context_length,
            memory=self._memory(shape, blocks),
        )
        kvbm = KvbmConfig.read()
        if kvbm.is_enabled and config.enable_prefix_caching:
            worker_id, wake = f"{self._host.worker_id:x}", lambda: self._orders.put(TiersChanged())
            tls = tcp_options(options=config).tls
            self._tiers = open_tiers(kvbm, path, model.cache, config.block_size, worker_id, wake, tls)
        self._open_transfers(model, path)
        scheduler = Scheduler(
            KvBlockPool(blocks, is_caching=config.enable_prefix_caching, notes_evicted=self._tiers is not None),
            sequences_max=config.max_num_seqs,
            batched_tokens_max=config.max_num_batched_tokens,
            tiers=self._tiers,
            adapters_max=config.max_loras if config.enable_lora else None,
        )
        self._core = Core(
            model, scheduler, config.block_size, self._tiers, exporter=self._exporter, puller=self._fetcher
        )
        self._adapters = Adapters(config, shape)
        self._defaults = Defaults.read(path)
        self._limits = CpuLimits(
            vocab_size=shape.vocab_size,
            context_length=context_length,
            block_tokens=config.block_size,
            choices_max=config.max_num_seqs,
        )
        return self._engine_config(context_length, blocks)

    def _engine_config(self, context_length: int, blocks: int) -> EngineConfig:
        """Return what the worker publishes of the loaded engine."""
        config = self._config
        server = None if self._exporter is None else self._exporter.server
        return EngineConfig(
            model_path=config.directory,
            served_model_name=config.name,
            device="cpu",
            context_length=context_length,
            kv_cache_block_size=config.block_size,
            total_kv_blocks=blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            bootstrap_host=None if server is None else server.host,
            bootstrap_port=None if server is None else server.port,
            runtime_data={VLLM_CAPABILITY: True, RESUMES_SAMPLING: True}
            | ({LOCAL_PREFILL: True} if self._fetcher is not None else {}),
        )

    def _memory(self, shape: Architecture, blocks: int) -> npt.NDArray[np.uint8] | None:
        """Return the memory for the cache; None to allocate it."""
        if self._config.role is not DisaggregationMode.PREFILL:
            return None
        size = cache_bytes(shape.layers, shape.kv_heads, blocks * self._config.block_size, shape.head_dim)
        self._exporter = KvExporter(self._transports, size)
        return self._exporter.memory

    @property
    def _transports(self) -> list[Transport]:
        return [Transport(name) for name in self._config.kv_transfer]

    def _open_transfers(self, model: TransformerModel, path: str) -> None:
        """Start the block exporter of a prefill worker or the block fetcher of a decode worker."""
        config = self._config
        if config.role is DisaggregationMode.AGGREGATED:
            return
        self._layout = layout_of(path, model.shape, config.block_size)
        tcp = tcp_options(options=config)
        if self._exporter is not None:
            blocks = model.cache.pages.shape[2] // config.block_size
            options = SourceOptions(
                host=config.kv_transfer_host or tcp.host,
                port=config.kv_transfer_port,
                ttl_s=config.kv_hold_timeout,
                blocks_max=max(1, int(blocks * config.kv_hold_share)),
                tls=tcp.tls,
            )
            self._exporter.open(
                self._layout, model.cache.pages, options, lambda freed: self._orders.put(ReleaseExport(freed))
            )
            if config.bootstrap_port is not None:
                self._exporter.open_server(options.host, config.bootstrap_port, tcp.tls)
        elif config.role is DisaggregationMode.DECODE:
            puller = open_puller(Region(self._layout, model.cache.pages), self._transports, tcp.tls)
            self._fetcher = KvFetcher(
                puller,
                config.block_size,
                config.kv_transfer_timeout,
                ended=lambda fetch, is_whole: self._orders.put(Fetched(fetch, is_whole)),
                on_fetched=self._on_fetched,
                first=lambda fetch: self._orders.put(FirstTokenReceived(fetch)),
                tls=tcp.tls,
            )

    def _on_fetched(self, outcome: str, pulled: Pulled | None) -> None:
        """Record the result of a fetch; runs on a thread of the fetch pool."""
        assert self._fetch_metrics is not None, "a decode worker without its metrics"
        with contextlib.suppress(RuntimeError):  # The loop is closed; metrics are no longer read.
            self._loop.call_soon_threadsafe(self._fetch_metrics.fetched, outcome, pulled)

    # The engine's thread.

    def _compute(self) -> None:
        with ErrorBoundary(self._crashed):
            while self._apply():
                began = time.perf_counter()
                outcome = self._core.step()
                if outcome.passed is not None:
                    ended = time.perf_counter()
                    outcome.passed.wall_time = ended - began
                    if (trace := self.trace) is not None:
                        trace.add(began, ended, outcome.passed, outcome.load)
                is_idle = not self._core.has_work
                while not self._steps_ahead.acquire(timeout=1.0):
                    if self._is_stopping:
                        return
                self._loop.call_soon_threadsafe(self._deliver, outcome, is_idle)

    def _crashed(self, error: Exception) -> None:
        logger.error("the engine failed", exc_info=error)
        with contextlib.suppress(RuntimeError):  # The loop is closed; the process is exiting.
            self._loop.call_soon_threadsafe(self._fail, error)

    def _apply(self) -> bool:
        """Execute the queued orders; block if there is nothing to compute. Return False to stop."""
        while True:
            try:
                order = self._orders.get(block=not self._core.has_work)
            except Empty:
                return True
            if isinstance(order, Add):
                self._core.add(order.generation)
            elif isinstance(order, Drop):
                self._core.drop(order.generation)
                if not self._core.has_work:
                    return True  # Nothing is left to compute, but freed blocks must be reported.
            elif isinstance(order, Fetched):
                self._core.end_fetch(order.fetch, is_whole=order.is_whole)
                if not self._core.has_work:
                    return True
            elif isinstance(order, FirstTokenReceived):
                self._core.emit_first(order.fetch)
            elif isinstance(order, ReleaseExport):
                self._core.scheduler.release_export(order.blocks)
                if not self._core.has_work:
                    return True
            elif isinstance(order, ControlCall):
                self._execute(order)
                if not self._core.has_work:
                    return True
            else:
                return isinstance(order, TiersChanged)

    def _execute(self, call: ControlCall) -> None:
        errors: list[Exception] = []
        with ErrorBoundary(errors.append):
            call.work()
        with contextlib.suppress(RuntimeError):  # The loop is closed; no caller is waiting.
            self._loop.call_soon_threadsafe(call.end, errors[0] if errors else None)

    # The loop's thread.

    def _deliver(self, outcome: StepOutcome, is_idle: bool) -> None:
        self._steps_ahead.release()
        for output in outcome.outputs:
            if output.generation.is_open:
                try:
                    self._send(output)
                except Exception:  # Request boundary: other requests of this step still get their outputs.
                    logger.exception("request %s: failed to write the reply", output.generation.reply.request_id)
                    self.cancel(output.generation.reply)
        now = self._loop.time()
        self._reporter.report(
            outcome.events, outcome.load, now, is_idle=is_idle, passed=outcome.passed, tier_events=outcome.tier_events
        )

    def _send(self, output: StepOutput) -> None:
        reply, word = output.generation.reply, output.word
        if isinstance(word, int):
            reply.token(word)
        elif isinstance(word, EngineOutput):
            reply.item(word)
            if output.is_last:
                self._close(output.generation)
                reply.finish()
        elif isinstance(word, InvalidArgument):
            self._close(output.generation)
            reply.fail(word)
        else:
            logger.error("request %s failed", reply.request_id, exc_info=word)
            self._close(output.generation)
            reply.fail(Unknown(str(word)))

    def _guide(self, generation: ActiveGeneration, outcome: Guide | DynamoException) -> None:
        """Continue a request whose grammar is compiled, or fail it."""
        if not generation.is_open:
            return
        if isinstance(outcome, DynamoException):
            self._close(generation)
            generation.reply.fail(outcome)
            return
        for choice in generation.choices:
            choice.guide = outcome.fresh()
        self._orders.put(Add(generation))

    def _close(self, generation: ActiveGeneration) -> None:
        generation.is_open = False
        self._live.pop(id(generation.reply), None)
        if not self._live:
            self._is_quiet.set()

    def _fail_all(self, error: Exception) -> None:
        for call in self._calls:
            call.end(error)
        for generation in list(self._live.values()):
            self._close(generation)
            generation.reply.fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_stopping = True
        self._fail_all(EngineShutdown(f"the engine failed: {error}"))
        self._host.fail(error)


def prompt_of(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return a request as a prefill worker computes it: one choice of one token, sampled as the answer's first one.

    The decode worker computes a prompt itself if its log-probabilities are requested.
    """
    sampling = msgspec.structs.replace(request.sampling_options, n=1, best_of=None)
    stop = msgspec.structs.replace(request.stop_conditions, max_tokens=1)
    output = msgspec.structs.replace(request.output_options, prompt_logprobs=None)
    return msgspec.structs.replace(request, stop_conditions=stop, sampling_options=sampling, output_options=output)


def thoughts_end_of(parser: str | None) -> str | None:
    """Return the marker that ends the model's reasoning, after which a constraint applies; None without reasoning."""
    if parser is None:
        return None
    from dynamo.parsers.registry import reasoning_family  # Loads every parser.

    return next(iter(reasoning_family(parser).closed_by), None)
