"""Eviction: the order in which idle blocks are evicted.

Sequences release their blocks from the end, so a block becomes idle after the blocks that continue it. Evicting the
block that has been idle longest therefore never removes the parent of a cached block: *lineage*, which evicts leaves
only, and *LRU*, which considers time only, give the same order here and share one implementation.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from dynamo.mocker.simulation.rules import EvictionName

LEVELS = (2, 4, 8)  # Use counts at which a block moves up a level.
USES_MAX = 16  # Cap of the use count; a higher cap would only delay the eviction of blocks that are no longer used.
STALE_MAX = 4096  # Blocks in use again that may be listed beyond the number of idle ones.
FORGET_EVERY = 8  # Uses per block of the pool after which all counts are halved.


class IdleBlocks(Protocol):
    """Readable blocks without holders, in eviction order."""

    def __contains__(self, block_hash: object) -> bool: ...

    def __len__(self) -> int: ...

    def __delitem__(self, block_hash: int) -> None:
        """Remove a block that is in use again."""

    def add_all(self, hashes: Sequence[int]) -> None:
        """Add blocks that became idle, in that order."""

    def take(self, count: int) -> list[int]:
        """Remove and return the next blocks to evict."""


class LongestIdle(dict[int, int]):
    """Eviction of the block that has been idle longest.

    The dictionary's order is that of eviction; its values number the calls that added the blocks. `_batches` leads to the first one
    without a scan of the places of removed keys. A block that was in use in between is stale there and has another number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches: deque[tuple[int, Sequence[int]]] = deque()
        self._at = 0
        """Place in the first batch."""
        self._listed = 0
        """Blocks in the batches, with stale ones."""
        self._calls = 0

    def add_all(self, hashes: Sequence[int]) -> None:
        """Add blocks that became idle, in that order. The list is kept."""
        if not hashes:
            return
        self._calls += 1
        self.update(dict.fromkeys(hashes, self._calls))
        self._batches.append((self._calls, hashes))
        self._listed += len(hashes)
        if self._listed > 2 * len(self) + STALE_MAX:
            self._drop_stale()

    def take(self, count: int) -> list[int]:
        """Remove and return the blocks that have been idle longest."""
        taken: list[int] = []
        while len(taken) < count:
            number, hashes = self._batches[0]
            block_hash = hashes[self._at]
            if self.get(block_hash) == number:
                del self[block_hash]
                taken.append(block_hash)
            self._at += 1
            if self._at == len(hashes):
                self._batches.popleft()
                self._listed -= len(hashes)
                self._at = 0
        return taken

    def _drop_stale(self) -> None:
        kept = [(number, [one for one in hashes if self.get(one) == number]) for number, hashes in self._batches]
        self._batches = deque(batch for batch in kept if batch[1])
        self._listed, self._at = len(self), 0


class MultiLru:
    """Levels by use count; the lowest non-empty level evicts the block that has been idle longest.

    Counts are halved periodically, so that blocks which were used often in the past can be evicted.
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

    def add_all(self, hashes: Sequence[int]) -> None:
        """Add blocks that became idle, in that order."""
        for block_hash in hashes:
            self[block_hash] = None

    def take(self, count: int) -> list[int]:
        """Remove and return the next blocks to evict."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        level = next(level for level in self._levels if level)
        block_hash = level.popitem(last=False)[0]
        del self._level_of[block_hash]
        return block_hash


class LastUsed:
    """Eviction of the block whose last use is the longest ago, as recorded by `use`, instead of the longest idle one.

    A block must be recorded with every sequence that holds it, so that it is never older than the blocks that continue it.
    """

    def __init__(self) -> None:
        self._used_at: dict[int, float] = {}
        """Last use of idle blocks, and of those in use that were recorded."""
        self._entry: dict[int, int] = {}
        """Number of the heap's valid entry of each idle block."""
        self._heap: list[tuple[float, int, int]] = []
        self._count = itertools.count()

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._entry

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entry)

    def __setitem__(self, block_hash: int, nothing: None) -> None:
        number = self._entry[block_hash] = next(self._count)
        heapq.heappush(self._heap, (self._used_at.setdefault(block_hash, 0.0), number, block_hash))

    def __delitem__(self, block_hash: int) -> None:
        del self._entry[block_hash]

    def use(self, hashes: Sequence[int], at: float) -> None:
        """Record the time at which a sequence last used its blocks."""
        used_at = self._used_at
        for block_hash in hashes:
            used_at[block_hash] = max(at, used_at.get(block_hash, at))

    def add_all(self, hashes: Sequence[int]) -> None:
        """Add blocks that became idle, in that order."""
        for block_hash in hashes:
            self[block_hash] = None
        if len(self._heap) > 2 * len(self._entry) + STALE_MAX:
            entry = self._entry
            self._heap = [one for one in self._heap if entry.get(one[2]) == one[1]]
            heapq.heapify(self._heap)

    def take(self, count: int) -> list[int]:
        """Remove and return the next blocks to evict."""
        found: list[int] = []
        while len(found) < count:
            _, number, block_hash = heapq.heappop(self._heap)
            if self._entry.get(block_hash) == number:  # Otherwise the block was in use in between.
                del self._entry[block_hash], self._used_at[block_hash]
                found.append(block_hash)
        return found


def idle_blocks(name: EvictionName, capacity: int) -> LongestIdle | MultiLru:
    """Return the eviction policy `name` for a pool of `capacity` blocks."""
    return MultiLru(capacity) if name == "multi_lru" else LongestIdle()
