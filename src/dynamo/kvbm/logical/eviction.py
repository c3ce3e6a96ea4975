"""Eviction: the order in which unused blocks are evicted. Pure."""

from collections.abc import Callable
from typing import Protocol

from dynamo.kvbm.logical.frequency import Sketch

LEVELS = 4  # Seen once, up to 3 times, up to 7 times, more often; higher counts are not distinguished.


class Inactive(Protocol):
    """Unused blocks, in order of eviction."""

    def add(self, slot: int, sequence_hash: int, priority: int) -> None:
        """Add a block that its last holder released."""

    def remove(self, slot: int) -> None:
        """Remove a block that is in use again or was dropped."""

    def pop(self) -> int:
        """Remove and return the slot to evict next. Raise `IndexError` if there is none."""

    def __len__(self) -> int: ...


class _Ranked:
    """Slots in ranks: evicted by ascending rank, first in first out within a rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[int, None]] = {}
        self._rank_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rank_of)

    def put(self, slot: int, rank: int) -> None:
        assert slot not in self._rank_of, "a block became unused twice"
        self._ranks.setdefault(rank, {})[slot] = None
        self._rank_of[slot] = rank

    def remove(self, slot: int) -> None:
        rank = self._rank_of.pop(slot)
        members = self._ranks[rank]
        del members[slot]
        if not members:
            del self._ranks[rank]

    def pop(self) -> int:
        if not self._rank_of:
            raise IndexError("no block is unused")
        slot = next(iter(self._ranks[min(self._ranks)]))
        self.remove(slot)
        return slot


class Lru(_Ranked):
    """Evicts the lowest priority first; among equals, the least recently used block."""

    def add(self, slot: int, sequence_hash: int, priority: int) -> None:
        self.put(slot, priority)


class LevelledLru(_Ranked):
    """Evicts the lowest priority first, then the least frequently requested block, then the least recently used."""

    def __init__(self, frequency: Callable[[int], int]) -> None:
        super().__init__()
        self._frequency = frequency

    def add(self, slot: int, sequence_hash: int, priority: int) -> None:
        level = min(LEVELS, self._frequency(sequence_hash).bit_length())
        self.put(slot, priority * (LEVELS + 1) + level)


def make_inactive(policy: str, sketch: Sketch) -> Inactive:
    """Return the eviction policy named `lru` or `lfu`."""
    return Lru() if policy == "lru" else LevelledLru(sketch.estimate)
