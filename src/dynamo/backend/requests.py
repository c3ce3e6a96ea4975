"""Requests: those that an engine answers now, each a task, for engines whose answers are asynchronous iterators.

A request that is cancelled is told to the engine and followed to its end, so that the engine frees what it took in its
own order; one that does not end in time is cut.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo.core.errors import DynamoException, EngineShutdown, Unknown
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)

STOP_S = 5.0  # For requests to be dropped, before the engine's processes are ended under them.
ABORT_S = 30.0  # For an engine to end what it was told to drop: more than its longest step.


class Requests:
    """The requests under way."""

    def __init__(self, tasks: TaskOwner) -> None:
        self._tasks = tasks
        self._running: dict[Reply, asyncio.Task[None]] = {}
        self._dropped: set[Reply] = set()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    def __contains__(self, reply: Reply) -> bool:
        return reply in self._running

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, work: Coroutine[Any, Any, None], reply: Reply) -> None:
        """A request's task; what it raises is its caller's answer."""
        task = self._tasks.start(self._answered(work, reply), f"request {reply.request_id}")
        self._running[reply] = task
        self._is_quiet.clear()
        task.add_done_callback(lambda _task: self._ended(reply, work))

    def is_dropped(self, reply: Reply) -> bool:
        """Whether nobody waits for its answer any more."""
        return reply in self._dropped

    def answered(self, reply: Reply) -> None:
        """The answer is whole; what its task still does is between it and the engine."""
        self._dropped.add(reply)

    def drop(self, reply: Reply, after_s: float = ABORT_S) -> None:
        """Nobody waits for the answer. Its task ends by itself, or is ended after that time."""
        task = self._running.get(reply)
        if task is None:
            return
        self._dropped.add(reply)
        if after_s <= 0:
            task.cancel()
            return
        timer = asyncio.get_running_loop().call_later(after_s, task.cancel)
        task.add_done_callback(lambda _task: timer.cancel())

    async def drain(self) -> None:
        """Returns when none is left."""
        await self._is_quiet.wait()

    async def _answered(self, work: Coroutine[Any, Any, None], reply: Reply) -> None:
        try:
            await work
        except DynamoException as error:
            self._fail(reply, error)
        except Exception as error:  # The request's boundary: whatever it is, its caller hears it.
            logger.exception("request %s failed", reply.request_id)
            self._fail(reply, Unknown(str(error.__cause__ or error)))

    def _fail(self, reply: Reply, error: DynamoException) -> None:
        if reply not in self._dropped:
            reply.fail(error)

    def _ended(self, reply: Reply, work: Coroutine[Any, Any, None]) -> None:
        work.close()  # It never began where its task was cancelled at once.
        self._running.pop(reply, None)
        self._dropped.discard(reply)
        if not self._running:
            self._is_quiet.set()


class Life:
    """Whether the engine is there: its death is told to the host once, and not while it is being stopped."""

    def __init__(self) -> None:
        self._on_death: Callable[[BaseException], None] | None = None
        self.is_dead = False

    def began(self, on_death: Callable[[BaseException], None]) -> None:
        """From now on it may die."""
        self._on_death = on_death

    def stopped(self) -> None:
        """Its end is wanted."""
        self._on_death = None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._on_death is not None and not self.is_dead

    def check(self) -> None:
        """Raises `EngineShutdown` where it takes none."""
        if not self.is_running:
            raise EngineShutdown("the engine is not running")

    def die(self, error: BaseException) -> None:
        """The engine is gone."""
        if self.is_running:
            assert self._on_death is not None, "it runs"
            self.is_dead = True
            self._on_death(error)
