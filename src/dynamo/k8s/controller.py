"""Controller: workers that reconcile the keys of a work queue, and retry what fails.

    controller = Controller("graph", reconcile, queue, workers=4)
    controller.start(); ...; await controller.stop(30.0)

A reconcile function makes the cluster match one object. It returns the seconds after which the object is reconciled
again without a change, or None. A failure is retried with the delays of the queue.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Literal

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoException
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.workqueue import Key, WorkQueue

logger = logging.getLogger(__name__)

DEADLINE_S = 120.0
"""Limit of one reconciliation; a request to the API server ends after 10 s."""
CANCEL_S = 5.0
Outcome = Literal["success", "requeue", "error"]


class ReconcileTimeout(DynamoException):
    """A reconciliation did not end in time."""


@dataclass(frozen=True, slots=True)
class ReconcileResult(Generic[Key]):
    """One reconciliation, for metrics."""

    key: Key
    outcome: Outcome
    """`requeue` is a success after which the key is reconciled again at a given time."""
    duration_s: float
    error: Exception | None = None


class FailureLog:
    """Log of failures: one line when a message first appears, until no key fails with it any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._messages: dict[Hashable, str] = {}
        self._keys: Counter[str] = Counter()
        """Number of keys that fail with each message."""

    def failed(self, key: Hashable, error: Exception) -> None:
        """Log a failure with a message that no key has at present; with the traceback if it is a defect."""
        message = f"{type(error).__name__}: {error}"
        if self._messages.get(key) == message:
            return
        is_new = not self._keys[message]
        self.succeeded(key)
        self._messages[key] = message
        self._keys[message] += 1
        if is_new:
            is_expected = isinstance(error, DynamoException)
            level = logging.WARNING if is_expected else logging.ERROR
            trace = None if is_expected else error
            logger.log(level, "controller %s: failed to reconcile %s: %s", self._name, key, message, exc_info=trace)

    def succeeded(self, key: Hashable) -> None:
        """Forget the message of a key."""
        message = self._messages.pop(key, None)
        if message is not None:
            self._keys[message] -= 1
            if not self._keys[message]:
                del self._keys[message]


class Controller(Generic[Key]):
    """Runs a reconcile function for the keys of a queue, several keys at a time, each key once at a time."""

    def __init__(
        self,
        name: str,
        reconcile: Callable[[Key], Awaitable[float | None]],
        queue: WorkQueue[Key],
        workers: int = 1,
        *,
        deadline_s: float = DEADLINE_S,
        on_result: Callable[[ReconcileResult[Key]], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        """Call `on_result` after each reconciliation. The controller closes the queue when it stops."""
        assert workers > 0, "expected at least one worker"
        self.name = name
        self._reconcile = reconcile
        self._queue = queue
        self._workers = workers
        self._deadline_s = deadline_s
        self._on_result = on_result
        self._clock = clock or SystemClock()
        self._failures = FailureLog(name)
        self._tasks = TaskOwner(f"controller {name}")

    @property
    def is_sound(self) -> bool:
        """Whether every worker runs."""
        return self._tasks.is_sound

    def start(self) -> None:
        """Start the workers."""
        for number in range(self._workers):
            self._tasks.supervise(self._work, f"worker-{number}", clock=self._clock)

    async def stop(self, timeout_s: float) -> bool:
        """Let running reconciliations end, and cancel them after `timeout_s`. Return whether all ended by themselves."""
        await self._queue.close()
        has_ended = await self._tasks.wait(timeout_s)
        if not has_ended:
            logger.warning(
                "controller %s: reconciliations still run after %g s and are cancelled", self.name, timeout_s
            )
        await self._tasks.cancel_and_wait(CANCEL_S)
        return has_ended

    async def _work(self) -> None:
        while (key := await self._queue.get()) is not None:
            try:
                await self._process(key)
            finally:
                self._queue.done(key)

    async def _process(self, key: Key) -> None:
        began = self._clock.now()
        failures: list[Exception] = []
        again_s: float | None = None
        with ErrorBoundary(failures.append):  # A defect in the handling of one object must not end that of the others.
            again_s = await self._within_deadline(key)
        duration_s = self._clock.now() - began
        if failures:
            self._failures.failed(key, failures[0])
            self._queue.add_rate_limited(key)
            self._on_result(ReconcileResult(key, "error", duration_s, failures[0]))
            return
        self._failures.succeeded(key)
        self._queue.forget(key)
        if again_s is not None:
            self._queue.add_after(key, again_s)
        self._on_result(ReconcileResult(key, "success" if again_s is None else "requeue", duration_s))

    async def _within_deadline(self, key: Key) -> float | None:
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                return await self._reconcile(key)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ReconcileTimeout(f"no result within {self._deadline_s:g} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Of something that the function awaited: the worker itself goes on.
            raise DynamoException("an operation that the reconciliation awaited was cancelled") from None
