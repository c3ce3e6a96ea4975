"""Predicted: cached blocks predicted from the prompts that each worker was sent.

A prompt is assumed to be in a worker's cache for `ttl_s` seconds, or until the cache (`capacity` blocks) is full, independent of
the worker's own events.
"""

from collections import deque
from collections.abc import Iterator

from dynamo.kv_router.prompts import PromptTree, SharedBlocks, up


class Predicted:
    """Recent placements, by slot."""

    def __init__(self, *, ttl_s: float | None) -> None:
        """`ttl_s`: lifetime of a placement in seconds; None: until the cache is full."""
        self._ttl_s = ttl_s
        self._prompts = PromptTree()
        self._placed: dict[int, deque[tuple[float, float, SharedBlocks]]] = {}
        """By slot, oldest first: time, stamp of the placement, end of its prompt."""
        self._blocks: dict[int, int] = {}
        self._stamp = 0.0
        self.evicted = 0
        """Blocks dropped because a cache was full."""

    def blocks(self, slot: int) -> int:
        """Return the number of blocks that a slot is predicted to hold."""
        return self._blocks.get(slot, 0)

    def place(self, slot: int, blocks: bytes, now: float, capacity: int | None = None) -> None:
        """Record a prompt sent to a slot. Beyond `capacity` blocks the oldest placements are dropped."""
        end = self._prompts.enter(blocks)
        if end is None:
            return
        self._stamp += 1
        for node in up(end):
            if node.mark(slot, self._stamp):
                self._blocks[slot] = self._blocks.get(slot, 0) + len(node)
        placed = self._placed.setdefault(slot, deque())
        placed.append((now, self._stamp, end))
        before = self._blocks.get(slot, 0)
        while capacity is not None and len(placed) > 1 and self._blocks[slot] > capacity:
            self._forget(slot, placed)
        self.evicted += before - self._blocks.get(slot, 0)

    def overlap(self, blocks: bytes, now: float) -> list[tuple[int, int]]:
        """Return pairs of (blocks from the start, slots as bits predicted to hold exactly that many)."""
        self.expire(now)
        return self._prompts.overlap(blocks)

    def held(self, now: float) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield slot, blocks and the blocks before them, for each stretch that a slot is predicted to hold; fronts first."""
        self.expire(now)
        for node in self._prompts:
            before = b"".join(reversed([one.blocks for one in up(node.parent)]))
            for slot in node.marks:
                yield slot, node.blocks, before

    def expire(self, now: float) -> None:
        """Drop expired placements."""
        if self._ttl_s is None:
            return
        for slot, placed in list(self._placed.items()):
            while placed and now - placed[0][0] >= self._ttl_s:
                self._forget(slot, placed)
            if not placed:
                del self._placed[slot]

    def drop(self, slot: int) -> None:
        """Drop the placements of a rank that left."""
        placed = self._placed.pop(slot, None)
        while placed:
            self._forget(slot, placed)
        self._blocks.pop(slot, None)

    def validate(self) -> None:
        """Raise `AssertionError` if the parts disagree."""
        self._prompts.validate()
        for slot in {*self._blocks, *self._placed}:
            held = sum(len(node) for node in self._prompts if slot in node.marks)
            assert self._blocks.get(slot, 0) == held, "the block count is wrong"

    def _forget(self, slot: int, placed: deque[tuple[float, float, SharedBlocks]]) -> None:
        """Drop the oldest placement, with the blocks that no later placement shares."""
        _, stamp, end = placed.popleft()
        for node in up(end):
            if node.marks.get(slot) == stamp:
                node.unmark(slot)
                self._blocks[slot] -= len(node)
