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

from dynamo.backend.disagg import bootstrap_of, prefill_source_of
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, Unknown, WorkerOverloaded
from dynamo.cpu.adapter import Adapter
from dynamo.cpu.adapters import Adapters
from dynamo.cpu.compiler import ChildTrial, Compiler, CompilerMetrics
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.controls import CpuControls
from dynamo.cpu.convert import CpuLimits, Defaults, to_generation
from dynamo.cpu.core import Core, StepOutcome, StepOutput
from dynamo.cpu.disagg import fetch_from, fetch_of, meeting_of
from dynamo.cpu.generation import ActiveGeneration, Fetch
from dynamo.cpu.guided import Grammars, Guide
from dynamo.cpu.kv_fetcher import FetchMetrics
from dynamo.cpu.loading import OpenParts, load_engine
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
from dynamo.cpu.trace import StepTrace
from dynamo.kvbm.logical.consolidator import TierEvent
from dynamo.kvbm.transfer.base import Deadline, Layout, TransferError
from dynamo.kvbm.transfer.puller import Pulled
from dynamo.protocols.engine import BootstrapInfo, EngineOutput, PreprocessedRequest
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad
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
        self._parts = OpenParts()
        self._limits: CpuLimits
        self._adapters: Adapters
        self._defaults: Defaults
        self._compiler: Compiler
        self._fetch_metrics: FetchMetrics | None = None
        self._layout: Layout
        self._thoughts_end = thoughts_end_of(config.reasoning_parser)

    async def start(self, host: EngineHost) -> EngineConfig:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._reporter = Reporter(host)
        config = await asyncio.to_thread(self._load)
        if self._parts.tiers is not None:
            self._parts.tiers.start(host.metrics)
            config = replace(
                config,
                routes={**config.routes, "kvbm": self._parts.tiers.route},
                runtime_data={**config.runtime_data, **self._parts.tiers.runtime_data},
            )
        controls = CpuControls(self, host, self._config, self._adapters, has_tiers=self._parts.tiers is not None)
        config = replace(
            config,
            routes={**config.routes, **controls.routes()},
            endpoints=controls.endpoints(),
            adapters=self._adapters if self._config.enable_lora else None,
        )
        grammars = Grammars(config.model_path, self._limits.vocab_size)
        trial = ChildTrial(config.model_path, self._limits.vocab_size)
        self._compiler = Compiler(grammars, CompilerMetrics(host.metrics, config.served_model_name), trial)
        if self._parts.exporter is not None:
            self._parts.exporter.show(host.metrics, config.served_model_name)
        if self._parts.fetcher is not None:
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
        if self._parts.exporter is not None:
            generation = to_generation(prompt_of(request), reply, self._limits, self._defaults, adapter)
            generation.is_prefill = True
            info = bootstrap_of(request)
            if info is not None and self._parts.exporter.server is not None:
                generation.meeting = meeting_of(info)
                self._parts.exporter.server.open(generation.meeting.room, generation.meeting.key)
            return generation
        generation = to_generation(request, reply, self._limits, self._defaults, adapter)
        if self._parts.fetcher is not None:
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
        return self._parts.exporter is None or self._parts.exporter.is_quiescent

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
        await asyncio.to_thread(self._parts.close)
        self._fail_all(EngineShutdown("the engine was stopped"))

    def _load(self) -> EngineConfig:
        """Load the model. Runs in a thread because it is slow."""
        loaded = load_engine(self._config, self._parts, self._host, self._orders.put, self._on_fetched)
        self._core, self._limits = loaded.core, loaded.limits
        self._adapters, self._defaults = loaded.adapters, loaded.defaults
        if loaded.layout is not None:
            self._layout = loaded.layout
        return loaded.config

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
