"""Slots: limit on the concurrent lines of all batches, reduced while client requests are in progress."""

import asyncio
from collections.abc import Callable

from dynamo.core.clock import Clock, SystemClock

TICK_S = 0.25  # Polling interval for free slots; batch lines run much longer.


def share(concurrency: int, live: int) -> int:
    """Return the number of slots while `live` client requests are in progress: one fewer for each, but at least one."""
    return max(1, concurrency - live)


class Slots:
    """Slots for batch lines, given in the order of `take`, so that batches take turns."""

    def __init__(self, concurrency: int, live: Callable[[], int], clock: Clock | None = None) -> None:
        """`live` returns the number of client requests in progress."""
        self.running = 0
        self._concurrency = concurrency
        self._live = live
        self._clock = clock or SystemClock()
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a slot."""
        async with self._turn:
            while self.running >= share(self._concurrency, self._live()):
                await self._clock.sleep(TICK_S)
            self.running += 1

    def give_back(self) -> None:
        """Release a slot."""
        assert self.running > 0, "a slot was given back twice"
        self.running -= 1
