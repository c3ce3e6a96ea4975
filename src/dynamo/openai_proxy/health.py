"""Health: checks of the server; while they fail, the worker is removed from discovery."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dynamo.backend.engine import EngineHost
from dynamo.core.clock import Clock
from dynamo.core.errors import WorkerUnavailable

logger = logging.getLogger(__name__)

FAILURES_MAX = 2  # A single failure may be caused by a momentary load; two in a row count as unavailable.
LEAVE_S = 30.0  # Timeout for active requests on a failed server; they usually fail much earlier.

HealthCheck = Callable[[], Awaitable[int]]
"""Returns the status of the server's health page. Raises `WorkerUnavailable`."""


class HealthWatch:
    """Periodic health check, which also runs at once after `check_now`."""

    def __init__(self, check: HealthCheck, host: EngineHost, clock: Clock, interval_s: float, name: str) -> None:
        self._check = check
        self._host = host
        self._clock = clock
        self._interval_s = interval_s
        self._name = name
        self._suspected = asyncio.Event()
        self._failures = 0
        self.is_up = True
        """Whether the server passed its last checks."""
        self._has_left = False
        """Whether this object took the worker out of service: an operator's drain must not be undone."""

    def check_now(self) -> None:
        """Request an immediate check, after a request failed to reach the server."""
        self._suspected.set()

    async def run(self) -> None:
        """Check forever."""
        while True:
            await self._pause()
            await self.look()

    async def look(self) -> None:
        """Check once; leave or return to service if the state changes."""
        try:
            status = await self._check()
            why = None if status < 400 else f"status {status}"
        except WorkerUnavailable as error:
            why = str(error)
        if why is None:
            self._failures = 0
            await self._return()
            return
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            await self._leave(why)

    async def _pause(self) -> None:
        """Wait until the next check is due or requested by `check_now`."""
        self._suspected.clear()
        timer = asyncio.ensure_future(self._clock.sleep(self._interval_s))
        alarm = asyncio.ensure_future(self._suspected.wait())
        try:
            await asyncio.wait({timer, alarm}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            alarm.cancel()

    async def _leave(self, why: str) -> None:
        if not self.is_up:
            return
        self.is_up = False
        logger.warning(
            "%s fails its health check: %s; removing the worker from discovery until it recovers", self._name, why
        )
        try:
            self._has_left = True
            async with asyncio.timeout(LEAVE_S):
                self._has_left = await self._host.leave_service()
        except TimeoutError:
            logger.warning("%s is unavailable, and requests to it have not ended after %.0f s", self._name, LEAVE_S)

    async def _return(self) -> None:
        if self.is_up:
            return
        self.is_up = True
        logger.info("%s passes its health check again", self._name)
        if self._has_left:
            self._has_left = False
            await self._host.return_to_service()
