"""Run: consecutive blocks and the ranks that hold them. Pure; parts of `index`."""

from collections.abc import Iterator
from typing import Any

from dynamo.tokens.hashing import packed_hashes as pack
from dynamo.tokens.hashing import unpacked_hashes as unpack

__all__ = [
    "DEVICE", "NO_RUNS", "TIERS", "WIDTH", "Key", "Run", "common", "held_anywhere", "held_bits", "hold_on_device", "keep", "pack",
    "release_on_device", "slots_of", "trailing_ones", "unpack",
]  # fmt: skip

WIDTH = 8  # Bytes of a token hash.

DEVICE = 0
TIERS = ("device", "host_pinned", "disk")
"""Storage tiers by number, fastest first."""

Key = int
"""An engine's name for a block."""


NO_RUNS: dict["Run", None] = {}
"""Segment of a run that is not part of an index; always empty."""


class Run:
    """Consecutive blocks and the ranks that hold them."""

    __slots__ = (
        "anchor", "blocks", "children", "full", "is_common", "keys", "lower", "parent", "shorter", "stray", "used_with",
    )  # fmt: skip

    def __init__(self, parent: "Run | None", anchor: int, blocks: bytes, keys: list[Key], full: int) -> None:
        self.parent = parent
        self.anchor = anchor
        """Position in the parent of the block before the first; -1 without a parent."""
        self.blocks = blocks
        self.keys = keys
        """The keys of the rank that stored the run first."""
        self.is_common = True
        """Whether these keys are in the common table (`CommonNames`)."""
        self.full = full
        self.shorter: dict[int, int] | None = None
        self.stray: dict[int, int] | None = None
        """By slot, positions as bits that are held after a missing block."""
        self.lower: dict[tuple[int, int], int] | None = None
        """By tier and slot, positions as bits that are held in a slower tier."""
        self.children: dict[tuple[int, bytes], Run] | None = None
        self.used_with: dict[Run, None] = NO_RUNS
        """Segment of `RecentRuns` that contains the run."""

    def __len__(self) -> int:
        return len(self.keys)

    def place(self, key: Key) -> int:
        """Return the position of the block with this key of the run. Raises `ValueError` for another key."""
        own = self.keys
        return len(own) - 1 if own[-1] == key else own.index(key)

    def holders(self) -> set[int]:
        """Return the slots that hold a block of the run in any tier."""
        leading = self.full
        for ranks in (self.shorter or {}).values():
            leading |= ranks
        return {*slots_of(leading), *(self.stray or ()), *(slot for _, slot in self.lower or ())}

    def lead(self, bit: int) -> int:
        """Return the number of blocks from the start that a rank holds."""
        if self.full & bit:
            return len(self.keys)
        for lead, ranks in (self.shorter or {}).items():
            if ranks & bit:
                return lead
        return 0

    def set_lead(self, bit: int, old: int, new: int) -> None:
        """Set the number of blocks from the start that a rank holds."""
        if old == new:
            return
        if self.full & bit:
            self.full ^= bit
        elif old and self.shorter is not None:
            left = self.shorter[old] ^ bit
            if left:
                self.shorter[old] = left
            else:
                del self.shorter[old]
        if new == len(self.keys):
            self.full |= bit
        elif new:
            if self.shorter is None:
                self.shorter = {}
            self.shorter[new] = self.shorter.get(new, 0) | bit

    def held_until(self) -> int:
        """Return the number of positions needed: up to the last that is held or has a child."""
        if self.full:
            return len(self.keys)
        held = max(self.shorter, default=0) if self.shorter else 0
        for bits in (self.stray or {}).values():
            held = max(held, bits.bit_length())
        for bits in (self.lower or {}).values():
            held = max(held, bits.bit_length())
        if self.children and held < len(self.keys):
            held = max(held, max(anchor for anchor, _ in self.children) + 1)
        return held


def hold_on_device(run: Run, slot: int, at: int, count: int) -> None:
    """Mark consecutive blocks of a run as held on the device."""
    bit = 1 << slot
    lead = run.lead(bit)
    if at > lead:
        if run.stray is None:
            run.stray = {}
        run.stray[slot] = run.stray.get(slot, 0) | ((1 << count) - 1) << at
        return
    new = max(lead, at + count)
    if run.stray and slot in run.stray:
        bits = run.stray.pop(slot) >> new
        more = trailing_ones(bits)
        if bits >> more:
            run.stray[slot] = bits >> more << new + more
        new += more
    run.set_lead(bit, lead, new)


def release_on_device(run: Run, slot: int, at: int, count: int) -> None:
    """Mark consecutive blocks of a run as no longer held on the device."""
    bit = 1 << slot
    lead = run.lead(bit)
    bits = run.stray.pop(slot, 0) if run.stray else 0
    bits &= ~(((1 << count) - 1) << at)
    if at < lead:
        run.set_lead(bit, lead, at)
        if at + count < lead:
            bits |= ((1 << lead) - 1) >> at + count << at + count
    if bits:
        if run.stray is None:
            run.stray = {}
        run.stray[slot] = bits
    elif run.stray is not None and not run.stray:
        run.stray = None


def held_bits(run: Run, slot: int, tier: int) -> int:
    """Return the positions, as bits, that a slot holds in a tier."""
    if tier != DEVICE:
        return run.lower.get((tier, slot), 0) if run.lower else 0
    bits = (1 << run.lead(1 << slot)) - 1
    return bits | run.stray.get(slot, 0) if run.stray else bits


def held_anywhere(run: Run, slot: int) -> int:
    """Return the positions, as bits, that a slot holds in any tier."""
    held = held_bits(run, slot, DEVICE)
    if run.lower:
        for tier in range(1, len(TIERS)):
            held |= run.lower.get((tier, slot), 0)
    return held


def keep(table: dict[Any, int], name: Any, bits: int) -> None:
    """Set an entry; delete it if it has no bits."""
    if bits:
        table[name] = bits
    else:
        del table[name]


def common(run: bytes, blocks: bytes, at: int) -> int:
    """Return the number of blocks that a run and a prompt, from byte `at` on, have in common."""
    high = min(len(run), len(blocks) - at) // WIDTH
    if run[: high * WIDTH] == blocks[at : at + high * WIDTH]:
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if run[low * WIDTH : middle * WIDTH] == blocks[at + low * WIDTH : at + middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


def trailing_ones(bits: int) -> int:
    """Return the number of consecutive low bits that are set."""
    return (~bits & (bits + 1)).bit_length() - 1


def slots_of(ranks: int) -> Iterator[int]:
    """Yield the numbers of the set bits, lowest first."""
    while ranks:
        lowest = ranks & -ranks
        yield lowest.bit_length() - 1
        ranks ^= lowest
