"""Drain: take a worker out of service and back while its process keeps running (`/engine/drain|resume|status`).

    serving ──drain──▶ draining ──nothing runs──▶ drained ──resume──▶ serving        any ──the process ends──▶ stopping

A draining worker leaves discovery first and rejects requests only after its callers have had time to receive the
deregistration, so that no request is lost in between.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from dynamo.backend.admission import Admission
from dynamo.core.errors import EngineShutdown
from dynamo.core.tasks import TaskOwner


class DrainState(enum.Enum):
    """Service state of a worker."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPING = "stopping"


NOT_APPLICABLE, PENDING, COMPLETE, UNKNOWN = "not_applicable", "pending", "complete", "unknown"

ORDER = (DrainState.STOPPING, DrainState.SERVING, DrainState.DRAINING, DrainState.DRAINED)
"""Priority of states: several workers together have the first of these states that one of them has."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """The response of all three routes."""

    state: DrainState
    inflight_requests: int
    kv_transfers: str
    """State of block fetches from this worker: `pending`, `complete`, `unknown` if the engine cannot report it.

    `not_applicable`: no blocks are fetched from it.
    """
    safe_to_delete: bool
    discovery_registered: bool


class Service:
    """Service state of one worker: registration in discovery and acceptance of requests."""

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
        """Set `leave` and `join` of discovery, and `until_quiet`, which returns when no late request is expected.

        `transfers` returns the state of block fetches from this worker.
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
    def state(self) -> DrainState:
        if self._is_stopping:
            return DrainState.STOPPING
        if self._closing is None:
            return DrainState.SERVING
        is_over = self._closing.done() and self._admission.requests == 0
        return DrainState.DRAINED if is_over else DrainState.DRAINING

    def status(self) -> WorkerStatus:
        """Return the current status."""
        state, inflight = self.state, self._admission.requests
        transfers = self._transfers()
        is_over = state is DrainState.DRAINED or (state is DrainState.STOPPING and inflight == 0)
        return WorkerStatus(state, inflight, transfers, is_over and transfers != PENDING, self._is_registered)

    def opened(self) -> None:
        """Mark the worker as registered and serving."""
        self._is_registered = True

    async def drain(self) -> None:
        """Leave discovery and reject requests soon; running requests continue. No effect if already draining."""
        async with self._one_at_a_time:
            if self.state is DrainState.SERVING:
                await self._leave()
                self._is_registered = False
                self._closing = self._tasks.start(self._close(), "drain")

    async def resume(self) -> None:
        """Accept requests and register again. No effect on a serving or stopping worker."""
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
        """Leave discovery permanently; the worker controls rejection from now on."""
        self._is_stopping = True
        if self._closing is not None:
            self._closing.cancel()
        await self._leave()
        self._is_registered = False

    async def _close(self) -> None:
        await self._until_quiet()
        self._admission.refuse(EngineShutdown("the worker is draining"))


class ControlRoutes:
    """Drain routes of a process, over all workers that exist at the time of the request."""

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
        """Return False while any worker is drained, so that probes send it no traffic."""
        return not any(service.state in (DrainState.DRAINING, DrainState.DRAINED) for service in self._services())

    def _status(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(joint([service.status() for service in self._services()]))
        return value


def joint(statuses: Sequence[WorkerStatus]) -> WorkerStatus:
    """Return the joint status of several workers; without workers, that of one not yet registered."""
    return WorkerStatus(
        state=min((status.state for status in statuses), key=ORDER.index, default=DrainState.SERVING),
        inflight_requests=sum(status.inflight_requests for status in statuses),
        kv_transfers=next(
            (kind for kind in (PENDING, UNKNOWN, COMPLETE) if kind in {status.kv_transfers for status in statuses}),
            NOT_APPLICABLE,
        ),
        safe_to_delete=bool(statuses) and all(status.safe_to_delete for status in statuses),
        discovery_registered=any(status.discovery_registered for status in statuses),
    )
