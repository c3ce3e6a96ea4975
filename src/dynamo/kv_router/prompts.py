"""PromptTree: a prefix tree of prompts with marks per slot.

    ── system prompt ──┬── question A ──         slots 0 and 3
                       └── question B ──         slot 0

Each stretch of blocks carries one mark for each slot that uses it: a count of requests (`active`) or the time of the last
placement (`predicted`). A stretch without marks is removed, so the tree is bounded by its current users.
"""

from collections.abc import Iterator, Sequence

from dynamo.kv_router.runs import WIDTH, common, slots_of


class SharedBlocks:
    """Consecutive blocks that several prompts share."""

    __slots__ = ("blocks", "children", "marks", "parent", "slots")

    def __init__(self, parent: "SharedBlocks | None", blocks: bytes) -> None:
        self.parent = parent
        self.blocks = blocks
        self.children: dict[bytes, SharedBlocks] = {}
        self.marks: dict[int, float] = {}
        """By slot. A slot that marks a stretch marks all stretches before it."""
        self.slots = 0
        """The slots in `marks`, as bits."""

    def __len__(self) -> int:
        return len(self.blocks) // WIDTH

    def mark(self, slot: int, value: float) -> bool:
        """Set a slot's mark. Return True if it had none."""
        is_new = slot not in self.marks
        self.marks[slot] = value
        self.slots |= 1 << slot
        return is_new

    def unmark(self, slot: int) -> None:
        """Remove a slot's mark; remove the stretch from the tree with its last mark."""
        del self.marks[slot]
        self.slots ^= 1 << slot
        if not self.marks and self.parent is not None:
            del self.parent.children[self.blocks[:WIDTH]]


class PromptTree:
    """A tree of stretches, keyed by their first block."""

    def __init__(self) -> None:
        self._root = SharedBlocks(None, b"")

    def overlap(self, blocks: bytes) -> list[tuple[int, int]]:
        """Return pairs of (blocks from the start, slots as bits that mark exactly that many)."""
        depths: list[tuple[int, int]] = []
        at, size, before = 0, len(blocks), 0
        node = self._root.children.get(blocks[:WIDTH])
        while node is not None:
            if at and before != node.slots:
                depths.append((at // WIDTH, before & ~node.slots))
            before = node.slots
            count = common(node.blocks, blocks, at)
            at += count * WIDTH
            if count < len(node) or at >= size:
                break
            node = node.children.get(blocks[at : at + WIDTH])
        if before:
            depths.append((at // WIDTH, before))
        return depths

    def enter(self, blocks: bytes) -> SharedBlocks | None:
        """Return the stretch at which a prompt ends, creating it if needed; None for a prompt without a complete block.

        The caller marks it and all stretches before it (`up`).
        """
        at, size, above = 0, len(blocks), self._root
        while at < size:
            first = blocks[at : at + WIDTH]
            node = above.children.get(first)
            if node is None:
                node = above.children[first] = SharedBlocks(above, blocks[at:])
                return node
            count = common(node.blocks, blocks, at)
            at += count * WIDTH
            above = node if count == len(node) else _split(node, count)
        return None if above is self._root else above

    def __iter__(self) -> Iterator[SharedBlocks]:
        rest = list(self._root.children.values())
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()

    def validate(self) -> None:
        """Raise `AssertionError` if the parts disagree."""
        for node in self:
            assert node.slots == sum(1 << slot for slot in node.marks), "the slot bits differ from the marks"
            assert node.marks, "a stretch without marks is kept"
            assert len(node), "an empty stretch is kept"
            for child in node.children.values():
                assert child.parent is node, "a stretch has the wrong parent"
                assert set(child.marks) <= set(node.marks), "a slot marks a stretch but not the one before it"


def up(end: SharedBlocks | None) -> Sequence[SharedBlocks]:
    """Return a prompt's stretches, last one first."""
    if end is None or end.parent is None:
        return ()
    found = [end]
    while (end := end.parent) is not None and end.parent is not None:
        found.append(end)
    return found


def overlap_by_slot(depths: list[tuple[int, int]]) -> dict[int, int]:
    """Return the depth of each slot that has one."""
    return {slot: depth for depth, slots in depths for slot in slots_of(slots)}


def _split(node: SharedBlocks, count: int) -> SharedBlocks:
    """Split a stretch after `count` blocks; return the front. References to the stretch now mean its rear part."""
    assert node.parent is not None
    front = SharedBlocks(node.parent, node.blocks[: count * WIDTH])
    front.marks = dict(node.marks)
    front.slots = node.slots
    node.parent.children[front.blocks[:WIDTH]] = front
    node.parent = front
    node.blocks = node.blocks[count * WIDTH :]
    front.children[node.blocks[:WIDTH]] = node
    return front
