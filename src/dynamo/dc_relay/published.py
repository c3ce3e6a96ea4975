"""Published: a value with a revision that subscribers wait for; and Windows: numbered values that none may miss."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Published(Generic[T]):
    """Newest value. Revisions count its changes."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.revision = 0
        self._changed = asyncio.Event()

    def set(self, value: T) -> None:
        """Replace the value; an equal one is no change."""
        if value != self.value:
            self.value = value
            self.revision += 1
            self.wake()

    def wake(self) -> None:
        """Wake every waiter."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, revision: int, timeout_s: float | None = None) -> None:
        """Wait until the revision differs, `wake` is called, or the time is over."""
        if self.revision != revision:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


class Windows(Generic[T]):
    """The last values of a sequence, numbered from 1."""

    def __init__(self, capacity: int) -> None:
        self.number = 0
        """Number of the newest value."""
        self._kept: deque[T] = deque(maxlen=capacity)
        self._added = Published(0)

    def add(self, value: T) -> None:
        """Add a value; the oldest one is dropped when the capacity is reached."""
        self._kept.append(value)
        self.number += 1
        self._added.set(self.number)

    async def get(self, number: int) -> T | None:
        """Return a value, waiting if it is the next one; None if it was dropped."""
        while number > self.number:
            await self._added.wait(self.number)
        index = number - self.number - 1
        return self._kept[index] if -index <= len(self._kept) else None
