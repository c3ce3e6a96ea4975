"""Blocks: the content, the users and the eviction order of KV blocks. Pure.

A block is *used* while sequences hold it, *cached* when no sequence holds it but its content can be reused, and *empty*
otherwise. Content is identified by its sequence hash, which covers the whole prefix, so equal hashes mean equal content.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from dynamo.protocols.kv_events import Cleared, KvEvent, Removed, Stored, StoredBlock

# Blocks of similar age are often adjacent, so evicting several together leaves a large gap; but they
# are only a small share of the cache.
EVICTED_TOGETHER = 8
EVICTED_SHARE = 64

_GAP = re.compile(rb"\x01+")


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Content of a block whose tokens are all computed."""

    block: int
    sequence_hash: int
    tokens_hash: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Evicted block. Its bytes stay valid until the next step writes to it."""

    block: int
    sequence_hash: int
    tokens_hash: int
    parent_hash: int | None


class KvBlockPool:
    """All blocks of one cache, with events for every change of their content."""

    def __init__(self, blocks: int, *, is_caching: bool = True, notes_evicted: bool = False) -> None:
        """With `notes_evicted`, evicted blocks are recorded for `take_evicted`, so that they can be saved to a tier."""
        self.total = blocks
        self.is_caching = is_caching
        self._notes_evicted = notes_evicted
        self._origins: dict[int, tuple[int, int | None]] = {}
        """Tokens hash and parent of each sequence hash, if `notes_evicted`."""
        self._evicted: list[Evicted] = []
        self._evicted_together = max(1, min(EVICTED_TOGETHER, blocks // EVICTED_SHARE))
        self._holders = [0] * blocks
        self._empty = bytearray(b"\x01" * blocks)
        self._empty_count = blocks
        self._cached: dict[int, None] = {}  # Oldest first.
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Return the number of blocks that `allocate` can use: empty and cached ones."""
        return self._empty_count + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free

    def acquire(self, hashes: Sequence[int]) -> list[int]:
        """Acquire and return the blocks of the longest cached prefix."""
        blocks: list[int] = []
        for sequence_hash in hashes:
            block = self._block_of.get(sequence_hash)
            if block is None:
                break
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Acquire `count` blocks without content, contiguous after `after` if possible; return None if too few are free."""
        if count > self.free:
            return None
        if count > self._empty_count:
            self._evict(max(count - self._empty_count, self._evicted_together))
        blocks: list[int] = []
        for missing in range(count, 0, -1):
            block = self._choose(after, missing)
            self._empty[block] = 0
            self._empty_count -= 1
            self._holders[block] = 1
            blocks.append(block)
            after = block
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Acquire blocks that are already in use once more."""
        for block in blocks:
            assert self._holders[block] > 0, "a block that is not in use was shared"
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Release a sequence's blocks. The last blocks become the oldest, as other sequences more often share the first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "a block was released twice"
            if self._holders[block] > 0:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._empty[block] = 1
                self._empty_count += 1

    def store(self, parent_hash: int | None, contents: Sequence[BlockContent]) -> None:
        """Index consecutive blocks of a sequence by their content.

        Content that another block already stores, and content whose parent was evicted, is skipped because a lookup would
        never reach it.
        """
        if not self.is_caching:
            return
        fresh: list[StoredBlock] = []
        first_parent = parent_hash
        for content in contents:
            if parent_hash is not None and parent_hash not in self._block_of:
                break
            if content.sequence_hash in self._block_of:
                self._emit_stored(first_parent, fresh)
                fresh = []
            else:
                if not fresh:
                    first_parent = parent_hash
                assert self._holders[content.block] > 0, "content was stored in a block that is not in use"
                self._block_of[content.sequence_hash] = content.block
                self._hash_of[content.block] = content.sequence_hash
                fresh.append(StoredBlock(content.sequence_hash, content.tokens_hash))
                if self._notes_evicted:
                    self._origins[content.sequence_hash] = (content.tokens_hash, parent_hash)
            parent_hash = content.sequence_hash
        self._emit_stored(first_parent, fresh)

    def clear(self) -> None:
        """Remove all content. Blocks in use stay with their sequences."""
        for block in self._cached:
            self._empty[block] = 1
        self._empty_count += len(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of.clear()
        self._origins.clear()
        self._events.append(Cleared())

    def take_events(self) -> list[KvEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_evicted(self) -> list[Evicted]:
        """Return the blocks evicted since the last call; call it before anything is written to the cache."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def depth(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks of a prefix that are cached."""
        for depth, sequence_hash in enumerate(hashes):
            if sequence_hash not in self._block_of:
                return depth
        return len(hashes)

    def validate(self) -> None:
        """Assert the invariants between any two calls."""
        assert self._empty_count == sum(self._empty), "the count of empty blocks is wrong"
        assert {hash_: block for block, hash_ in self._hash_of.items()} == self._block_of, "the two hash indexes differ"
        for block in range(self.total):
            is_used, is_empty, is_cached = self._holders[block] > 0, bool(self._empty[block]), block in self._cached
            assert is_used + is_empty + is_cached == 1, f"block {block} is in {is_used + is_empty + is_cached} states"
            assert not (is_empty and block in self._hash_of), f"the empty block {block} has content"
            assert not is_cached or block in self._hash_of, f"block {block} is cached but has no hash"

    def _choose(self, after: int | None, missing: int) -> int:
        if after is not None and after + 1 < self.total and self._empty[after + 1]:
            return after + 1
        # The middle of the largest gap leaves space for this sequence and for the one before the gap.
        gap = max(_GAP.finditer(self._empty), key=_width)
        return max(gap.start(), min((gap.start() + gap.end()) // 2, gap.end() - missing))

    def _evict(self, count: int) -> None:
        oldest = list(islice(self._cached, count))
        removed = []
        for block in oldest:
            del self._cached[block]
            removed.append(self._hash_of.pop(block))
            del self._block_of[removed[-1]]
            self._empty[block] = 1
            if self._notes_evicted:
                self._evicted.append(Evicted(block, removed[-1], *self._origins.pop(removed[-1])))
        self._empty_count += len(oldest)
        self._events.append(Removed(removed))

    def _emit_stored(self, parent_hash: int | None, fresh: list[StoredBlock]) -> None:
        if fresh:
            self._events.append(Stored(parent_hash, None, fresh))


def _width(gap: "re.Match[bytes]") -> int:
    return gap.end() - gap.start()
