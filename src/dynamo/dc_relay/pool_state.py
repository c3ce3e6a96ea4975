"""PoolState: the cached blocks of an endpoint's ranks, as reference counts of sequence hashes and their filter. Pure.

Engines name their blocks by keys of their own; a key is only meaningful to its rank. The canonical sequence hash of a
block follows from its tokens' hash and the sequence hash of its parent.
"""

from dynamo.dc_relay.cuckoo_filter import CuckooFilter
from dynamo.protocols.kv_events import Stored, WorkerKvEvent
from dynamo.tokens.hashing import next_sequence_hash

PRIMARY_TIER = "device"

Rank = tuple[int, int]


class PoolState:
    """Blocks of all ranks of one pool."""

    def __init__(self, bucket_count: int) -> None:
        self.filter = CuckooFilter(bucket_count)
        self.omitted: set[int] = set()
        """Cached blocks that the full filter has no room for."""
        self._holders: dict[int, int] = {}
        self._ranks: dict[Rank, dict[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._holders)

    def apply(self, kv_event: WorkerKvEvent) -> bool:
        """Apply a change of a rank's cache. Return False if a parent block is unknown: an event was missed."""
        data = kv_event.event.data
        if kv_event.storage_tier != PRIMARY_TIER:
            return True
        rank = (kv_event.worker_id, kv_event.event.dp_rank)
        if isinstance(data, str):
            self.forget(*rank)
            return True
        if data.stored is not None:
            return self._store(self._ranks.setdefault(rank, {}), data.stored)
        blocks = self._ranks.get(rank, {})
        for key in data.removed.block_hashes if data.removed is not None else ():
            removed = blocks.pop(key, None)
            if removed is not None:
                self._release(removed)
        return True

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Remove a rank's blocks."""
        for sequence_hash in self._ranks.pop((worker_id, dp_rank), {}).values():
            self._release(sequence_hash)

    def _store(self, blocks: dict[int, int], stored: Stored) -> bool:
        previous: int | None = None
        if stored.parent_hash is not None:
            previous = blocks.get(stored.parent_hash)
            if previous is None:
                return False
        for block in stored.blocks:
            previous = next_sequence_hash(previous, block.tokens_hash)
            before = blocks.get(block.block_hash)
            if before == previous:
                continue
            blocks[block.block_hash] = previous
            self._hold(previous)
            if before is not None:
                self._release(before)
        return True

    def _hold(self, sequence_hash: int) -> None:
        count = self._holders.get(sequence_hash, 0)
        self._holders[sequence_hash] = count + 1
        if not count and not self.filter.insert(sequence_hash):
            self.omitted.add(sequence_hash)

    def _release(self, sequence_hash: int) -> None:
        count = self._holders[sequence_hash] - 1
        if count:
            self._holders[sequence_hash] = count
            return
        del self._holders[sequence_hash]
        if sequence_hash in self.omitted:
            self.omitted.discard(sequence_hash)
        else:
            self.filter.remove(sequence_hash)

    def validate(self) -> None:
        """Assert the invariants."""
        counts: dict[int, int] = {}
        for blocks in self._ranks.values():
            for sequence_hash in blocks.values():
                counts[sequence_hash] = counts.get(sequence_hash, 0) + 1
        assert counts == self._holders, "holders must be counted exactly"
        assert self.omitted <= counts.keys(), "only cached blocks are omitted"
        assert all(one in self.filter for one in counts.keys() - self.omitted), "the filter must contain every block"
        assert sum(1 for _ in self.filter.fingerprints()) == len(counts) - len(self.omitted), "one slot for each block"
