"""Eviction: the order in which idle blocks are evicted.

Sequences release their blocks from the end, so a block becomes idle after the blocks that continue it. Evicting the
block that has been idle longest therefore never removes the parent of a cached block: *lineage*, which evicts leaves
only, and *LRU*, which considers time only, give the same order here and share one implementation.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from dynamo.mocker.simulation.marks import Marks
from dynamo.mocker.simulation.rules import EvictionName

LEVELS = (2, 4, 8)  # Use counts at which a block moves up a level.
USES_MAX = 16  # Cap of the use count; a higher cap would only delay the eviction of blocks that are no longer used.
STALE_MAX = 4096  # Blocks in use again that may be listed beyond twice the number of readable ones.
FORGET_EVERY = 8  # Uses per block of the pool after which all counts are halved.


class IdleBlocks(Protocol):
    """Readable blocks without holders, in eviction order."""

    def __len__(self) -> int: ...

    def add_all(self, hashes: list[int]) -> int:
        """Add blocks that became idle, the last one first; return their mark, zero or less. The list is kept."""

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove blocks that are in use again."""

    def take(self, count: int) -> list[int]:
        """Remove and return the next blocks to evict; the caller forgets their marks."""


class LongestIdle:
    """Eviction of the block that has been idle longest.

    A mark numbers the call that added the blocks. A block that was in use in between is stale in earlier batches: it has another
    mark there.
    """

    def __init__(self, marks: Marks) -> None:
        """`marks`: the marks of idle blocks, maintained by the caller; a block in use has another number or none."""
        self._marks = marks
        self._batches: deque[tuple[int, list[int]]] = deque()
        """Mark and blocks; the last block of a batch is the first to be evicted."""
        self._listed = 0
        """Blocks in the batches, with stale ones."""
        self._mark = 0

    def __len__(self) -> int:
        """Scans all batches."""
        return sum(len(self._marks.marked(hashes, mark)) for mark, hashes in self._batches)

    def add_all(self, hashes: list[int]) -> int:
        """See `IdleBlocks`."""
        if self._listed > 2 * len(self._marks) + STALE_MAX:
            self._drop_stale()
        self._mark -= 1
        self._batches.append((self._mark, hashes))
        self._listed += len(hashes)
        return self._mark

    def remove(self, hashes: Sequence[int]) -> None:
        """See `IdleBlocks`."""

    def take(self, count: int) -> list[int]:
        """See `IdleBlocks`."""
        taken: list[int] = []
        marked = self._marks.marked
        while count > 0:
            mark, hashes = self._batches[0]
            some = hashes[: -count - 1 : -1]
            del hashes[-count:]
            self._listed -= len(some)
            if not hashes:
                self._batches.popleft()
            found = marked(some, mark)
            taken += found
            count -= len(found)
        return taken

    def _drop_stale(self) -> None:
        kept = [(mark, self._marks.marked(hashes, mark)) for mark, hashes in self._batches]
        self._batches = deque(batch for batch in kept if batch[1])
        self._listed = sum(len(hashes) for _, hashes in self._batches)


class MultiLru:
    """Levels by use count; the lowest non-empty level evicts the block that has been idle longest.

    Counts are halved periodically, so that blocks which were used often in the past can be evicted.
    """

    def __init__(self, capacity: int) -> None:
        self._levels = [OrderedDict[int, None]() for _ in range(len(LEVELS) + 1)]
        self._level_of: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._until_forgetting = self._patience = FORGET_EVERY * capacity

    def __len__(self) -> int:
        return len(self._level_of)

    def add_all(self, hashes: list[int]) -> int:
        """See `IdleBlocks`."""
        for block_hash in reversed(hashes):
            self._add(block_hash)
        return 0

    def remove(self, hashes: Sequence[int]) -> None:
        """See `IdleBlocks`."""
        for block_hash in hashes:
            del self._levels[self._level_of.pop(block_hash)][block_hash]

    def take(self, count: int) -> list[int]:
        """See `IdleBlocks`."""
        return [self._take() for _ in range(count)]

    def _add(self, block_hash: int) -> None:
        uses = min(self._uses.get(block_hash, 0) + 1, USES_MAX)
        self._uses[block_hash] = uses
        level = sum(uses >= bound for bound in LEVELS)
        self._level_of[block_hash] = level
        self._levels[level][block_hash] = None
        self._until_forgetting -= 1
        if self._until_forgetting <= 0:
            self._until_forgetting = self._patience
            self._uses = {known: uses // 2 for known, uses in self._uses.items() if uses > 1}

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

    def __len__(self) -> int:
        return len(self._entry)

    def remove(self, hashes: Sequence[int]) -> None:
        """See `IdleBlocks`."""
        for block_hash in hashes:
            del self._entry[block_hash]

    def use(self, hashes: Sequence[int], at: float) -> None:
        """Record the time at which a sequence last used its blocks."""
        used_at = self._used_at
        for block_hash in hashes:
            used_at[block_hash] = max(at, used_at.get(block_hash, at))

    def add_all(self, hashes: list[int]) -> int:
        """See `IdleBlocks`."""
        for block_hash in reversed(hashes):
            number = self._entry[block_hash] = next(self._count)
            heapq.heappush(self._heap, (self._used_at.setdefault(block_hash, 0.0), number, block_hash))
        if len(self._heap) > 2 * len(self._entry) + STALE_MAX:
            entry = self._entry
            self._heap = [one for one in self._heap if entry.get(one[2]) == one[1]]
            heapq.heapify(self._heap)
        return 0

    def take(self, count: int) -> list[int]:
        """See `IdleBlocks`."""
        found: list[int] = []
        while len(found) < count:
            _, number, block_hash = heapq.heappop(self._heap)
            if self._entry.get(block_hash) == number:  # Otherwise the block was in use in between.
                del self._entry[block_hash], self._used_at[block_hash]
                found.append(block_hash)
        return found


def idle_blocks(name: EvictionName, capacity: int, marks: Marks) -> LongestIdle | MultiLru:
    """Return the eviction policy `name` for a pool of `capacity` blocks; `marks` as for `LongestIdle`."""
    return MultiLru(capacity) if name == "multi_lru" else LongestIdle(marks)
