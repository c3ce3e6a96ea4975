"""SimLoop: an asyncio event loop in simulated time, in which the order of callbacks is drawn from a seed.

Several simulated processes share it. Callbacks of one process run in the order in which they were scheduled, as asyncio
guarantees; the next process, and its number of callbacks, are drawn. When no callback is ready, time advances to the
next timer. A process can be paused (SIGSTOP: its callbacks are queued) and killed (SIGKILL: none of its callbacks runs
again).
"""

import asyncio
import contextlib
import contextvars
import heapq
import inspect
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

STARTS_AT_S = 1000.0  # Not zero: code may use zero for "never".
WALL_S = 1_700_000_000.0
AT_ONCE_MAX = 200_000  # Callbacks without progress of time; more than this is an endless loop.
BURST_MAX = 6

Callback = Callable[..., object]
_process: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")


class Stalled(Exception):
    """The simulation cannot continue: no event is left, or callbacks never end."""


class SimTask(asyncio.Task[Any]):
    """Task whose position in a set does not depend on its memory address."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: "SimLoop", **options: Any) -> None:
        self.serial = next(loop.serial)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.serial


class Process:
    """Simulated process, in whose context its callbacks are scheduled."""

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.loop = loop
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: dict[SimTask, None] = {}
        self.is_paused = False
        self.is_dead = False
        self.died_s = 0.0
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        loop.processes.append(self)

    def __repr__(self) -> str:
        return self.name

    def soon(self, callback: Callback, *args: Any) -> None:
        """Schedule a callback in this process."""
        self.loop.call_soon(callback, *args, context=self.context.copy())

    def later(self, delay_s: float, callback: Callback, *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, callback, *args, context=self.context.copy())

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> "SimTask":
        """Start a task in this process."""
        return self.context.copy().run(self.loop.create_task, work, name=name)

    def kill(self) -> None:
        """Kill the process: none of its callbacks runs any more."""
        self.is_dead = True
        self.died_s = self.loop.time()
        self.ready.clear()

    def close_tasks(self) -> None:
        """Close the resources of its tasks after the run."""
        self.is_dead = True
        for task in list(self.tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            self.context.copy().run(_close, task.get_coro())
        self.tasks.clear()


def _close(coro: Any) -> None:
    """Close a coroutine, and its arguments that are coroutines that have not started."""
    given = list(coro.cr_frame.f_locals.values()) if coro.cr_frame is not None else []
    with contextlib.suppress(BaseException):
        coro.close()
    for value in given:
        if inspect.iscoroutine(value):
            _close(value)


def current_process() -> Process:
    return _process.get()


class SimLoop(asyncio.AbstractEventLoop):
    """Event loop in simulated time."""

    def __init__(self, rng: random.Random) -> None:
        self.serial = itertools.count()
        self.processes: list[Process] = []
        self.failures: list[str] = []
        """Exceptions of callbacks and tasks that were not retrieved."""
        self.callbacks = 0
        self._rng = rng
        self._now = STARTS_AT_S
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Process]] = []
        self._is_running = False
        self._is_closed = False

    # Scheduling ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def wall(self) -> float:
        """Return the seconds since 1970."""
        return WALL_S + self._now

    def wall_ns(self) -> int:
        return int(self.wall() * 1e9)

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        process = context[_process]
        if not (process.is_dead or self._is_closed):
            process.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        process = context[_process]
        if not (process.is_dead or self._is_closed):
            heapq.heappush(self._timers, (when, next(self.serial), handle, process))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The timer is skipped when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> SimTask:  # type: ignore[override]
        task = SimTask(coro, loop=self, **options)
        process = current_process()
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))  # type: ignore[call-overload]
        return task

    def run_in_executor(self, executor: Any, func: Callback, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Return the function's result after a simulated delay."""
        future = self.create_future()

        def finish() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.uniform(0.0, 0.02), finish)
        return future

    sockets: Any = None
    """Factory of connections (`tests.simulation.sockets`), if any are used."""

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return await self.sockets.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return await self.sockets.listen(protocol_factory, host, port)

    # Running -------------------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Run a coroutine as the driver process."""
        driver = Process(self, "driver")
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            task = driver.start(future, "main")
            while not task.done():
                self._step()
            return task.result()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        able = [process for process in self.processes if process.ready and not process.is_paused]
        if not able:
            self._jump()
            return
        process = able[0] if len(able) == 1 else able[int(self._rng.random() * len(able))]
        for _ in range(1 + int(self._rng.random() * BURST_MAX)):
            if not process.ready or process.is_paused:
                return
            self.callbacks += 1
            self._at_once += 1
            handle = process.ready.popleft()
            if not handle.cancelled():
                handle._run()
        if self._at_once > AT_ONCE_MAX:
            raise Stalled(f"{AT_ONCE_MAX} callbacks ran and no time passed; the last one: {handle!r}")

    _at_once = 0

    def _jump(self) -> None:
        """Advance time to the next timer, and schedule all that are due with it."""
        self._at_once = 0
        timers = self._timers
        while timers and (timers[0][2].cancelled() or timers[0][3].is_dead):
            heapq.heappop(timers)
        if not timers:
            raise Stalled("everybody waits and no timer runs")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            _, _, handle, process = heapq.heappop(timers)
            if not (handle.cancelled() or process.is_dead):
                process.ready.append(handle)

    def close(self) -> None:
        self._is_closed = True
        for process in self.processes:
            process.close_tasks()
        self._timers.clear()

    # Interface of asyncio's event loop -----------------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    default_exception_handler = call_exception_handler

    def get_exception_handler(self) -> None:
        return None

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Do nothing: the event log contains all debug information."""

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: no generator outlives its consumer."""
