"""Work queue of a controller: keys that are processed once each at a time, with delays and rate-limited retries.

    while (key := await queue.get()) is not None:
        ...                                # process; on failure `queue.add_rate_limited(key)`, else `queue.forget(key)`
        queue.done(key)

A key that waits is queued once. A key that is added while it is processed is queued again by `done`, so that no key is
processed twice at the same time and no addition is lost. The defaults are those of client-go's controllers.
"""

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.tasks import TaskOwner
from dynamo.core.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
DOUBLINGS_MAX = 64  # Keeps the power finite; the limit of the delay is reached long before.
STALE_TIMERS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """Delays of retries: exponential for each key, and a token bucket for all keys together. The longer one applies."""

    first_s: float = 0.005
    max_s: float = 1000.0
    per_s: float = 10.0
    """Retries per second of all keys together."""
    burst: int = 100

    def delay_s(self, failures: int) -> float:
        """Return the delay of a key after its first `failures` retries."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures, DOUBLINGS_MAX))


@dataclass(slots=True)
class _Entry:
    """State of one key."""

    is_queued: bool = False
    is_dirty: bool = False
    """Added while it is processed."""
    began: float | None = None
    """Time at which processing began."""
    due: float | None = None
    """Time at which a delayed addition is due."""
    failures: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.is_queued or self.is_dirty or self.failures) and self.began is None and self.due is None


class WorkQueue(Generic[Key]):
    """Deduplicating queue with delayed and rate-limited additions. Use it from one event loop."""

    def __init__(
        self, limits: RetryLimits | None = None, *, max_keys: int = 100_000, clock: Clock | None = None
    ) -> None:
        """Keep at most `max_keys` keys; a further one is refused and counted in `refused`."""
        assert max_keys > 0, "expected room for a key"
        self.max_keys = max_keys
        self._limits = limits or RetryLimits()
        self._bucket = TokenBucket(self._limits.burst, self._limits.per_s)
        self._clock = clock or SystemClock()
        self._entries: dict[Key, _Entry] = {}
        self._ready: deque[Key] = deque()
        self._delayed: list[tuple[float, int, Key]] = []
        """Heap by due time. An element is stale if its time is not that of the key's entry."""
        self._order = itertools.count()
        self._available = asyncio.Event()
        self._tasks = TaskOwner("work queue")
        self._timer: asyncio.Task[None] | None = None
        self._timer_due = 0.0
        self._is_closed = False
        self.adds = 0
        """Number of times that a key was queued."""
        self.retries = 0
        self.refused = 0

    @property
    def depth(self) -> int:
        """Number of keys that wait to be processed, without delayed ones."""
        return len(self._ready)

    @property
    def delayed(self) -> int:
        """Number of keys with a delayed addition."""
        return sum(entry.due is not None for entry in self._entries.values())

    @property
    def processing(self) -> int:
        """Number of keys that are being processed."""
        return sum(entry.began is not None for entry in self._entries.values())

    @property
    def longest_running_s(self) -> float:
        """Seconds for which the longest of the keys in process has been processed."""
        now = self._clock.now()
        return max((now - entry.began for entry in self._entries.values() if entry.began is not None), default=0.0)

    def failures(self, key: Key) -> int:
        """Return the number of rate-limited additions of a key since it was last forgotten."""
        entry = self._entries.get(key)
        return entry.failures if entry else 0

    def add(self, key: Key) -> bool:
        """Queue a key, unless it waits already. Return False if the queue is full or closed."""
        entry = self._entry(key)
        if entry is None:
            return False
        if entry.began is not None:
            entry.is_dirty = True
        elif not entry.is_queued:
            entry.is_queued = True
            self._ready.append(key)
            self._available.set()
            self.adds += 1
        return True

    def add_after(self, key: Key, seconds: float) -> bool:
        """Queue a key after a delay. Of several delays of one key the earliest applies."""
        if seconds <= 0:
            return self.add(key)
        entry = self._entry(key)
        if entry is None:
            return False
        due = self._clock.now() + seconds
        if entry.due is None or due < entry.due:
            entry.due = due
            self._delay(key, due)
        return True

    def add_rate_limited(self, key: Key) -> bool:
        """Queue a key after the delay of its next retry."""
        entry = self._entry(key)
        if entry is None:
            return False
        now = self._clock.now()
        wait_s = max(self._limits.delay_s(entry.failures), self._bucket.wait_s(now, 1.0))
        self._bucket.take(1.0, now)
        entry.failures += 1
        self.retries += 1
        return self.add_after(key, wait_s)

    def forget(self, key: Key) -> None:
        """Start the delays of a key with the first one again: it succeeded, or is not retried."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.failures = 0
            self._drop_idle(key, entry)

    async def get(self) -> Key | None:
        """Return the next key, which is in process until `done`; None once the queue is closed."""
        while not self._is_closed:
            if self._ready:
                key = self._ready.popleft()
                entry = self._entries[key]
                entry.is_queued, entry.began = False, self._clock.now()
                return key
            self._available.clear()
            await self._available.wait()
        return None

    def done(self, key: Key) -> None:
        """End the processing of a key, and queue it again if it was added in the meantime."""
        entry = self._entries[key]
        assert entry.began is not None, "the key is not in process"
        is_dirty, entry.began, entry.is_dirty = entry.is_dirty, None, False
        if is_dirty:
            self.add(key)
        self._drop_idle(key, entry)

    async def close(self) -> None:
        """Accept no more keys, and make every `get` return None. Queued keys are dropped, processing ones may end."""
        self._is_closed = True
        self._ready.clear()
        self._delayed.clear()
        self._entries = {key: entry for key, entry in self._entries.items() if entry.began is not None}
        self._available.set()
        await self._tasks.cancel_and_wait()

    def _entry(self, key: Key) -> _Entry | None:
        """Return the entry of a key, a new one if there is room."""
        if self._is_closed:
            return None
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self.max_keys:
                self.refused += 1
                logger.warning("work queue is full with %d keys; %s is not queued", self.max_keys, key)
                return None
            entry = self._entries[key] = _Entry()
        return entry

    def _drop_idle(self, key: Key, entry: _Entry) -> None:
        if entry.is_idle:
            self._entries.pop(key, None)

    def _delay(self, key: Key, due: float) -> None:
        heapq.heappush(self._delayed, (due, next(self._order), key))
        if len(self._delayed) > 2 * len(self._entries) + STALE_TIMERS_MAX:
            self._delayed = [one for one in self._delayed if self._is_current(one[2], one[0])]
            heapq.heapify(self._delayed)
        self._arm()

    def _is_current(self, key: Key, due: float) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.due == due

    def _arm(self) -> None:
        """Keep one timer, for the earliest delayed key."""
        if self._is_closed or not self._delayed:
            return
        due = self._delayed[0][0]
        if self._timer is not None and not self._timer.done():
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._tasks.start(self._fire(due), "timer")

    async def _fire(self, due: float) -> None:
        """Queue the keys that are due, until none is delayed."""
        while True:
            await self._clock.sleep(max(0.0, due - self._clock.now()))
            now = self._clock.now()
            while self._delayed and self._delayed[0][0] <= now:
                at, _, key = heapq.heappop(self._delayed)
                if self._is_current(key, at):
                    self._entries[key].due = None
                    self.add(key)
            if not self._delayed:
                return
            due = self._timer_due = self._delayed[0][0]
