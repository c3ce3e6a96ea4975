"""Task owner: named background tasks, logged on failure, restarted if supervised, and cancelled with their owner."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo.core.backoff import Backoff
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoException

logger = logging.getLogger(__name__)

CrashCallback = Callable[[str, BaseException], None]
"""Called with the name of a failed task and its exception."""

Work = Callable[[], Coroutine[Any, Any, None]]

RESTART_FIRST_S, RESTART_MAX_S = 0.1, 10.0  # Short after a single failure; bounded rate for a persistent one.
PROVEN_S = 1.0  # A restarted task counts as healthy after running this long.


class TaskOwner:
    """The tasks of one component.

    A task that raises is logged with its traceback and reported to `on_crash`; other tasks are not affected.
    """

    def __init__(self, name: str, on_crash: CrashCallback | None = None) -> None:
        self.name = name
        self._on_crash = on_crash
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.down: set[str] = set()
        """Supervised tasks that failed and have not yet run for `PROVEN_S` since."""
        self.restarts = 0
        """Number of failures of supervised tasks."""

    @property
    def is_sound(self) -> bool:
        """Whether no supervised task is down: False from a failure until the task has run again for `PROVEN_S`."""
        return not self.down

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run `work` until it ends by itself or the owner is closed."""
        if self._is_closed:
            work.close()
            raise DynamoException(f"{self.name} is closed: {name} was not started")
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def supervise(
        self, work: Work, name: str, *, backoff: Backoff | None = None, clock: Clock | None = None
    ) -> "asyncio.Task[None]":
        """Run `work` until it returns; log exceptions and restart it after a backoff."""
        return self.start(
            self._keep(work, name, backoff or Backoff(RESTART_FIRST_S, RESTART_MAX_S), clock or SystemClock()), name
        )

    async def wait(self, timeout_s: float) -> bool:
        """Wait for every task to end by itself; return False if some still run after `timeout_s`."""
        if not self._tasks:
            return True
        _, running = await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not running

    async def cancel_and_wait(self, timeout_s: float = 5.0) -> None:
        """Cancel every task and start no more. A task that does not end within `timeout_s` is logged and abandoned."""
        self._is_closed = True
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, running = await asyncio.wait(tasks, timeout=timeout_s)
        for task in running:
            logger.error("task %s did not end within %.1f s of being cancelled", task.get_name(), timeout_s)

    async def _keep(self, work: Work, name: str, backoff: Backoff, clock: Clock) -> None:
        while True:
            began = clock.now()
            try:
                await (self._prove(work, name, clock) if name in self.down else work())
            except Exception:  # Task owner: a supervised loop restarts after every failure.
                self.restarts += 1
                self.down.add(name)
                logger.exception("task %s.%s failed; restarting it", self.name, name)
            else:
                self.down.discard(name)
                return
            if clock.now() - began > RESTART_MAX_S:
                backoff.reset()
            await clock.sleep(backoff.next(random.random()))

    async def _prove(self, work: Work, name: str, clock: Clock) -> None:
        """Run work that failed before; remove it from `down` after `PROVEN_S`."""
        loop = asyncio.get_running_loop()
        running = loop.create_task(work(), name=f"{self.name}.{name}")
        timer = loop.create_task(clock.sleep(PROVEN_S), name=f"{self.name}.{name}.proof")
        try:
            await asyncio.wait({running, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                self.down.discard(name)
            await running
        finally:
            timer.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait({running})

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        logger.error("task %s crashed", task.get_name(), exc_info=error)
        if self._on_crash is not None:
            self._on_crash(task.get_name(), error)
