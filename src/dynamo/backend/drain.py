"""Drain: a worker taken out of service and put back while its process lives on (`/engine/drain|resume|status`).

    serving ──drain──▶ draining ──nothing runs──▶ drained ──resume──▶ serving        any ──the process ends──▶ stopping

Who drains leaves discovery first and refuses only when its callers have had time to hear of it, so that no request is
lost between the two.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from dynamo.backend.admission import Admission
from dynamo.core.errors import EngineShutdown
from dynamo.core.tasks import TaskOwner


class State(enum.Enum):
    """How far a worker is from being deleted without harm."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPING = "stopping"


NOT_APPLICABLE, PENDING, COMPLETE, UNKNOWN = "not_applicable", "pending", "complete", "unknown"

ORDER = (State.STOPPING, State.SERVING, State.DRAINING, State.DRAINED)
"""What several workers are together: what the first of these says that one of them is."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """The answer of all three routes."""

    state: State
    inflight_requests: int
    kv_transfers: str
    """`pending` and `complete`: whether others still fetch blocks from this worker. `unknown`: its engine cannot tell.

    `not_applicable`: nobody fetches blocks from it.
    """
    safe_to_delete: bool
    discovery_registered: bool


class Service:
    """Whether one worker is to be found and takes requests."""

    def __init__(
        self,
        admission: Admission,
        tasks: TaskOwner,
        *,
        leave: Callable[[], Awaitable[None]],
        join: Callable[[], Awaitable[None]],
        until_quiet: Callable[[], Awaitable[None]],
        transfers: Callable[[], str] = lambda: NOT_APPLICABLE,
    ) -> None:
        """`leave` and `join` are those of discovery; `until_quiet` returns when no late request is to be expected.

        `transfers` says whether others still fetch its blocks.
        """
        self._transfers = transfers
        self._admission = admission
        self._tasks = tasks
        self._leave = leave
        self._join = join
        self._until_quiet = until_quiet
        self._one_at_a_time = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._is_registered = False
        self._is_stopping = False

    @property
    def state(self) -> State:
        if self._is_stopping:
            return State.STOPPING
        if self._closing is None:
            return State.SERVING
        is_over = self._closing.done() and self._admission.requests == 0
        return State.DRAINED if is_over else State.DRAINING

    def status(self) -> WorkerStatus:
        """How it is now."""
        state, inflight = self.state, self._admission.requests
        transfers = self._transfers()
        is_over = state is State.DRAINED or (state is State.STOPPING and inflight == 0)
        return WorkerStatus(state, inflight, transfers, is_over and transfers != PENDING, self._is_registered)

    def opened(self) -> None:
        """It was announced, and is to be found."""
        self._is_registered = True

    async def drain(self) -> None:
        """Leaves discovery; refuses soon, and what runs goes on. Harmless when it drains already."""
        async with self._one_at_a_time:
            if self.state is State.SERVING:
                await self._leave()
                self._is_registered = False
                self._closing = self._tasks.start(self._close(), "drain")

    async def resume(self) -> None:
        """Takes requests and is found again. Does nothing to one that serves, or that stops."""
        async with self._one_at_a_time:
            if self._closing is None or self._is_stopping:
                return
            self._closing.cancel()
            await asyncio.wait({self._closing})
            self._closing = None
            self._admission.readmit()
            await self._join()
            self._is_registered = True

    async def stop(self) -> None:
        """Leaves discovery for good; who refuses and when is the worker's business from now on."""
        self._is_stopping = True
        if self._closing is not None:
            self._closing.cancel()
        await self._leave()
        self._is_registered = False

    async def _close(self) -> None:
        await self._until_quiet()
        self._admission.refuse(EngineShutdown("the worker is draining"))


class ControlRoutes:
    """The routes of a process, over all workers that it has by the time it is asked."""

    def __init__(self, services: Callable[[], Sequence[Service]]) -> None:
        self._services = services

    async def drain(self, _body: Any) -> dict[str, Any]:
        await asyncio.gather(*(service.drain() for service in self._services()))
        return self._status()

    async def resume(self, _body: Any) -> dict[str, Any]:
        await asyncio.gather(*(service.resume() for service in self._services()))
        return self._status()

    async def status(self, _body: Any) -> dict[str, Any]:
        return self._status()

    def is_serving(self) -> bool:
        """False while any of them is drained: a probe that sends traffic here should not."""
        return not any(service.state in (State.DRAINING, State.DRAINED) for service in self._services())

    def _status(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(joint([service.status() for service in self._services()]))
        return value


def joint(statuses: Sequence[WorkerStatus]) -> WorkerStatus:
    """What several workers are together; none at all are one that is not found yet."""
    return WorkerStatus(
        state=min((status.state for status in statuses), key=ORDER.index, default=State.SERVING),
        inflight_requests=sum(status.inflight_requests for status in statuses),
        kv_transfers=next(
            (kind for kind in (PENDING, UNKNOWN, COMPLETE) if kind in {status.kv_transfers for status in statuses}),
            NOT_APPLICABLE,
        ),
        safe_to_delete=bool(statuses) and all(status.safe_to_delete for status in statuses),
        discovery_registered=any(status.discovery_registered for status in statuses),
    )
