"""KvIndex: the prefixes that each worker's cache holds.

    run ──────────────────────────────┐          A run is a sequence of consecutive blocks as first stored by a worker.
    │ b0 b1 b2 b3 b4 b5 b6 b7 …       │          Another continuation of b3 is a separate run, anchored at b3.
    └────────── b4' b5' b6' …
    full: workers that hold all of it   shorter: {lead: workers that hold exactly that many blocks from its start}

Blocks are identified by their token hashes, packed into eight bytes each, so that a prompt is compared with a run by memory
comparison; a look-up takes a few operations per run on its path, whatever its length. No sequence hash is computed. Sets of
workers are integers with one bit for each rank's slot.

Engines name their blocks by keys (`block_hash`). Where engines derive keys alike, one table from keys to runs serves all of
them (`CommonNames`), and the runs alone record what a rank holds; a rank with different keys has a table of its own
(`IndexedRank`). Blocks that a worker holds after a block it has evicted ("stray") do not count as prefix until that block returns.
Blocks that no worker holds are kept only while a later block of their run is held, so the size of the index follows from the
workers' blocks (`validate`).

Pure: no clock, no task. A rank that leaves disappears from all results at once; its entries are swept in slices.
"""

from collections.abc import Iterator

import msgspec

from dynamo.kv_router.config import BLOCKS_MAX
from dynamo.kv_router.index_dump import dump_rank
from dynamo.kv_router.names import CommonNames, Names
from dynamo.kv_router.ranks import IndexedRank
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

SWEEP_SLICE = 512  # Entries of departed ranks swept with each event.


class Overlap(msgspec.Struct, gc=False):
    """The ranks' cached blocks of one prompt."""

    blocks: int
    """Complete blocks of the prompt."""
    depths: list[tuple[int, int]]
    """Pairs of (blocks from the start, slots as bits that hold exactly that many on their device); 0 is omitted."""
    path: list[tuple[int, int, Run]]
    """The runs along the prompt: number of the first block, number of blocks, run."""


class KvIndex:
    """Cached prefixes of all ranks, in three tiers."""

    def __init__(self, blocks_max: int = BLOCKS_MAX, names: Names | None = None) -> None:
        """`blocks_max` bounds the index; the least recently used runs are evicted. `names`: an empty table."""
        self.blocks_max = blocks_max
        self._ranks: dict[tuple[int, int], IndexedRank] = {}
        self._slots: list[IndexedRank | None] = []
        self.rank_keys: list[tuple[int, int]] = []
        """Worker id and rank of every slot, also of a slot that is free again."""
        self._free: list[int] = []
        self._live = 0
        """Slots of ranks that have not left, as bits."""
        self.joined = 0
        """Number of ranks that were given a slot so far: the slots are the same while it is the same."""
        self._gone: list[IndexedRank] = []
        self._tree = RunTree(CommonNames() if names is None else names, self._slots)
        self.counts = self._tree.counts

    @property
    def size(self) -> int:
        """Return the number of blocks, each counted once regardless of the ranks that hold it."""
        return self._tree.size

    @property
    def lower(self) -> int:
        """Return the slots, as bits, that have held a block in a slower tier."""
        return self._tree.lower

    # Ranks.

    def ranks(self) -> list[tuple[int, int]]:
        """Return worker id and rank of all ranks that hold or held a block."""
        return list(self._ranks)

    def slots(self) -> dict[tuple[int, int], int]:
        """Return the slot of each rank."""
        return {name: rank.slot for name, rank in self._ranks.items()}

    def rank_at(self, slot: int) -> tuple[int, int]:
        """Return the rank of a slot."""
        rank = self._slots[slot]
        assert rank is not None, "the slot is unassigned"
        return rank.worker_id, rank.dp_rank

    def slot_of(self, worker_id: int, dp_rank: int = 0) -> int:
        """Return the slot of a known rank. Raises `KeyError` for an unknown one."""
        return self._ranks[(worker_id, dp_rank)].slot

    def held(self, worker_id: int, dp_rank: int = 0) -> int:
        """Return the number of blocks that a rank holds, in all tiers."""
        rank = self._ranks.get((worker_id, dp_rank))
        return 0 if rank is None else rank.count

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker from all results. Takes constant time, whatever the worker held."""
        for name in [name for name in self._ranks if name[0] == worker_id]:
            self.clear(*name)

    def clear(self, worker_id: int, dp_rank: int) -> None:
        """Drop all blocks of a rank, in all tiers."""
        rank = self._ranks.pop((worker_id, dp_rank), None)
        if rank is not None:
            self.counts.cleared += 1
            self._live &= ~rank.bit
            self._tree.lower &= ~rank.bit
            self._gone.append(rank)

    def sweep(self, limit: int = SWEEP_SLICE) -> bool:
        """Delete up to `limit` entries of departed ranks. Return True while entries remain."""
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
        """Store consecutive blocks after the block `parent` (None: at the start of a prompt).

        `blocks` are their packed token hashes (`pack`). Returns False, and stores nothing, if the parent is unknown.
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
        """Remove evicted blocks. Return False if one of them is unknown; the others are removed nevertheless."""
        if self._gone:
            self.sweep()
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            self.counts.block_not_found += 1
            return False
        self.counts.removed += 1
        return self._tree.release(rank, keys, tier)

    # Queries.

    def find(self, blocks: bytes) -> Overlap:
        """Return the ranks' cached blocks of a prompt, given its packed token hashes."""
        depths: list[tuple[int, int]] = []
        path: list[tuple[int, int, Run]] = []
        going, at, size = self._live, 0, len(blocks)
        run = self._tree.roots.get(blocks[:WIDTH])
        touch = self._tree.used.touch
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
        """Return the number of blocks from the start that each rank holds on its device; ranks without any are omitted."""
        found: dict[tuple[int, int], int] = {}
        for depth, ranks in overlap.depths:
            for slot in slots_of(ranks):
                found[self.rank_at(slot)] = depth
        return found

    def holders_below(self, overlap: Overlap) -> set[int]:
        """Return the slots that hold a block of the prompt in a slower tier."""
        if not self.lower:
            return set()
        return {slot for _, _, run in overlap.path if run.lower for _, slot in run.lower if self._live >> slot & 1}

    def beyond(self, overlap: Overlap, slot: int, depth: int, tier: int) -> int:
        """Return the number of consecutive blocks that a rank holds in a slower tier, from block `depth` on."""
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

    # Dump and validation.

    def dump(self) -> Iterator[tuple[int, int, int, Stored | Removed]]:
        """Yield events that rebuild the index from empty: worker, rank and tier of each event, then the event.

        A rank's blocks may follow blocks that it no longer holds, or holds in another tier: those are stored as well, and
        removed again after the blocks that follow them.
        """
        for worker_id, dp_rank in self._ranks:
            for tier, event in self.dump_rank(worker_id, dp_rank):
                yield worker_id, dp_rank, tier, event

    def dump_rank(self, worker_id: int, dp_rank: int) -> Iterator[tuple[int, Stored | Removed]]:
        """Yield the same events for one rank, which may be unknown: tier and event."""
        rank = self._ranks.get((worker_id, dp_rank))
        return iter(()) if rank is None else dump_rank(rank, lambda key: self._tree.find(rank, key))

    def validate(self) -> None:
        """Raise `AssertionError` if the parts disagree."""
        size = 0
        for run in self._tree.used:
            size += len(run)
            assert len(run.blocks) == len(run) * WIDTH, "each block has a key"
            assert len(run), "an empty run is kept"
            assert run.held_until() == len(run), "a run keeps blocks after its last held block"
            assert len(run) not in (run.shorter or {}), "a rank that holds the full run is listed as holding less"
            for slot, bits in (run.stray or {}).items():
                assert bits, "a rank has an empty set of stray blocks"
                assert not bits & ((1 << run.lead(1 << slot) + 1) - 1), "a stray block continues the lead"
            if run.parent is None:
                assert self._tree.roots.get(run.blocks[:WIDTH]) is run, "a root run is missing from the table"
            else:
                assert run.parent in self._tree.used, "the parent of a run was removed"
                assert run.parent.children is not None, "a parent has no table of children"
                assert run.parent.children[(run.anchor, run.blocks[:WIDTH])] is run, "a run is missing from its parent"
                assert run.anchor < len(run.parent), "a run is anchored after its parent's end"
        assert size == self._tree.size, "the block count is wrong"
        common_runs = [run for run in self._tree.used if run.is_common]
        assert len(self._tree.names) == sum(map(len, common_runs)), "a common name belongs to no run"
        for run in common_runs:
            assert all(self._tree.names.get(key) is run for key in run.keys), "a block has no common name"
        held_by: dict[int, dict[Run, int]] = {}
        for run in self._tree.used:
            for slot in run.holders():
                if bits := held_anywhere(run, slot):
                    held_by.setdefault(slot, {})[run] = bits
        for rank in self._ranks.values():
            assert list(rank.runs) == [run for run in rank.runs if held_anywhere(run, rank.slot)], (
                "a rank is listed with a run of which it holds nothing"
            )
            held = held_by.get(rank.slot, {})
            assert held.keys() == rank.runs.keys(), "a rank's runs differ from the runs that list it"
            assert rank.count == sum(bits.bit_count() for bits in held.values()), "a rank's block count is wrong"
            assert not any(bits & ~held.get(run, 0) for run, bits in rank.named.items()), "a key names a block not held"
            assert sum(bits.bit_count() for bits in rank.named.values()) == sum(map(len, rank.segments))
            for run, bits in held.items():
                assert run.is_common or bits == rank.named.get(run), "a block has no key"
            for segment in rank.segments:
                for key, run in segment.items():
                    assert rank.named[run] >> rank.place(run, key) & 1, "a rank's own key is not recorded"

    # Implementation.

    def _join(self, worker_id: int, dp_rank: int) -> IndexedRank:
        slot = self._free.pop() if self._free else len(self._slots)
        rank = IndexedRank(worker_id, dp_rank, slot)
        if slot == len(self._slots):
            self._slots.append(rank)
            self.rank_keys.append((rank.worker_id, rank.dp_rank))
        else:
            self._slots[slot] = rank
            self.rank_keys[slot] = rank.worker_id, rank.dp_rank
        self._ranks[(worker_id, dp_rank)] = rank
        self._live |= rank.bit
        self.joined += 1
        return rank
