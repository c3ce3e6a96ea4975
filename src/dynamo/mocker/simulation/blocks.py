"""SimulatedBlockPool: allocation, sharing and eviction of KV blocks, with the resulting KV events.

A complete block is identified by its sequence hash and shared by all sequences with the same prefix. An incomplete or
unshareable block is only counted (`private`). A shared block without holders stays readable until it is evicted, in the
order that `eviction` defines.

    take ──▶ private ── commit ──▶ active ── release ──▶ inactive ── evict ──▶ gone
                                     ▲────── acquire ───────┘

A sequence hash covers the whole prefix and holders release blocks from the end, so the parent of a held block is always
held, and becomes idle after the block. The readable blocks of a sequence are therefore its first ones (unless the eviction
policy counts uses), the held ones among them come first, and look-ups are binary searches.

Blocks whose tokens are unknown have negative numbers in place of hashes. No other sequence has them; they are not reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.mocker.simulation.eviction import LastUsed, LongestIdle, MultiLru, idle_blocks
from dynamo.mocker.simulation.marks import BlockMarks, Marks
from dynamo.mocker.simulation.rules import EvictionName
from dynamo.protocols.kv_events import KvEvent, Removed, Stored, StoredBlock
from dynamo.tokens.hashing import packed_hashes, unpacked_hashes


@dataclass(slots=True)
class StoredRun:
    """Consecutive blocks that became readable: the content of a `Stored` event without an object for each block."""

    parent: int | None
    hashes: list[int]
    packed: bytes
    """Token hashes of the blocks, as `tokens.hashing.packed_hashes`."""

    def event(self) -> Stored:
        """Return the event."""
        return Stored(self.parent, None, list(map(StoredBlock, self.hashes, unpacked_hashes(self.packed))))


Change = StoredRun | Removed
"""A change of the readable blocks."""


class SimulatedBlockPool:
    """A pool with a fixed number of blocks."""

    def __init__(self, capacity: int, eviction: EvictionName = "lineage") -> None:
        self.capacity = capacity
        self.private = 0
        self.held = 0
        """Number of readable blocks with holders."""
        self.readable: Marks = BlockMarks()
        """Sequence hash → number of sequences that hold the block; of an idle block, the mark of its eviction policy: zero or less."""
        self.idle: LongestIdle | MultiLru | LastUsed = idle_blocks(eviction, capacity, self.readable)
        """Eviction order of the readable blocks without holders."""
        self._is_prefix_closed = isinstance(self.idle, LongestIdle)
        """Whether eviction in order of idleness keeps every readable block's parent readable."""
        self._changes: list[Change] = []

    def evict_by_use(self) -> LastUsed:
        """Evict blocks in the order of their recorded uses from now on; return the record. The pool must be empty."""
        assert not self.readable, "the pool has blocks"
        self.idle = found = LastUsed()
        self._is_prefix_closed = True
        return found

    @property
    def used(self) -> int:
        """Return the number of blocks held by sequences."""
        return self.held + self.private

    @property
    def free(self) -> int:
        """Return the number of blocks that can be allocated, including evictable ones."""
        return self.capacity - self.held - self.private

    @property
    def active(self) -> dict[int, int]:
        """Return the readable blocks that sequences hold, and the number of these. Scans all blocks."""
        return {block_hash: holders for block_hash, holders in self.readable.items() if holders > 0}

    @property
    def inactive(self) -> set[int]:
        """Return the readable blocks without holders. Scans all blocks."""
        return {block_hash for block_hash, holders in self.readable.items() if holders <= 0}

    def match(self, hashes: list[int]) -> int:
        """Return the number of leading blocks that are readable."""
        readable = self.readable
        if self._is_prefix_closed:
            return readable.known(hashes)
        return next((index for index, block_hash in enumerate(hashes) if block_hash not in readable), len(hashes))

    def price(self, hashes: list[int]) -> int:
        """Return the number of free blocks that acquiring these readable blocks uses up."""
        return len(hashes) - self.readable.held(hashes)

    def acquire(self, hashes: list[int]) -> None:
        """Hold readable blocks."""
        readable = self.readable
        count = readable.held(hashes)  # Held blocks come first.
        idle = hashes[count:]
        for block_hash in hashes[:count]:
            readable[block_hash] += 1
        if idle:
            self.idle.remove(idle)
            readable.put_all(idle, 1)
            self.held += len(idle)

    def take(self, count: int) -> bool:
        """Allocate empty blocks, evicting idle ones; return False without a change if there are too few."""
        if count > self.capacity - self.held - self.private:
            return False
        self.private += count
        excess = len(self.readable) + self.private - self.capacity
        if excess > 0:
            self._evict(excess)
        return True

    def commit(self, parent: int | None, hashes: list[int], packed: bytes) -> None:
        """Turn private blocks of a sequence, which follow `parent`, into shared blocks.

        `packed`: the token hashes of the first blocks; the others are not reported. The pool keeps the list.
        """
        self.private -= len(hashes)
        assert self.private >= 0, "a block was committed twice"
        known = len(packed) // 8
        if self._is_new(hashes):  # Most of the blocks of a prompt.
            self.held += len(hashes)
            self.readable.put_all(hashes, 1)
            if known:
                self._changes.append(StoredRun(parent, hashes if known == len(hashes) else hashes[:known], packed))
            return
        stored = [index for index, block_hash in enumerate(hashes) if self._hold(block_hash) and index < known]
        if stored:
            tokens_hashes = unpacked_hashes(packed)
            self._changes.append(
                StoredRun(
                    hashes[stored[0] - 1] if stored[0] else parent,
                    [hashes[index] for index in stored],
                    packed_hashes([tokens_hashes[index] for index in stored]),
                )
            )

    def _hold(self, block_hash: int) -> bool:
        """Hold a block that may be readable. Return True if it was not."""
        holders = self.readable.get(block_hash)
        if holders is not None and holders > 0:
            self.readable[block_hash] = holders + 1
            return False
        if holders is not None:
            self.idle.remove([block_hash])
        self.readable[block_hash] = 1
        self.held += 1
        return holders is None

    def _is_new(self, hashes: list[int]) -> bool:
        """Return whether none of these consecutive blocks is readable."""
        if self._is_prefix_closed:
            return hashes[0] not in self.readable
        return not any(block_hash in self.readable for block_hash in hashes)

    def release(self, hashes: list[int], private: int) -> None:
        """Release the blocks of a sequence, last block first."""
        readable = self.readable
        # Every holder of a block holds the blocks before it, so that the blocks of several holders come first.
        shared = readable.shared(hashes)
        for block_hash in hashes[:shared]:
            readable[block_hash] -= 1
        own = hashes[shared:]
        if own:
            self.held -= len(own)
            readable.put_all(own, self.idle.add_all(own))
        self.private -= private
        assert self.private >= 0, "a block was freed twice"

    def changes(self) -> list[Change]:
        """Return the stored and removed blocks since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def events(self) -> list[KvEvent]:
        """Return the same as events."""
        return events_of(self.changes())

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is violated."""
        assert self.private >= 0
        assert self.held == len(self.active)
        assert len(self.readable) + self.private <= self.capacity
        assert len(self.idle) == len(self.readable) - self.held

    def _evict(self, count: int) -> None:
        reported = self.readable.drop(self.idle.take(count))
        if not reported:
            return
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Removed):
            last.block_hashes.extend(reported)
        else:
            self._changes.append(Removed(reported))


def events_of(changes: Sequence[Change]) -> list[KvEvent]:
    """Return changes as events."""
    return [change.event() if isinstance(change, StoredRun) else change for change in changes]
