"""Slots: how many lines of all batches are asked at a time; fewer while clients are being answered."""

import asyncio
from collections.abc import Callable

from dynamo.core.clock import Clock, SystemClock

TICK_S = 0.25  # How late it is noticed that clients are gone; what follows lasts longer.


def share(concurrency: int, live: int) -> int:
    """How many may run beside so many requests of clients: one fewer for each, and never none."""
    return max(1, concurrency - live)


class Slots:
    """Taken in the order in which they are asked for, so that batches take turns."""

    def __init__(self, concurrency: int, live: Callable[[], int], clock: Clock | None = None) -> None:
        """`live` says how many requests of clients are being answered now."""
        self.running = 0
        self._concurrency = concurrency
        self._live = live
        self._clock = clock or SystemClock()
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Returns when there is one."""
        async with self._turn:
            while self.running >= share(self._concurrency, self._live()):
                await self._clock.sleep(TICK_S)
            self.running += 1

    def give_back(self) -> None:
        """It is free again."""
        assert self.running > 0, "a slot was given back twice"
        self.running -= 1
