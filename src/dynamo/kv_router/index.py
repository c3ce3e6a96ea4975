"""KvIndex: which worker's cache holds which prefix (serving-plane.md §4.7).

    run ──────────────────────────────┐          A run is a stretch of consecutive blocks as some worker first told it.
    │ b0 b1 b2 b3 b4 b5 b6 b7 …       │          Another continuation of b3 is a run of its own, anchored there.
    └────────── b4' b5' b6' …
    full: workers that hold all of it   shorter: {lead: workers that hold so many from its start}

Blocks are known by their tokens hashes alone, packed eight bytes each, so that a prompt is compared with a run by
memory comparison, and a look-up costs a few steps for each run on its way, whatever its length. No sequence hash is
computed. Sets of workers are integers with a bit for each rank's slot.

An engine names its blocks by keys (`block_hash`). Where engines derive them alike, one table from keys to runs serves for
all (`CommonNames`), and what a rank holds is told by the runs alone; a rank whose keys mean something else has a table of
its own (`Rank`). What a worker holds behind a block that it has evicted ("stray") does not count as prefix, and
counts again when the block returns. Blocks that nobody holds stay only as long as somebody holds what follows them, so
the size of the index follows from what is held (`validate`).

Pure: no clock, no task. A rank that leaves is gone from all answers at once; its entries are swept a slice at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo.kv_router.index_dump import dump_rank
from dynamo.kv_router.names import CommonNames, Names
from dynamo.kv_router.ranks import Rank
from dynamo.kv_router.run_tree import RunTree
from dynamo.kv_router.runs import (
    DEVICE,
    WIDTH,
    Key,
    Run,
    common,
    held_anywhere,
    slots_of,
    trailing_ones,
)
from dynamo.protocols.kv_events import Removed, Stored

SWEEP_SLICE = 512  # Blocks and keys of ranks that left which are swept with each event.
BLOCKS_MAX = 1 << 24  # 16 M blocks, some 2 GB: far above what a fleet's devices hold together.


@dataclass(slots=True)
class Overlap:
    """Who holds how much of a prompt."""

    blocks: int
    """Complete blocks of the prompt."""
    depths: list[tuple[int, int]]
    """How many blocks from the start, and the slots (as bits) that hold exactly so many on their device; 0 is left out."""
    path: list[tuple[int, int, Run]]
    """The runs that the prompt goes through: the first block's number, how many blocks, the run."""


class KvIndex:
    """Which ranks hold which prefixes, in three tiers."""

    def __init__(self, blocks_max: int = BLOCKS_MAX, names: Names | None = None) -> None:
        """`blocks_max` is a hard bound; the runs that were used longest ago go first. `names`: an empty table."""
        self.blocks_max = blocks_max
        self._ranks: dict[tuple[int, int], Rank] = {}
        self._slots: list[Rank | None] = []
        self._free: list[int] = []
        self._live = 0
        """The slots whose ranks have not left."""
        self._gone: list[Rank] = []
        self._tree = RunTree(CommonNames() if names is None else names, self._slots)
        self.counts = self._tree.counts

    @property
    def size(self) -> int:
        """Blocks in the index, each counted once however many hold it."""
        return self._tree.size

    @property
    def lower(self) -> int:
        """The slots, as bits, that ever held something in a slower tier."""
        return self._tree.lower

    # Ranks.

    def ranks(self) -> list[tuple[int, int]]:
        """Worker id and rank of everybody who holds or held something."""
        return list(self._ranks)

    def rank_at(self, slot: int) -> tuple[int, int]:
        """Whose slot it is."""
        rank = self._slots[slot]
        assert rank is not None, "nobody has this slot"
        return rank.worker_id, rank.dp_rank

    def slot_of(self, worker_id: int, dp_rank: int = 0) -> int:
        """The slot of a rank that is known; raises `KeyError` for another."""
        return self._ranks[(worker_id, dp_rank)].slot

    def held(self, worker_id: int, dp_rank: int = 0) -> int:
        """How many blocks a rank holds, in all tiers."""
        rank = self._ranks.get((worker_id, dp_rank))
        return 0 if rank is None else rank.count

    def remove_worker(self, worker_id: int) -> None:
        """The worker left: none of its ranks is in any answer from now on. Costs the same whatever it held."""
        for name in [name for name in self._ranks if name[0] == worker_id]:
            self.clear(*name)

    def clear(self, worker_id: int, dp_rank: int) -> None:
        """The rank dropped its whole cache, in all tiers."""
        rank = self._ranks.pop((worker_id, dp_rank), None)
        if rank is not None:
            self.counts.cleared += 1
            self._live &= ~rank.bit
            self._tree.lower &= ~rank.bit
            self._gone.append(rank)

    def sweep(self, limit: int = SWEEP_SLICE) -> bool:
        """Drops up to so many entries of ranks that left; True while there are more."""
        while self._gone:
            rank = self._gone[-1]
            while rank.runs and limit > 0:
                run, _ = rank.runs.popitem()
                before = self._tree.size
                self._tree.drop(run, rank)
                limit -= 1 + before - self._tree.size
            while rank.segments and limit > 0:
                if rank.segments[-1]:
                    key, run = rank.segments[-1].popitem()
                    rank.odd.pop(key, None)
                    rank.named.pop(run, None)
                    limit -= 1
                else:
                    rank.segments.pop()
            if rank.runs or rank.segments:
                return True
            self._gone.pop()
            self._slots[rank.slot] = None
            self._free.append(rank.slot)
        return False

    # Events.

    def store(
        self, worker_id: int, dp_rank: int, parent: Key | None, keys: list[Key], blocks: bytes, tier: int = DEVICE
    ) -> bool:
        """Consecutive blocks became readable behind `parent` (None: at the start of a prompt).

        `blocks` are their packed tokens hashes (`pack`). False where the parent is unknown: nothing is stored then.
        """
        if self._gone:
            self.sweep()
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            if parent is not None:
                self.counts.parent_block_not_found += 1
                return False
            rank = self._join(worker_id, dp_rank)
        run: Run | None = None
        at = -1
        if parent is not None:
            run, at = self._tree.find(rank, parent)
            if run is None:
                self.counts.parent_block_not_found += 1
                return False
        self.counts.stored += 1
        if not keys:
            return True
        is_stored = self._tree.store(rank, parent, run, at, keys, blocks, tier)
        if self._tree.size > self.blocks_max:
            self._tree.shrink(self.blocks_max)
        return is_stored

    def remove(self, worker_id: int, dp_rank: int, keys: list[Key], tier: int = DEVICE) -> bool:
        """Blocks were evicted. False where one of them is unknown; the others are removed nevertheless."""
        if self._gone:
            self.sweep()
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            self.counts.block_not_found += 1
            return False
        self.counts.removed += 1
        return self._tree.release(rank, keys, tier)

    # Questions.

    def find(self, blocks: bytes) -> Overlap:
        """Who holds how much of a prompt, given its packed tokens hashes."""
        depths: list[tuple[int, int]] = []
        path: list[tuple[int, int, Run]] = []
        going, at, size = self._live, 0, len(blocks)
        run = self._tree.roots.get(blocks[:WIDTH])
        touch = self._tree.used.move_to_end
        while run is not None:
            own = run.blocks
            count = len(run.keys) if blocks.startswith(own, at) else common(own, blocks, at)
            path.append((at // WIDTH, count, run))
            touch(run)
            holders = run.full & going
            if run.shorter:
                for lead, some in run.shorter.items():
                    ranks = some & going
                    if lead >= count:
                        holders |= ranks
                    elif ranks:
                        depths.append((at // WIDTH + lead, ranks))
                        going ^= ranks
            if at and going != holders:
                depths.append((at // WIDTH, going ^ holders))
            going = holders
            at += count * WIDTH
            if at >= size or run.children is None:
                break
            run = run.children.get((count - 1, blocks[at : at + WIDTH]))
        if at and going:
            depths.append((at // WIDTH, going))
        return Overlap(size // WIDTH, depths, path)

    def depth_by_rank(self, overlap: Overlap) -> dict[tuple[int, int], int]:
        """How many blocks each rank holds on its device; who holds none is left out."""
        found: dict[tuple[int, int], int] = {}
        for depth, ranks in overlap.depths:
            for slot in slots_of(ranks):
                found[self.rank_at(slot)] = depth
        return found

    def beyond(self, overlap: Overlap, slot: int, depth: int, tier: int) -> int:
        """How many blocks a rank holds in a slower tier, in a row from block `depth` on."""
        rank = self._slots[slot]
        if rank is None or not rank.has_lower:
            return 0
        found = 0
        for first, count, run in overlap.path:
            at = depth + found - first
            if at >= count:
                continue
            if at < 0:
                break
            bits = run.lower.get((tier, slot), 0) >> at if run.lower else 0
            more = min(trailing_ones(bits), count - at)
            found += more
            if at + more < count:
                break
        return found

    # The whole of it.

    def dump(self) -> Iterator[tuple[int, int, int, Stored | Removed]]:
        """What leads from nothing to the present: worker, rank and tier of each event, then the event.

        A rank's blocks may follow some that it holds no longer, or in another tier: these are stored as well, and
        removed again when all that follows them is told.
        """
        for worker_id, dp_rank in self._ranks:
            for tier, event in self.dump_rank(worker_id, dp_rank):
                yield worker_id, dp_rank, tier, event

    def dump_rank(self, worker_id: int, dp_rank: int) -> Iterator[tuple[int, Stored | Removed]]:
        """The same of one rank, which may be unknown: tier and event."""
        rank = self._ranks.get((worker_id, dp_rank))
        return iter(()) if rank is None else dump_rank(rank, lambda key: self._tree.find(rank, key))

    def validate(self) -> None:
        """Raises `AssertionError` where the parts disagree."""
        size = 0
        for run in self._tree.used:
            size += len(run)
            assert len(run.blocks) == len(run) * WIDTH, "each block has a key"
            assert len(run), "an empty run is kept"
            assert run.held_until() == len(run), "blocks are kept that lead to nothing which is held"
            assert len(run) not in (run.shorter or {}), "who holds all of a run is among those who hold less"
            for slot, bits in (run.stray or {}).items():
                assert bits, "a rank has an empty list of stray blocks"
                assert not bits & ((1 << run.lead(1 << slot) + 1) - 1), "a stray block continues the lead"
            if run.parent is None:
                assert self._tree.roots.get(run.blocks[:WIDTH]) is run, "a first run cannot be found"
            else:
                assert run.parent in self._tree.used, "a run hangs on one that is gone"
                assert run.parent.children is not None, "a parent does not know its child"
                assert run.parent.children[(run.anchor, run.blocks[:WIDTH])] is run, "a run cannot be found"
                assert run.anchor < len(run.parent), "a run hangs behind its parent's end"
        assert size == self._tree.size, "the blocks are miscounted"
        common_runs = [run for run in self._tree.used if run.is_common]
        assert len(self._tree.names) == sum(map(len, common_runs)), "a common name is of no run"
        for run in common_runs:
            assert all(self._tree.names.get(key) is run for key in run.keys), "a block has no common name"
        for rank in self._ranks.values():
            assert list(rank.runs) == [run for run in rank.runs if held_anywhere(run, rank.slot)], (
                "holds nothing of a run"
            )
            held = {run: bits for run in self._tree.used if (bits := held_anywhere(run, rank.slot))}
            assert held.keys() == rank.runs.keys(), "a rank holds of other runs than it knows"
            assert rank.count == sum(bits.bit_count() for bits in held.values()), "a rank's blocks are miscounted"
            assert not any(bits & ~held.get(run, 0) for run, bits in rank.named.items()), "a name of a block not held"
            assert sum(bits.bit_count() for bits in rank.named.values()) == sum(map(len, rank.segments))
            for run, bits in held.items():
                assert run.is_common or bits == rank.named.get(run), "a block without a name"
            for segment in rank.segments:
                for key, run in segment.items():
                    assert rank.named[run] >> rank.place(run, key) & 1, "a name of its own that is not noted"

    # How it is done.

    def _join(self, worker_id: int, dp_rank: int) -> Rank:
        slot = self._free.pop() if self._free else len(self._slots)
        rank = Rank(worker_id, dp_rank, slot)
        if slot == len(self._slots):
            self._slots.append(rank)
        else:
            self._slots[slot] = rank
        self._ranks[(worker_id, dp_rank)] = rank
        self._live |= rank.bit
        return rank
