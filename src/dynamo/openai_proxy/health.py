"""Health: whether the server lives; while it does not, the worker is not to be found."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dynamo.backend.engine import EngineHost
from dynamo.core.clock import Clock
from dynamo.core.errors import WorkerUnavailable

logger = logging.getLogger(__name__)

FAILURES_MAX = 2  # One may be a server that is busy for a moment; two in a row are taken for its absence.
LEAVE_S = 30.0  # For what still runs on a server that failed: it ends in errors of its own long before.

Ask = Callable[[], Awaitable[int]]
"""The status of the server's health page. Raises `WorkerUnavailable`."""


class HealthWatch:
    """Looks now and then, and at once after `suspect`."""

    def __init__(self, ask: Ask, host: EngineHost, clock: Clock, interval_s: float, name: str) -> None:
        self._ask = ask
        self._host = host
        self._clock = clock
        self._interval_s = interval_s
        self._name = name
        self._suspected = asyncio.Event()
        self._failures = 0
        self.is_up = True
        """Whether the server answered lately."""
        self._has_left = False
        """Whether it was us who took the worker out of service: an operator's drain is not undone."""

    def suspect(self) -> None:
        """A request failed as if nobody were there."""
        self._suspected.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._pause()
            await self.look()

    async def look(self) -> None:
        """Asks once, and leaves or returns where that changes something."""
        try:
            status = await self._ask()
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
        """Until the next look; a suspicion ends the pause."""
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
        logger.warning("%s does not answer: %s; the worker leaves until it does", self._name, why)
        try:
            self._has_left = True
            async with asyncio.timeout(LEAVE_S):
                self._has_left = await self._host.leave_service()
        except TimeoutError:
            logger.warning("requests still wait for %s", self._name)

    async def _return(self) -> None:
        if self.is_up:
            return
        self.is_up = True
        logger.info("%s answers again", self._name)
        if self._has_left:
            self._has_left = False
            await self._host.return_to_service()
