"""SimulatedBlockPool: allocation, sharing and eviction of KV blocks, with the resulting KV events.

A complete block is identified by its sequence hash and shared by all sequences with the same prefix. An incomplete or
unshareable block is only counted (`private`). A shared block without holders stays readable until it is evicted, in the
order that `eviction` defines.

    take ──▶ private ── commit ──▶ active ── release ──▶ inactive ── evict ──▶ gone
                                     ▲────── acquire ───────┘

A sequence hash covers the whole prefix and holders release blocks from the end, so the parent of a held block is always
held, and becomes idle after the block.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.mocker.simulation.eviction import LastUsed, LongestIdle, MultiLru, idle_blocks
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
        self.active: dict[int, int] = {}
        """Sequence hash → number of sequences that hold the block, at least one."""
        self.inactive: LongestIdle | MultiLru | LastUsed = idle_blocks(eviction, capacity)
        """Readable blocks without holders."""
        self._is_prefix_closed = isinstance(self.inactive, LongestIdle)
        """Whether eviction in order of idleness keeps every readable block's parent readable."""
        self._changes: list[Change] = []

    def evict_by_use(self) -> LastUsed:
        """Evict blocks in the order of their recorded uses from now on; return the record. The pool must be empty."""
        assert not self.inactive, "the pool has blocks"
        self.inactive = found = LastUsed()
        self._is_prefix_closed = True
        return found

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

    def commit(self, parent: int | None, hashes: list[int], packed: bytes) -> None:
        """Turn private blocks of a sequence, which follow `parent`, into shared blocks.

        `packed`: the token hashes. The pool keeps the list.
        """
        if self._is_new(hashes):
            self._commit_new(parent, hashes, packed)
            return
        stored: list[int] = []
        first = 0
        for index, block_hash in enumerate(hashes):
            if block_hash in self.active:
                self.active[block_hash] += 1
            elif block_hash in self.inactive:
                del self.inactive[block_hash]
                self.active[block_hash] = 1
            else:
                self.active[block_hash] = 1
                if not stored:
                    first = index
                stored.append(index)
        self.private -= len(hashes)
        assert self.private >= 0, "a block was committed twice"
        if stored:
            tokens_hashes = unpacked_hashes(packed)
            self._changes.append(
                StoredRun(
                    hashes[first - 1] if first else parent,
                    [hashes[index] for index in stored],
                    packed_hashes([tokens_hashes[index] for index in stored]),
                )
            )

    def _is_new(self, hashes: Sequence[int]) -> bool:
        """Return whether none of these consecutive blocks is readable."""
        if self._is_prefix_closed:
            return hashes[0] not in self.active and hashes[0] not in self.inactive
        return self.active.keys().isdisjoint(hashes) and not any(map(self.inactive.__contains__, hashes))

    def _commit_new(self, parent: int | None, hashes: list[int], packed: bytes) -> None:
        """Commit blocks of which none is readable, most of the blocks of a prompt."""
        self.private -= len(hashes)
        assert self.private >= 0, "a block was committed twice"
        self.active.update(dict.fromkeys(hashes, 1))
        self._changes.append(StoredRun(parent, hashes, packed))

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Release the blocks of a sequence, last block first."""
        active = self.active
        holders = list(map(active.__getitem__, hashes))
        shared = next((at for at, count in enumerate(reversed(holders)) if count > 1), len(holders))
        own = hashes[len(hashes) - shared :][::-1]
        deque(map(active.__delitem__, own), maxlen=0)
        self.inactive.add_all(own)
        for block_hash in reversed(hashes[: len(hashes) - shared]):
            active[block_hash] -= 1
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
        assert all(holders > 0 for holders in self.active.values())
        assert not any(block_hash in self.inactive for block_hash in self.active)
        assert len(self.active) + len(self.inactive) + self.private <= self.capacity

    def _evict(self) -> None:
        excess = len(self.active) + len(self.inactive) + self.private - self.capacity
        if excess <= 0:
            return
        gone = self.inactive.take(excess)
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Removed):
            last.block_hashes.extend(gone)
        else:
            self._changes.append(Removed(gone))


def events_of(changes: Sequence[Change]) -> list[KvEvent]:
    """Return changes as events."""
    return [change.event() if isinstance(change, StoredRun) else change for change in changes]
