"""Live feed: takes samples while someone watches, and sends each to all watchers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.tasks import TaskOwner

logger = logging.getLogger(__name__)

WATCHERS_MAX = 32
"""Open streams of one process; each costs the encoding of nothing and one write per second."""
QUEUED_MAX = 8
"""Events that wait for a watcher that does not read; further ones are dropped for it."""
POLLED_S = 6.0
"""Time for which a poll counts as watching."""

TakeSample = Callable[[], Awaitable[bytes | None]]
"""Takes a sample and returns its event for the watchers, None without one."""
Watcher = asyncio.Queue[bytes | None]
"""Events of one watcher; None ends its stream."""


class LiveFeed:
    """Sampler and watchers of one process. Without watchers there is no task and no timer."""

    def __init__(self, take: TakeSample, interval_s: float, clock: Clock | None = None) -> None:
        self._take = take
        self._interval_s = interval_s
        self._clock = clock or SystemClock()
        self._watchers: set[Watcher] = set()
        self._polled_until = 0.0
        self._tasks = TaskOwner("console")
        self._sampling: asyncio.Task[None] | None = None

    @property
    def watchers(self) -> int:
        """Number of open streams."""
        return len(self._watchers)

    @property
    def is_sampling(self) -> bool:
        """Whether samples are being taken."""
        return self._sampling is not None

    def join(self) -> Watcher | None:
        """Return the queue of a new watcher; None if there are too many."""
        if len(self._watchers) >= WATCHERS_MAX:
            return None
        watcher: Watcher = asyncio.Queue(QUEUED_MAX + 1)
        self._watchers.add(watcher)
        self._begin()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; the last one ends the sampling."""
        self._watchers.discard(watcher)
        self._end_unwatched()

    def poll(self) -> None:
        """Take samples for some seconds: a caller that polls is present."""
        self._polled_until = self._clock.now() + POLLED_S
        self._begin()

    async def close(self) -> None:
        """End every stream and the sampling."""
        for watcher in self._watchers:
            while not watcher.empty():
                watcher.get_nowait()
            watcher.put_nowait(None)
        self._watchers.clear()
        await self._tasks.cancel_and_wait()

    def _begin(self) -> None:
        if self._sampling is None:
            self._sampling = self._tasks.start(self._sample(), "sample")

    def _end_unwatched(self) -> None:
        if self._sampling is not None and not self._is_watched():
            self._sampling.cancel()
            self._sampling = None

    def _is_watched(self) -> bool:
        return bool(self._watchers) or self._clock.now() < self._polled_until

    async def _sample(self) -> None:
        while self._is_watched():
            event = await self._take()
            if event is not None:
                self._send(event)
            await self._clock.sleep(self._interval_s)
        self._sampling = None

    def _send(self, event: bytes) -> None:
        for watcher in self._watchers:
            if watcher.qsize() < QUEUED_MAX:
                watcher.put_nowait(event)
