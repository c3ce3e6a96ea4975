"""Eviction: which of the blocks that nobody uses is given away next. Pure."""

from collections.abc import Callable
from typing import Protocol

from dynamo.kvbm.logical.frequency import Sketch

LEVELS = 4  # Seen once, up to three times, up to seven times, more often: beyond that blocks do not differ.


class Inactive(Protocol):
    """The blocks that nobody uses, in the order in which they go."""

    def add(self, slot: int, sequence_hash: int, priority: int) -> None:
        """Its last user let go of it."""

    def remove(self, slot: int) -> None:
        """Somebody uses it again, or it is gone."""

    def pop(self) -> int:
        """The next one to go. Raises `IndexError` if there is none."""

    def __len__(self) -> int: ...


class _Ranked:
    """Places in ranks: the lowest rank goes first, and in it who came first."""

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
    """The lowest priority first, and among equals the one that was used longest ago."""

    def add(self, slot: int, sequence_hash: int, priority: int) -> None:
        self.put(slot, priority)


class LevelledLru(_Ranked):
    """The lowest priority first, then what was seldom asked for, then what was used longest ago."""

    def __init__(self, frequency: Callable[[int], int]) -> None:
        super().__init__()
        self._frequency = frequency

    def add(self, slot: int, sequence_hash: int, priority: int) -> None:
        level = min(LEVELS, self._frequency(sequence_hash).bit_length())
        self.put(slot, priority * (LEVELS + 1) + level)


def make_inactive(policy: str, sketch: Sketch) -> Inactive:
    """`lru` or `lfu`."""
    return Lru() if policy == "lru" else LevelledLru(sketch.estimate)
