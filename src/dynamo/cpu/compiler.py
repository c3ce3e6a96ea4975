"""Compiler: compile each grammar once, off the event loop, with limits on time and memory.

A grammar that is not plain is first compiled on trial in a child process, which is killed at the limits because the
library cannot be interrupted. A trial first gets a short time limit and, if that is exceeded, a longer one in a separate
process for slow grammars, so that a few of these do not delay all others.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import msgspec

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildPool, ChildPoolBusy, ChildTimeout
from dynamo.core.errors import DynamoException, InvalidArgument, Unknown, WorkerOverloaded
from dynamo.core.metrics import Counter, Gauge, Histogram, MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.core.threads import in_daemon_thread
from dynamo.cpu.guided import Grammars, Guide, is_plain, key_of, named, param_of
from dynamo.protocols.engine import GuidedDecoding

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 10.0  # A typical grammar takes milliseconds; the margin covers a busy machine.
QUICK_TIMEOUT_S = 1.0
MEMORY_BYTES = 256 << 20  # Beyond the vocabulary; a typical grammar takes a few MB.
KEPT_BYTES_MAX = 16 << 20  # A larger one is compiled each time; up to 128 are cached.
IDLE_S = 300.0  # A child holds the vocabulary in memory; a restart reads it in about a second.
QUICK_CHILDREN_MAX = 2
THREADS_MAX = 2  # Compiling is pure computation: more threads would only slow down the model.
TRIALS_MAX = 32  # Grammars on trial or queued; each occupies a thread.
BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

OnCompiled = Callable[[Guide | DynamoException], None]
"""Callback that receives the grammar in its initial state, or the error."""


class CompilerMetrics:
    """Prometheus metrics of grammar compilation."""

    def __init__(self, registry: MetricsRegistry, model: str) -> None:
        lookups = registry.counter(
            "dynamo_component_guided_grammar_lookups_total",
            "Grammars requested, by result: cached, compiled or rejected",
            ("model", "outcome"),
        )
        self.kept: Counter = lookups.labels(model=model, outcome="kept")
        self.compiled: Counter = lookups.labels(model=model, outcome="compiled")
        self.refused: Counter = lookups.labels(model=model, outcome="refused")
        self.size: Gauge = registry.gauge(
            "dynamo_component_guided_grammars", "Compiled grammars in the cache", ("model",)
        ).labels(model=model)
        self.seconds: Histogram = registry.histogram(
            "dynamo_component_guided_grammar_compile_seconds", "Time to compile a grammar", ("model",), BUCKETS_S
        ).labels(model=model)


class Trial(Protocol):
    """Check whether a grammar can be compiled within the limits."""

    def measure(self, guided: GuidedDecoding, thoughts_end: str | None, timeout_s: float) -> int:
        """Block and return the size of the grammar in bytes. Raise `DynamoException` if it cannot be compiled."""

    def close(self) -> None:
        """End the processes."""


class ChildTrial:
    """Trials in child processes."""

    def __init__(self, model_path: str, vocab_size: int) -> None:
        arguments = (model_path, str(vocab_size))
        self._quick, self._slow = (
            ChildPool(
                "dynamo.cpu.grammar_child",
                deadline_s=deadline_s,
                memory_bytes=MEMORY_BYTES,
                arguments=arguments,
                children_max=children,
                per_key_max=children,
                idle_s=IDLE_S,
            )
            for deadline_s, children in ((QUICK_TIMEOUT_S, QUICK_CHILDREN_MAX), (COMPILE_TIMEOUT_S, 1))
        )

    def measure(self, guided: GuidedDecoding, thoughts_end: str | None, timeout_s: float) -> int:
        job = (msgspec.to_builtins(guided), thoughts_end)
        try:
            try:
                taken: int = self._quick.call(job, deadline_s=min(QUICK_TIMEOUT_S, timeout_s), wait_s=timeout_s)
            except ChildTimeout:
                taken = self._slow.call(job, deadline_s=timeout_s)
        except ChildTimeout:
            raise _too_late(guided, timeout_s) from None
        except ChildOutOfMemory:
            raise InvalidArgument(
                f"{named(guided)}: compilation needs more than {MEMORY_BYTES >> 20} MB", param=param_of(guided)
            ) from None
        except ChildPoolBusy:
            raise WorkerOverloaded("too many grammars are being compiled") from None
        except ChildError as error:
            raise Unknown(f"failed to compile the grammar: {error}") from None
        return taken

    def close(self) -> None:
        self._quick.close()
        self._slow.close()


class Compiler:
    """Grammars for requests on the loop."""

    def __init__(
        self,
        grammars: Grammars,
        metrics: CompilerMetrics,
        trial: Trial,
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._grammars = grammars
        self._metrics = metrics
        self._trial = trial
        self._timeout_s = timeout_s
        self._threads = asyncio.Semaphore(THREADS_MAX)
        self._trials = 0
        self._tasks = TaskOwner("compiler")
        self._callbacks: dict[bytes, list[OnCompiled]] = {}
        """Callbacks of requests that wait for a grammar under compilation, by key."""

    def request_guide(self, guided: GuidedDecoding, thoughts_end: str | None, on_compiled: OnCompiled) -> None:
        """Invoke the callback once, immediately for a cached grammar. Raise `InvalidArgument` for a grammar that is too large."""
        key = key_of(guided, thoughts_end)
        guide = self._grammars.kept(key)
        if guide is not None:
            self._metrics.kept.inc()
            on_compiled(guide)
            return
        waiting = self._callbacks.setdefault(key, [])
        waiting.append(on_compiled)
        if len(waiting) == 1:
            self._tasks.start(self._compile(guided, key, thoughts_end), "compile")

    async def close(self) -> None:
        """Stop compiling; waiting requests get no callback."""
        await self._tasks.cancel_and_wait()
        self._trial.close()

    async def _compile(self, guided: GuidedDecoding, key: bytes, thoughts_end: str | None) -> None:
        outcome: Guide | DynamoException
        began = perf_counter()
        try:
            taken = 0 if is_plain(guided, key) else await self._measured(guided, thoughts_end)
            outcome = await self._compiled(guided, key, thoughts_end, is_kept=taken <= KEPT_BYTES_MAX)
            self._metrics.compiled.inc()
        except DynamoException as error:
            outcome = error
        except Exception as error:  # Request boundary: a grammar that crashes the library must not fail other requests.
            logger.exception("failed to compile a grammar")
            outcome = Unknown(f"failed to compile the grammar: {error}")
        if not isinstance(outcome, Guide):
            self._metrics.refused.inc()
        self._metrics.seconds.observe(perf_counter() - began)
        self._metrics.size.set(len(self._grammars))
        for on_compiled in self._callbacks.pop(key):
            on_compiled(outcome)

    async def _measured(self, guided: GuidedDecoding, thoughts_end: str | None) -> int:
        """Try the grammar in a child process. Raise `DynamoException`."""
        if self._trials >= TRIALS_MAX:
            raise WorkerOverloaded("too many grammars are being compiled")

        def work() -> int:
            self._grammars.ready()  # Raises the reason for a model without a tokenizer.
            return self._trial.measure(guided, thoughts_end, self._timeout_s)

        self._trials += 1
        try:
            return await in_daemon_thread(work, "dynamo-cpu-grammar-trial")
        finally:
            self._trials -= 1

    async def _compiled(self, guided: GuidedDecoding, key: bytes, thoughts_end: str | None, *, is_kept: bool) -> Guide:
        """Compile a grammar whose cost is bounded. Raise `DynamoException`."""
        loop = asyncio.get_running_loop()

        def work() -> Guide:
            try:
                return self._grammars.compile(guided, key, thoughts_end, is_kept=is_kept)
            finally:
                with contextlib.suppress(RuntimeError):  # The loop is closed; the result is not needed.
                    loop.call_soon_threadsafe(self._threads.release)

        has_begun = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._threads.acquire()  # Released by the thread, which may outlive the deadline.
                has_begun = True
                return await in_daemon_thread(work, "dynamo-cpu-grammar")
        except TimeoutError:
            if has_begun:
                raise _too_late(guided, self._timeout_s) from None
            raise WorkerOverloaded("too many grammars are being compiled") from None


def _too_late(guided: GuidedDecoding, timeout_s: float) -> InvalidArgument:
    return InvalidArgument(f"{named(guided)}: compilation took longer than {timeout_s:g} s", param=param_of(guided))
