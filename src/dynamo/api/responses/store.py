"""Store: where responses are kept by their keys: the contract, and the member that is this process's own memory.

A record is bytes to a store. It is kept until nobody has asked for it for the store's lifetime, or until room is needed
for younger ones; then the one that was not asked for the longest goes first.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.metrics import Counter, MetricsRegistry

ENTRIES_MAX = 10_000
BYTES_MAX = 64 << 20  # Some thousand conversations, in a process that otherwise takes about 100 MB.
UNUSED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept, and for how long."""

    entries_max: int = ENTRIES_MAX
    bytes_max: int = BYTES_MAX
    unused_s: float = UNUSED_S
    """How long a record is kept that nobody asks for."""


class ResponseStore(Protocol):
    """A family with members in memory and in a directory (directory_store.py)."""

    @property
    def entries(self) -> int:
        """How many records there are, as far as is known."""

    @property
    def size(self) -> int:
        """And how large they are together."""

    def put(self, key: str, record: bytes) -> None:
        """Keeps a record. Never waits and never fails: what cannot be kept is counted as dropped."""

    async def get(self, key: str) -> bytes | None:
        """A record, None where there is none."""

    async def delete(self, key: str) -> bool:
        """Removes a record; whether there was one."""

    async def close(self) -> None:
        """What was put is kept by now; nothing is asked afterwards."""


class Dropped:
    """Counts the records that went without being deleted, by the reason."""

    def __init__(self, registry: MetricsRegistry | None, prefix: str) -> None:
        self._counters: dict[str, Counter] = {}
        if registry is not None:
            family = registry.counter(
                f"{prefix}_responses_store_dropped_total",
                "Stored responses that made room, expired or failed",
                ["reason"],
            )
            self._counters = {reason: family.labels(reason=reason) for reason in ("expired", "full", "failed")}

    def count(self, reason: str, number: int = 1) -> None:
        """`expired`, `full` or `failed`."""
        if reason in self._counters and number:
            self._counters[reason].inc(number)


class MemoryStore:
    """Records in this process: as many as fit, oldest use first."""

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
        self._make_room()

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
        """Asserts what must hold between calls."""
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

    def _make_room(self) -> None:
        """The records are in the order of their last use, so that both kinds of excess are at the front."""
        oldest_s = self._now() - self._limits.unused_s
        while self._records:
            key, (used_s, _) = next(iter(self._records.items()))
            is_expired = used_s < oldest_s
            if not is_expired and self._bytes <= self._limits.bytes_max and self.entries <= self._limits.entries_max:
                return
            self._pop(key)
            self._dropped.count("expired" if is_expired else "full")
