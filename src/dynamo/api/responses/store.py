"""Response stores: the interface, and the store in the memory of this process.

A record is opaque bytes. It expires after the store's lifetime without an access; if the store is full, the least
recently used record is dropped first.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.metrics import Counter, MetricsRegistry

ENTRIES_MAX = 10_000
BYTES_MAX = 64 << 20  # Some thousand conversations, in a process that otherwise takes about 100 MB.
UNUSED_S = 24 * 3600.0


class StoreLimits(Struct, frozen=True):
    """Limits on size, number and age of records."""

    entries_max: int = ENTRIES_MAX
    bytes_max: int = BYTES_MAX
    unused_s: float = UNUSED_S
    """Lifetime of a record since its last access, in seconds."""


class ResponseStore(Protocol):
    """Key-value store of responses; implemented in memory and in a directory (directory_store.py)."""

    @property
    def entries(self) -> int:
        """Number of records, possibly approximate."""

    @property
    def size(self) -> int:
        """Total size of the records in bytes, possibly approximate."""

    def put(self, key: str, record: bytes) -> None:
        """Store a record. Never blocks and never fails: a record that cannot be stored is counted as dropped."""

    async def get(self, key: str) -> bytes | None:
        """Return a record; None if there is none."""

    async def delete(self, key: str) -> bool:
        """Delete a record; return whether it existed."""

    async def close(self) -> None:
        """Complete pending writes and close the store."""


class Dropped:
    """Counter of records that were dropped without being deleted, by reason."""

    def __init__(self, registry: MetricsRegistry | None, prefix: str) -> None:
        self._counters: dict[str, Counter] = {}
        if registry is not None:
            family = registry.counter(
                f"{prefix}_responses_store_dropped_total",
                "Stored responses dropped because the store was full, they expired, or writing failed",
                ["reason"],
            )
            self._counters = {reason: family.labels(reason=reason) for reason in ("expired", "full", "failed")}

    def count(self, reason: str, number: int = 1) -> None:
        """Count dropped records; `reason` is `expired`, `full` or `failed`."""
        if reason in self._counters and number:
            self._counters[reason].inc(number)


class MemoryResponseStore:
    """Least-recently-used store in the memory of this process."""

    def __init__(self, limits: StoreLimits, dropped: Dropped, clock: Clock | None = None) -> None:
        self._limits = limits
        self._dropped = dropped
        self._now: Callable[[], float] = (clock or SystemClock()).now
        self._records: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    @property
    def entries(self) -> int:
        return len(self._records)

    @property
    def size(self) -> int:
        return self._bytes

    def put(self, key: str, record: bytes) -> None:
        self._pop(key)
        if len(record) > self._limits.bytes_max:
            self._dropped.count("full")
            return
        self._records[key] = (self._now(), record)
        self._bytes += len(record)
        self._evict()

    async def get(self, key: str) -> bytes | None:
        held = self._records.get(key)
        if held is None:
            return None
        now_s = self._now()
        if now_s - held[0] > self._limits.unused_s:
            self._pop(key)
            self._dropped.count("expired")
            return None
        self._records[key] = (now_s, held[1])
        self._records.move_to_end(key)
        return held[1]

    async def delete(self, key: str) -> bool:
        return self._pop(key)

    async def close(self) -> None:
        self._records.clear()
        self._bytes = 0

    def validate(self) -> None:
        """Assert the invariants between calls."""
        assert self._bytes == sum(len(record) for _, record in self._records.values()), "bytes are miscounted"
        assert self._bytes <= self._limits.bytes_max, "more bytes than allowed"
        assert len(self._records) <= self._limits.entries_max, "more records than allowed"
        uses = [used_s for used_s, _ in self._records.values()]
        assert uses == sorted(uses), "records are not in the order of their last use"

    def _pop(self, key: str) -> bool:
        held = self._records.pop(key, None)
        if held is not None:
            self._bytes -= len(held[1])
        return held is not None

    def _evict(self) -> None:
        """Drop expired records and records beyond the limits; both are at the front, in the order of their last use."""
        oldest_s = self._now() - self._limits.unused_s
        while self._records:
            key, (used_s, _) = next(iter(self._records.items()))
            is_expired = used_s < oldest_s
            if not is_expired and self._bytes <= self._limits.bytes_max and self.entries <= self._limits.entries_max:
                return
            self._pop(key)
            self._dropped.count("expired" if is_expired else "full")
