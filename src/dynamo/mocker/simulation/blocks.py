"""BlockPool: who holds which KV blocks, what may be evicted, and what the routers hear of it.

A complete block is known by its sequence hash and shared by every sequence that has it; a block that is still
being filled, or that may not be shared, is only counted (`private`). A shared block nobody holds any more stays
readable until its room is needed; which one goes first is for `eviction` to say.

    take ──▶ private ── commit ──▶ active ── release ──▶ inactive ── evict ──▶ gone
                                     ▲────── acquire ───────┘

A sequence hash covers the whole prefix and holders release from the end, so a block's parent is always held as
long as the block, and falls idle after it.
"""

from collections.abc import Sequence

from dynamo.mocker.simulation.eviction import LongestIdle, MultiLru, idle_blocks
from dynamo.mocker.simulation.rules import EvictionName
from dynamo.protocols.kv_events import KvEvent, Removed, Stored, StoredBlock


class BlockPool:
    """A fixed number of blocks."""

    def __init__(self, capacity: int, eviction: EvictionName = "lineage") -> None:
        self.capacity = capacity
        self.private = 0
        self.active: dict[int, int] = {}
        """Sequence hash → how many sequences hold it, at least one."""
        self.inactive: LongestIdle | MultiLru = idle_blocks(eviction, capacity)
        """Readable but held by nobody."""
        self._events: list[KvEvent] = []

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return len(self.active) + self.private

    @property
    def free(self) -> int:
        """Blocks that can be had, evicting if need be."""
        return self.capacity - len(self.active) - self.private

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are readable."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self.active and block_hash not in self.inactive:
                return index
        return len(hashes)

    def price(self, hashes: Sequence[int]) -> int:
        """How many free blocks acquiring these would use up."""
        return sum(1 for block_hash in hashes if block_hash in self.inactive)

    def acquire(self, hashes: Sequence[int]) -> None:
        """Holds blocks that are readable."""
        for block_hash in hashes:
            if block_hash in self.inactive:
                del self.inactive[block_hash]
                self.active[block_hash] = 1
            else:
                self.active[block_hash] += 1

    def take(self, count: int) -> bool:
        """Holds empty blocks, evicting what is idle. False, and nothing happens, if there are not that many."""
        if count > self.free:
            return False
        self.private += count
        self._evict()
        return True

    def commit(self, parent: int | None, hashes: Sequence[int], tokens_hashes: Sequence[int]) -> None:
        """Private blocks became complete: those of a sequence after `parent`."""
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

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Lets go of what a sequence held, last block first."""
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
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def validate(self) -> None:
        """Checks what must always hold."""
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
