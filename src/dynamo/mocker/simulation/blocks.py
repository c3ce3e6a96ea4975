"""SimulatedBlockPool: allocation, sharing and eviction of KV blocks, with the resulting KV events.

A complete block is identified by its sequence hash and shared by all sequences with the same prefix. An incomplete or
unshareable block is only counted (`private`). A shared block without holders stays readable until it is evicted, in the
order that `eviction` defines.

    take ──▶ private ── commit ──▶ active ── release ──▶ inactive ── evict ──▶ gone
                                     ▲────── acquire ───────┘

A sequence hash covers the whole prefix and holders release blocks from the end, so the parent of a held block is always
held, and becomes idle after the block.
"""

from collections.abc import Sequence

from dynamo.mocker.simulation.eviction import LongestIdle, MultiLru, idle_blocks
from dynamo.mocker.simulation.rules import EvictionName
from dynamo.protocols.kv_events import KvEvent, Removed, Stored, StoredBlock


class SimulatedBlockPool:
    """A pool with a fixed number of blocks."""

    def __init__(self, capacity: int, eviction: EvictionName = "lineage") -> None:
        self.capacity = capacity
        self.private = 0
        self.active: dict[int, int] = {}
        """Sequence hash → number of sequences that hold the block, at least one."""
        self.inactive: LongestIdle | MultiLru = idle_blocks(eviction, capacity)
        """Readable blocks without holders."""
        self._events: list[KvEvent] = []

    @property
    def used(self) -> int:
        """Return the number of blocks held by sequences."""
        return len(self.active) + self.private

    @property
    def free(self) -> int:
        """Return the number of blocks that can be allocated, including evictable ones."""
        return self.capacity - len(self.active) - self.private

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that are readable."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self.active and block_hash not in self.inactive:
                return index
        return len(hashes)

    def price(self, hashes: Sequence[int]) -> int:
        """Return the number of free blocks that acquiring these blocks uses up."""
        return sum(1 for block_hash in hashes if block_hash in self.inactive)

    def acquire(self, hashes: Sequence[int]) -> None:
        """Hold readable blocks."""
        for block_hash in hashes:
            if block_hash in self.inactive:
                del self.inactive[block_hash]
                self.active[block_hash] = 1
            else:
                self.active[block_hash] += 1

    def take(self, count: int) -> bool:
        """Allocate empty blocks, evicting idle ones; return False without a change if there are too few."""
        if count > self.free:
            return False
        self.private += count
        self._evict()
        return True

    def commit(self, parent: int | None, hashes: Sequence[int], tokens_hashes: Sequence[int]) -> None:
        """Turn private blocks of a sequence, which follow `parent`, into shared blocks."""
        if self.active.keys().isdisjoint(hashes) and not any(map(self.inactive.__contains__, hashes)):
            self._commit_new(parent, hashes, tokens_hashes)
            return
        stored: list[StoredBlock] = []
        for index, block_hash in enumerate(hashes):
            if block_hash in self.active:
                self.active[block_hash] += 1
            elif block_hash in self.inactive:
                del self.inactive[block_hash]
                self.active[block_hash] = 1
            else:
                self.active[block_hash] = 1
                if not stored and index:
                    parent = hashes[index - 1]
                stored.append(StoredBlock(block_hash, tokens_hashes[index]))
        self.private -= len(hashes)
        assert self.private >= 0, "a block was committed twice"
        if stored:
            self._events.append(Stored(parent, None, stored))

    def _commit_new(self, parent: int | None, hashes: Sequence[int], tokens_hashes: Sequence[int]) -> None:
        """Commit blocks of which none is readable, most of the blocks of a prompt."""
        self.private -= len(hashes)
        assert self.private >= 0, "a block was committed twice"
        self.active.update(dict.fromkeys(hashes, 1))
        self._events.append(Stored(parent, None, list(map(StoredBlock, hashes, tokens_hashes))))

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Release the blocks of a sequence, last block first."""
        for block_hash in reversed(hashes):
            holders = self.active[block_hash] - 1
            if holders:
                self.active[block_hash] = holders
            else:
                del self.active[block_hash]
                self.inactive[block_hash] = None
        self.private -= private
        assert self.private >= 0, "a block was freed twice"

    def events(self) -> list[KvEvent]:
        """Return the stored and removed blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is violated."""
        assert self.private >= 0
        assert all(holders > 0 for holders in self.active.values())
        assert not any(block_hash in self.inactive for block_hash in self.active)
        assert len(self.active) + len(self.inactive) + self.private <= self.capacity

    def _evict(self) -> None:
        excess = len(self.active) + len(self.inactive) + self.private - self.capacity
        if excess <= 0:
            return
        gone = [self.inactive.take() for _ in range(excess)]
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.block_hashes.extend(gone)
        else:
            self._events.append(Removed(gone))
