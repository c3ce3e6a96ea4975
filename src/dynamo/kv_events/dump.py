"""KvDump: minimal list of events that recreate the state of a cache and its lower tiers at one moment, built in steps.

Serializing a large cache takes tens of milliseconds, too long to delay token streams: `work` does a small part of it.

A router attaches a block to its parent, and may index each tier separately. Tiers are therefore dumped from the nearest
to the farthest, parents first; a block with a descendant in a nearer tier is stored in that tier as well, and removed
at the end.
"""

from collections.abc import Callable, Iterator, Sequence

from dynamo.protocols.kv_events import Removed, Stored, StoredBlock, WorkerKvEvent

TIERS = ("device", "host_pinned", "disk", "external")
"""Storage tiers of a block, from the nearest to the farthest."""

_Chain = tuple[int | None, list[int]]
"""The parent hash of the first block, and the indexes of blocks that follow each other without a fork."""


class KvDump:
    """Dump of blocks, each with its parent hash and a bit for every tier that holds it; some are in no tier.

    `make_event` creates the event with the given number from a change in a tier.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock],
        parents: Sequence[int | None],
        tiers: Sequence[int],
        make_event: Callable[[int, Stored | Removed, str], WorkerKvEvent],
    ) -> None:
        assert len(blocks) == len(parents) == len(tiers), "blocks, parents and tiers must have equal lengths"
        self.events: list[WorkerKvEvent] = []
        self.is_complete = False
        self._blocks = blocks
        self._parents = parents
        self._tiers = tiers
        self._make_event = make_event
        self._steps = self._make()

    def work(self, blocks: int) -> None:
        """Process that many blocks; each block is processed five times, and once more per tier beyond the first."""
        for _ in range(blocks):
            if next(self._steps, None) is None:
                self.is_complete = True
                return

    def complete(self) -> list[WorkerKvEvent]:
        """Finish the dump, however long it takes, and return its events."""
        for _ in self._steps:
            pass
        self.is_complete = True
        return self.events

    def _make(self) -> Iterator[bool]:
        """Build the events; yield after each block."""
        chains: list[_Chain] = []
        yield from self._find(chains)
        targets = [0] * len(self._blocks)
        yield from self._reach(chains, targets)
        used = 0
        for bits in targets:
            used |= bits
            yield True
        for tier in range(len(TIERS)):
            if used >> tier & 1:
                yield from self._store(chains, targets, tier)
        yield from self._take_back(targets)

    def _find(self, chains: list[_Chain]) -> Iterator[bool]:
        """Collect the chains, parents first."""
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

    def _reach(self, chains: list[_Chain], targets: list[int]) -> Iterator[bool]:
        """Compute the tiers to store each block in: those that hold it, and the nearest tier of its descendants."""
        below: dict[int, int] = {}
        for parent_hash, chain in reversed(chains):
            bits = below.pop(self._blocks[chain[-1]].block_hash, 0)
            for place in reversed(chain):
                held = self._tiers[place]
                bits |= held
                bits &= -bits
                targets[place] = held | bits
                yield True
            if parent_hash is not None:
                below[parent_hash] = below.get(parent_hash, 0) | bits

    def _store(self, chains: list[_Chain], targets: list[int], tier: int) -> Iterator[bool]:
        for before, chain in chains:
            parent_hash, first, run = before, before, list[StoredBlock]()
            for place in chain:
                block = self._blocks[place]
                if targets[place] >> tier & 1:
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

    def _take_back(self, targets: list[int]) -> Iterator[bool]:
        gone: list[list[int]] = [[] for _ in TIERS]
        for place, bits in enumerate(targets):
            if extra := bits & ~self._tiers[place]:
                gone[extra.bit_length() - 1].append(self._blocks[place].block_hash)
            yield True
        for tier, hashes in enumerate(gone):
            if hashes:
                self._add(Removed(hashes), tier)

    def _add(self, change: Stored | Removed, tier: int) -> None:
        self.events.append(self._make_event(len(self.events) + 1, change, TIERS[tier]))
