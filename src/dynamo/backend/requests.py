"""Requests: active requests as tasks, for engines whose outputs are asynchronous iterators.

A cancelled request is aborted in the engine and its task continues until the engine ends it, so that the engine frees
resources in its own order; a request that does not end in time is cancelled.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo.core.errors import DynamoException, EngineShutdown, Unknown
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)

STOP_S = 5.0  # Time for requests to be dropped before the engine's processes are stopped.
ABORT_S = 30.0  # Time for the engine to end an aborted request: more than its longest step.


class Requests:
    """The active requests of an engine."""

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
        """Start the task of a request; an exception in it fails the request."""
        task = self._tasks.start(self._answered(work, reply), f"request {reply.request_id}")
        self._running[reply] = task
        self._is_quiet.clear()
        task.add_done_callback(lambda _task: self._ended(reply, work))

    def is_dropped(self, reply: Reply) -> bool:
        """Return whether the request was cancelled."""
        return reply in self._dropped

    def answered(self, reply: Reply) -> None:
        """Mark the response as complete; the task may still run until the engine ends the request."""
        self._dropped.add(reply)

    def drop(self, reply: Reply, after_s: float = ABORT_S) -> None:
        """Mark a request as cancelled. Its task ends by itself or is cancelled after `after_s`."""
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
        """Return when no request is left."""
        await self._is_quiet.wait()

    async def _answered(self, work: Coroutine[Any, Any, None], reply: Reply) -> None:
        try:
            await work
        except DynamoException as error:
            self._fail(reply, error)
        except Exception as error:  # Request boundary: every error is sent to the caller.
            logger.exception("request %s failed", reply.request_id)
            self._fail(reply, Unknown(str(error.__cause__ or error)))

    def _fail(self, reply: Reply, error: DynamoException) -> None:
        if reply not in self._dropped:
            reply.fail(error)

    def _ended(self, reply: Reply, work: Coroutine[Any, Any, None]) -> None:
        work.close()  # The coroutine never started if its task was cancelled at once.
        self._running.pop(reply, None)
        self._dropped.discard(reply)
        if not self._running:
            self._is_quiet.set()


class EngineLiveness:
    """State of the engine: reports its death to the host once, unless the engine is being stopped."""

    def __init__(self) -> None:
        self._on_death: Callable[[BaseException], None] | None = None
        self.is_dead = False

    def began(self, on_death: Callable[[BaseException], None]) -> None:
        """Mark the engine as running; `on_death` receives the error if it dies."""
        self._on_death = on_death

    def stopped(self) -> None:
        """Mark the engine as stopped on purpose."""
        self._on_death = None

    @property
    def is_running(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._on_death is not None and not self.is_dead

    def check(self) -> None:
        """Raise `EngineShutdown` if the engine does not accept requests."""
        if not self.is_running:
            raise EngineShutdown("the engine is not running")

    def die(self, error: BaseException) -> None:
        """Report the death of the engine."""
        if self.is_running:
            assert self._on_death is not None, "it runs"
            self.is_dead = True
            self._on_death(error)
