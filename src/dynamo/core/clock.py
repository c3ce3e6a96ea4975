"""Clock: the time source of components, with a system implementation and one that tests advance manually."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Time source that is passed to a component."""

    def now(self) -> float:
        """Return monotonic seconds; comparable within one process."""

    def wall(self) -> float:
        """Return seconds since 1970, for records that leave the process."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock's time."""


class SystemClock:
    """The clock of the operating system."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        await wake

    def advance(self, seconds: float) -> None:
        """Move time forward and wake the sleepers that are due, in order of their deadlines."""
        assert seconds >= 0, "time must not go backwards"
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
