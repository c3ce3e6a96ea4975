"""Pool: the slots of one tier, their holders, and the index of registered blocks. Pure.

    allocate ─▶ mutable ─stage─▶ staged ─register─▶ registered ◀─match─ active (held) ⇄ inactive (without holders)
       ▲                                                │
       └───────────── reset ◀── release of a slot that was not registered, eviction of an inactive block

Slots are numbers. Each `allocate` or `match` adds a holder to its slots, and each holder releases them once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.kvbm.logical.blocks import BlockIdentity, BlockState, Tier
from dynamo.kvbm.logical.eviction import Inactive


@dataclass(slots=True)
class PoolCounts:
    """Counters of a pool since the start."""

    allocations: int = 0
    allocations_from_reset: int = 0
    evictions: int = 0
    registrations: int = 0
    duplicate_blocks: int = 0
    stagings: int = 0
    match_requests: int = 0
    match_blocks: int = 0
    """Blocks looked up."""
    match_hits: int = 0
    scan_requests: int = 0
    scan_hits: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """A block that became readable or unreadable."""

    identity: BlockIdentity
    is_stored: bool


class Pool:
    """The slots of one tier."""

    def __init__(self, blocks: int, inactive: Inactive, *, is_keeping: bool = True) -> None:
        """If `is_keeping` is False, released blocks are dropped at once: the slots only stage copies between tiers."""
        self.total = blocks
        self.is_keeping = is_keeping
        self.counts = PoolCounts()
        self._inactive = inactive
        self._states = [BlockState.RESET] * blocks
        self._holders = [0] * blocks
        self._identities: list[BlockIdentity | None] = [None] * blocks
        self._slot_of: dict[int, int] = {}
        self._reset = list(range(blocks - 1, -1, -1))
        self._changes: list[Change] = []

    def __contains__(self, sequence_hash: int) -> bool:
        return sequence_hash in self._slot_of

    def __len__(self) -> int:
        """Return the number of blocks that can be found."""
        return len(self._slot_of)

    @property
    def available(self) -> int:
        """Number of slots that `allocate` can return."""
        return len(self._reset) + len(self._inactive)

    @property
    def inactive(self) -> int:
        return len(self._inactive)

    @property
    def reset(self) -> int:
        return len(self._reset)

    def allocate(self, count: int) -> list[int] | None:
        """Hold slots to be filled: empty ones first, then those of inactive blocks; None if there are too few."""
        if count > self.available:
            return None
        slots = []
        for _ in range(count):
            if self._reset:
                slot = self._reset.pop()
                self.counts.allocations_from_reset += 1
            else:
                slot = self._inactive.pop()
                self.counts.evictions += 1
                self._unregister(slot)
            self._states[slot], self._holders[slot] = BlockState.MUTABLE, 1
            slots.append(slot)
        self.counts.allocations += count
        return slots

    def stage(self, slot: int, identity: BlockIdentity) -> None:
        """Mark a block as completely written."""
        assert self._states[slot] is BlockState.MUTABLE, "staged a block that is not being filled"
        self._states[slot], self._identities[slot] = BlockState.STAGED, identity
        self.counts.stagings += 1

    def register(self, slot: int) -> int:
        """Make a staged block findable. Return the slot of its content: that of an older copy if there is one."""
        identity = self._identities[slot]
        assert self._states[slot] is BlockState.STAGED, "registered a block that is not staged"
        assert identity is not None, "registered a block without an identity"
        older = self._slot_of.get(identity.sequence_hash)
        if older is not None:
            self.counts.duplicate_blocks += 1
            self._hold(older)
            self.release([slot])
            return older
        self._states[slot] = BlockState.REGISTERED
        self._slot_of[identity.sequence_hash] = slot
        self.counts.registrations += 1
        self._changes.append(Change(identity, is_stored=True))
        return slot

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Hold the blocks of the longest prefix of `hashes` in the pool; return their slots."""
        self.counts.match_requests += 1
        self.counts.match_blocks += len(hashes)
        slots: list[int] = []
        for sequence_hash in hashes:
            slot = self._slot_of.get(sequence_hash)
            if slot is None:
                break
            self._hold(slot)
            slots.append(slot)
        self.counts.match_hits += len(slots)
        return slots

    def scan(self, hashes: Sequence[int]) -> dict[int, int]:
        """Hold every block of `hashes` in the pool; return their slots by hash."""
        self.counts.scan_requests += 1
        found: dict[int, int] = {}
        for sequence_hash in hashes:
            slot = self._slot_of.get(sequence_hash)
            if slot is not None and sequence_hash not in found:
                self._hold(slot)
                found[sequence_hash] = slot
        self.counts.scan_hits += len(found)
        return found

    def hold_again(self, slot: int) -> None:
        """Add a holder to a held block."""
        assert self._holders[slot] > 0, "added a holder to a block that is not held"
        self._holders[slot] += 1

    def release(self, slots: Sequence[int]) -> None:
        """Release held slots. A sequence's last blocks become unused first: its first ones are more likely to be shared."""
        for slot in reversed(slots):
            self._holders[slot] -= 1
            assert self._holders[slot] >= 0, "a block was released twice"
            if self._holders[slot] > 0:
                continue
            identity = self._identities[slot]
            if self._states[slot] is not BlockState.REGISTERED or identity is None:
                self._empty(slot)
            elif self.is_keeping:
                self._inactive.add(slot, identity.sequence_hash, identity.priority)
            else:
                self._unregister(slot)
                self._empty(slot)

    def forget(self, sequence_hash: int) -> bool:
        """Make a block with invalid content unfindable. Return False if it is not in the pool."""
        slot = self._slot_of.get(sequence_hash)
        if slot is None:
            return False
        self._unregister(slot)
        if self._holders[slot] == 0:
            self._inactive.remove(slot)
            self._empty(slot)
        else:
            self._states[slot] = BlockState.STAGED
        return True

    def clear(self) -> None:
        """Drop all blocks; held slots stay with their holders."""
        for sequence_hash in list(self._slot_of):
            self.forget(sequence_hash)

    def identity(self, slot: int) -> BlockIdentity:
        """Return the identity of a registered or staged block."""
        identity = self._identities[slot]
        assert identity is not None, "an empty block has no content"
        return identity

    def held(self) -> int:
        """Return the number of held slots."""
        return self.total - self.available

    def restore(self, content: Mapping[int, BlockIdentity]) -> list[int]:
        """Restore the content of an unused pool, parents first. Return the slots whose content is a duplicate."""
        assert len(self._reset) == self.total, "a pool in use was restored"
        duplicates = []
        for slot, identity in content.items():
            if identity.sequence_hash in self._slot_of:
                duplicates.append(slot)
                continue
            self._states[slot], self._identities[slot] = BlockState.REGISTERED, identity
            self._slot_of[identity.sequence_hash] = slot
            self._changes.append(Change(identity, is_stored=True))
        self._reset = [slot for slot in self._reset if self._states[slot] is BlockState.RESET]
        for identity in reversed(list(content.values())):
            slot = self._slot_of[identity.sequence_hash]
            if identity is self._identities[slot]:
                self._inactive.add(slot, identity.sequence_hash, identity.priority)
        return duplicates

    def content(self) -> list[BlockIdentity]:
        """Return the identities of all blocks that can be found."""
        return [self.identity(slot) for slot in self._slot_of.values()]

    def take_changes(self) -> list[Change]:
        """Return the blocks that became readable or unreadable since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def validate(self) -> None:
        """Assert the invariants that hold between any two calls."""
        held = sum(1 for count in self._holders if count > 0)
        assert held + self.available == self.total, "a slot was lost"
        assert len(set(self._reset)) == len(self._reset), "a slot is in the free list twice"
        for slot in self._reset:
            assert self._states[slot] is BlockState.RESET, "an empty slot has content"
            assert self._holders[slot] == 0, "an empty slot is held"
        for sequence_hash, slot in self._slot_of.items():
            identity = self._identities[slot]
            assert self._states[slot] is BlockState.REGISTERED, "an indexed block is not registered"
            assert identity is not None, "an indexed block has no identity"
            assert identity.sequence_hash == sequence_hash, "a block is indexed under a wrong hash"
        registered = sum(1 for state in self._states if state is BlockState.REGISTERED)
        assert registered == len(self._slot_of), "a registered block is not indexed"

    def _hold(self, slot: int) -> None:
        if self._holders[slot] == 0:
            self._inactive.remove(slot)
        self._holders[slot] += 1

    def _unregister(self, slot: int) -> None:
        identity = self.identity(slot)
        del self._slot_of[identity.sequence_hash]
        self._identities[slot] = None
        self._changes.append(Change(identity, is_stored=False))

    def _empty(self, slot: int) -> None:
        self._states[slot], self._identities[slot] = BlockState.RESET, None
        self._reset.append(slot)


def changes_from_empty(content: Mapping[Tier, Sequence[BlockIdentity]]) -> list[tuple[Tier, list[Change]]]:
    """Return the changes from an empty state to the tiers' content, each block after its parent in any tier."""
    nearest: dict[int, tuple[Tier, BlockIdentity]] = {}
    found = [(tier, identity) for tier, identities in content.items() for identity in identities]
    for tier, identity in found:
        nearest.setdefault(identity.sequence_hash, (tier, identity))
    others = [(tier, identity) for tier, identity in found if nearest[identity.sequence_hash][0] is not tier]
    following: dict[int | None, list[int]] = {}
    for key, (_, identity) in nearest.items():
        following.setdefault(identity.parent_hash if identity.parent_hash in nearest else None, []).append(key)
    ordered: list[tuple[Tier, BlockIdentity]] = []
    waiting = following.get(None, [])[::-1]
    while waiting:
        key = waiting.pop()
        ordered.append(nearest[key])
        waiting += following.get(key, [])[::-1]
    grouped: list[tuple[Tier, list[Change]]] = []
    for tier, identity in ordered + others:
        if not grouped or grouped[-1][0] is not tier:
            grouped.append((tier, []))
        grouped[-1][1].append(Change(identity, is_stored=True))
    return grouped
