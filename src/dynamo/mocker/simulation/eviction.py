"""Eviction: in which order blocks that nobody holds give up their room.

Sequences let go of their blocks from the end, so a block falls idle after those that continue it. Taking the longest
idle one first therefore never takes a block from under another: *lineage*, which gives up leaves alone, and *LRU*, which
looks at the time alone, come to the same order here, and one member stands for both.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from dynamo.mocker.simulation.rules import EvictionName

LEVELS = (2, 4, 8)  # A block used as often as this moves up a level.
USES_MAX = 16  # More would only make it harder for a block to be forgotten.
FORGET_EVERY = 8  # Uses for each block of the pool, after which all counts are halved.


class IdleBlocks(Protocol):
    """Blocks that are readable and held by nobody; the first to be taken comes first."""

    def __contains__(self, block_hash: object) -> bool: ...

    def __len__(self) -> int: ...

    def __setitem__(self, block_hash: int, nothing: None) -> None:
        """The block falls idle."""

    def __delitem__(self, block_hash: int) -> None:
        """It is in use again."""

    def take(self) -> int:
        """Gives one up."""


class LongestIdle(OrderedDict[int, None]):
    """The one that fell idle first goes first."""

    def take(self) -> int:
        """Gives one up."""
        return self.popitem(last=False)[0]


class MultiLru:
    """Levels by how often a block was used: the lowest that has any gives up the one that fell idle first.

    Counts are halved now and then, so that what was asked for often yesterday does not stay for ever.
    """

    def __init__(self, capacity: int) -> None:
        self._levels = [OrderedDict[int, None]() for _ in range(len(LEVELS) + 1)]
        self._level_of: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._until_forgetting = self._patience = FORGET_EVERY * capacity

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._level_of

    def __len__(self) -> int:
        return len(self._level_of)

    def __setitem__(self, block_hash: int, nothing: None) -> None:
        uses = min(self._uses.get(block_hash, 0) + 1, USES_MAX)
        self._uses[block_hash] = uses
        level = sum(uses >= bound for bound in LEVELS)
        self._level_of[block_hash] = level
        self._levels[level][block_hash] = None
        self._until_forgetting -= 1
        if self._until_forgetting <= 0:
            self._until_forgetting = self._patience
            self._uses = {known: uses // 2 for known, uses in self._uses.items() if uses > 1}

    def __delitem__(self, block_hash: int) -> None:
        del self._levels[self._level_of.pop(block_hash)][block_hash]

    def __iter__(self) -> Iterator[int]:
        return iter([block_hash for level in self._levels for block_hash in level])

    def take(self) -> int:
        """Gives one up."""
        level = next(level for level in self._levels if level)
        block_hash = level.popitem(last=False)[0]
        del self._level_of[block_hash]
        return block_hash


def idle_blocks(name: EvictionName, capacity: int) -> LongestIdle | MultiLru:
    """The member of that name, for a pool of so many blocks."""
    return MultiLru(capacity) if name == "multi_lru" else LongestIdle()
