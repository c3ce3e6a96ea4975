"""KvDump: a few events that lead from nothing to what a cache and the tiers below it held at one moment, made in pieces.

A large cache takes tens of milliseconds to tell, which no stream of tokens should wait for: `work` does a little of it.

A router places a block behind the one before it, and may keep each tier apart. So tiers are told from the nearest to the
farthest, each parents first; and a block that something nearer than itself follows is told there as well, and taken
back at the end.
"""

from collections.abc import Callable, Iterator, Sequence

from dynamo.protocols.kv_events import Removed, Stored, StoredBlock, WorkerKvEvent

TIERS = ("device", "host_pinned", "disk", "external")
"""Where a block can be, from the nearest to the farthest."""

_Chain = tuple[int | None, list[int]]
"""The hash of the block before the first, and the places of blocks that follow each other without a fork."""


class KvDump:
    """Each block with the hash of the one before it, and a bit for every tier that holds it; some are held by none.

    `tell` makes a change in a tier the event of that number.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock],
        parents: Sequence[int | None],
        tiers: Sequence[int],
        tell: Callable[[int, Stored | Removed, str], WorkerKvEvent],
    ) -> None:
        assert len(blocks) == len(parents) == len(tiers), "a block without what comes before it, or where it is"
        self.events: list[WorkerKvEvent] = []
        self.is_complete = False
        self._blocks = blocks
        self._parents = parents
        self._tiers = tiers
        self._tell = tell
        self._steps = self._make()

    def work(self, blocks: int) -> None:
        """Goes through so many blocks; five times each in all, and once more for each tier beyond the first."""
        for _ in range(blocks):
            if next(self._steps, None) is None:
                self.is_complete = True
                return

    def complete(self) -> list[WorkerKvEvent]:
        """All of it, however long it takes."""
        for _ in self._steps:
            pass
        self.is_complete = True
        return self.events

    def _make(self) -> Iterator[bool]:
        """Yields after each block."""
        chains: list[_Chain] = []
        yield from self._find(chains)
        told = [0] * len(self._blocks)
        yield from self._reach(chains, told)
        used = 0
        for bits in told:
            used |= bits
            yield True
        for tier in range(len(TIERS)):
            if used >> tier & 1:
                yield from self._store(chains, told, tier)
        yield from self._take_back(told)

    def _find(self, chains: list[_Chain]) -> Iterator[bool]:
        """The chains, parents first."""
        following: dict[int | None, list[int]] = {}
        for place, parent_hash in enumerate(self._parents):
            following.setdefault(parent_hash, []).append(place)
            yield True
        starts = following.get(None, [])[::-1]
        while starts:
            first = starts.pop()
            chain = [first]
            yield True
            while len(further := following.get(self._blocks[chain[-1]].block_hash, [])) == 1:
                chain.append(further[0])
                yield True
            starts += further[::-1]
            chains.append((self._parents[first], chain))

    def _reach(self, chains: list[_Chain], told: list[int]) -> Iterator[bool]:
        """Where each block is to be told: where it is held, and in the nearest tier of all that follows it."""
        below: dict[int, int] = {}
        for parent_hash, chain in reversed(chains):
            bits = below.pop(self._blocks[chain[-1]].block_hash, 0)
            for place in reversed(chain):
                held = self._tiers[place]
                bits |= held
                bits &= -bits
                told[place] = held | bits
                yield True
            if parent_hash is not None:
                below[parent_hash] = below.get(parent_hash, 0) | bits

    def _store(self, chains: list[_Chain], told: list[int], tier: int) -> Iterator[bool]:
        for before, chain in chains:
            parent_hash, first, run = before, before, list[StoredBlock]()
            for place in chain:
                block = self._blocks[place]
                if told[place] >> tier & 1:
                    if not run:
                        first = parent_hash
                    run.append(block)
                elif run:
                    self._add(Stored(first, None, run), tier)
                    run = []
                parent_hash = block.block_hash
                yield True
            if run:
                self._add(Stored(first, None, run), tier)

    def _take_back(self, told: list[int]) -> Iterator[bool]:
        gone: list[list[int]] = [[] for _ in TIERS]
        for place, bits in enumerate(told):
            if extra := bits & ~self._tiers[place]:
                gone[extra.bit_length() - 1].append(self._blocks[place].block_hash)
            yield True
        for tier, hashes in enumerate(gone):
            if hashes:
                self._add(Removed(hashes), tier)

    def _add(self, change: Stored | Removed, tier: int) -> None:
        self.events.append(self._tell(len(self.events) + 1, change, TIERS[tier]))
