"""WorkerProcess: a process with one or more workers, from the command line to a clean shutdown.

A signal and an engine failure follow the same shutdown path. A second signal, and a shutdown that takes too long, end the
process at once.
"""

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable

from dynamo.backend.config import WorkerOptions, grace_period_s
from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.drain import ControlRoutes
from dynamo.backend.engine import LLMEngine
from dynamo.backend.worker import DRAIN_S, EngineWorker
from dynamo.core import logging as log
from dynamo.core.config import dump
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.parent import die_with_parent
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

CLOSE_S = 10.0  # Time limit in addition to grace and drain; after it the process is killed.
EXIT_AT_ONCE = 70  # Upstream's exit status of a worker that received a second signal.

MakeEngine = Callable[[], LLMEngine]


class WorkerProcess:
    """A process with one or more workers; ends on a signal or when an engine fails."""

    def __init__(
        self, options: WorkerOptions, make_engine: MakeEngine, count: int, delay_before_s: Callable[[int], float]
    ) -> None:
        self.status = 0
        """The exit status of the process."""
        self.failure: BaseException | None = None
        """The error that ended the process, if it is the engine's."""
        self._options = options
        self._make_engine = make_engine
        self._count = count
        self._delay_before_s = delay_before_s
        self._workers: list[EngineWorker] = []
        self._ending = asyncio.Event()

    async def live(self) -> None:
        """Start, serve, stop. Raise `ConfigError` for an error that the user can correct."""
        loop = asyncio.get_running_loop()
        self._listen()
        starting = loop.create_task(self._start(), name="start")
        ending = loop.create_task(self._ending.wait(), name="ending")
        try:
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._listen()  # An engine's package may have replaced the signal handlers.
                await ending
        except ConfigError:
            raise
        except Exception as error:  # Engines raise anything; the cause is logged and becomes the exit status.
            logger.exception("failed to start the worker")
            self._fail(error)
        finally:
            ending.cancel()
            await _end(starting)
            await self._stop()

    async def _start(self) -> None:
        """Start the workers in sequence; the first owns the system server, which becomes ready when all are ready."""
        metrics: MetricsRegistry | None = None
        routes = ControlRoutes(lambda: [worker.service for worker in self._workers])
        for index in range(self._count):
            await asyncio.sleep(self._delay_before_s(index))
            runtime = DistributedRuntime.from_options(self._options, metrics)
            metrics = runtime.metrics
            first = self._workers[0].runtime if self._workers else runtime
            worker = EngineWorker(
                self._options, self._make_engine(), runtime, on_failure=self._fail, asset_runtime=first
            )
            self._workers.append(worker)
            if runtime is not first:
                first.health.checks.append(runtime.health.passes)
            if index == 0:
                for name in ("drain", "resume", "status"):
                    runtime.register_engine_route(name, getattr(routes, name))
                runtime.health.checks.append(routes.is_serving)
                await runtime.start_system_server()
                if self._count > 1:
                    runtime.set_health_status(False)
            await runtime.connect()
            logger.info("loading worker %d of %d", index + 1, self._count)
            await worker.start()
        if self._count > 1:
            self._workers[0].runtime.set_health_status(True)
        gc.freeze()  # The model's objects live as long as the process: exclude them from garbage collection.

    async def _stop(self) -> None:
        """Stop every worker, started or not, within the total time limit."""
        grace_s = grace_period_s()
        if self._count > 1 and self._workers:
            self._workers[0].runtime.set_health_status(False)
        watchdog = _watchdog(grace_s + DRAIN_S + CLOSE_S)
        try:
            await asyncio.gather(*(worker.stop(grace_s) for worker in self._workers))
        finally:
            watchdog.cancel()
        logger.info("stopped")

    def _listen(self) -> None:
        """Install the handlers of the termination signals."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        """Start the shutdown on the first signal; exit at once on the second."""
        if self._ending.is_set():
            logger.warning("second %s received: exiting at once", number.name)
            os._exit(EXIT_AT_ONCE)
        logger.info("%s: stopping", number.name)
        self._ending.set()

    def _fail(self, error: BaseException) -> None:
        """Stop the process after an engine failure."""
        self.status = 1
        self.failure = error
        self._ending.set()


def service_of(role: DisaggregationMode) -> str:
    """Return the component name of a worker for OpenTelemetry."""
    return "worker" if role is DisaggregationMode.AGGREGATED else f"worker-{role.value}"


def run_worker(
    options: WorkerOptions,
    make_engine: MakeEngine,
    *,
    count: int = 1,
    delay_before_s: Callable[[int], float] = lambda _index: 0.0,
) -> int:
    """Run a worker process with `count` workers until it ends and return its exit status.

    Raise `ConfigError` for an invalid setting or model.
    """
    log.setup(component=service_of(options.role))
    die_with_parent()
    if options.dump_config_to is not None:
        dump(options, options.dump_config_to)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        process = WorkerProcess(options, make_engine, count, delay_before_s)
        runner.run(process.live())
        _watchdog(CLOSE_S)  # Threads that cannot be cancelled, such as downloads, would block the exit.
        return process.status


async def _end(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for it; ignore its error, which was reported or comes too late to matter."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _watchdog(seconds: float) -> threading.Timer:
    """Kill the process if it still runs after `seconds`."""
    timer = threading.Timer(seconds, _give_up)
    timer.daemon = True
    timer.start()
    return timer


def _give_up() -> None:
    """Exit without waiting for anything."""
    logger.critical("the worker did not stop in time: exiting at once")
    os._exit(EXIT_AT_ONCE)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if uvloop is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
