"""Runs: stretches of consecutive blocks and who holds them. Pure; parts of `index`, which says what they are for."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 8  # Bytes of a tokens hash.

DEVICE = 0
TIERS = ("device", "host_pinned", "disk")
"""Storage tiers by number, fastest first."""

Key = int
"""An engine's own name for a block."""


class Run:
    """Consecutive blocks, and who holds them."""

    __slots__ = ("anchor", "blocks", "children", "full", "is_common", "keys", "lower", "parent", "shorter", "stray")

    def __init__(self, parent: "Run | None", anchor: int, blocks: bytes, keys: list[Key], full: int) -> None:
        self.parent = parent
        self.anchor = anchor
        """The place in the parent of the block before the first; -1 without a parent."""
        self.blocks = blocks
        self.keys = keys
        """The first teller's keys."""
        self.is_common = True
        """Whether these keys are everybody's for these blocks, unless they say others (`CommonNames`)."""
        self.full = full
        self.shorter: dict[int, int] | None = None
        self.stray: dict[int, int] | None = None
        """By slot, a bit for each place that is held behind one that is not."""
        self.lower: dict[tuple[int, int], int] | None = None
        """By tier and slot, a bit for each place that is held in a slower tier."""
        self.children: dict[tuple[int, bytes], Run] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def place(self, key: Key) -> int:
        """Where the block is that the run's keys call so; raises `ValueError` for another key."""
        own = self.keys
        return len(own) - 1 if own[-1] == key else own.index(key)

    def lead(self, bit: int) -> int:
        """How many blocks from the start a rank holds."""
        if self.full & bit:
            return len(self.keys)
        for lead, ranks in (self.shorter or {}).items():
            if ranks & bit:
                return lead
        return 0

    def set_lead(self, bit: int, old: int, new: int) -> None:
        """Notes how many blocks from the start a rank holds now."""
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
        """How many places there must be: up to the last that is held or that something is anchored to."""
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
    """Blocks in a row of a run are held now."""
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
    """Blocks in a row of a run are held no longer."""
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
    """A bit for each place of a run that a slot holds in a tier."""
    if tier != DEVICE:
        return run.lower.get((tier, slot), 0) if run.lower else 0
    bits = (1 << run.lead(1 << slot)) - 1
    return bits | run.stray.get(slot, 0) if run.stray else bits


def held_anywhere(run: Run, slot: int) -> int:
    """A bit for each place of a run that a slot holds in any tier."""
    held = held_bits(run, slot, DEVICE)
    if run.lower:
        for tier in range(1, len(TIERS)):
            held |= run.lower.get((tier, slot), 0)
    return held


def keep(table: dict[Any, int], name: Any, bits: int) -> None:
    """An entry without bits is no entry."""
    if bits:
        table[name] = bits
    else:
        del table[name]


def common(run: bytes, blocks: bytes, at: int) -> int:
    """How many blocks a run and a prompt from byte `at` on have in common."""
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


def pack(hashes: Sequence[int]) -> bytes:
    """Tokens hashes as the index takes them."""
    return struct.pack(f">{len(hashes)}Q", *hashes)


def unpack(blocks: bytes) -> tuple[int, ...]:
    """The reverse of `pack`."""
    return struct.unpack(f">{len(blocks) // WIDTH}Q", blocks)


def trailing_ones(bits: int) -> int:
    """How many of the lowest bits are set in a row."""
    return (~bits & (bits + 1)).bit_length() - 1


def slots_of(ranks: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while ranks:
        lowest = ranks & -ranks
        yield lowest.bit_length() - 1
        ranks ^= lowest
