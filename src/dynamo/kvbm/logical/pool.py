"""Pool: the places of one tier, who holds them, and what can be found in them. Pure.

    allocate ─▶ mutable ─stage─▶ staged ─register─▶ registered ◀─match─ active (held) ⇄ inactive (held by nobody)
       ▲                                                │
       └───────────── reset ◀── release of what was never registered, eviction of what is inactive

Places are numbers. Whoever allocates or matches holds a place once, and releases it once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.kvbm.logical.blocks import Identity, State, Tier
from dynamo.kvbm.logical.eviction import Inactive


@dataclass(slots=True)
class PoolCounts:
    """What happened in a pool since the start (control-plane.md §4.4)."""

    allocations: int = 0
    allocations_from_reset: int = 0
    evictions: int = 0
    registrations: int = 0
    duplicate_blocks: int = 0
    stagings: int = 0
    match_requests: int = 0
    match_blocks: int = 0
    """Blocks that were asked for."""
    match_hits: int = 0
    scan_requests: int = 0
    scan_hits: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """A block became readable, or is readable no longer."""

    identity: Identity
    is_stored: bool


class Pool:
    """One tier's places."""

    def __init__(self, blocks: int, inactive: Inactive, *, is_keeping: bool = True) -> None:
        """With `is_keeping` False, what nobody holds is forgotten at once: the places are stations on a way."""
        self.total = blocks
        self.is_keeping = is_keeping
        self.counts = PoolCounts()
        self._inactive = inactive
        self._states = [State.RESET] * blocks
        self._holders = [0] * blocks
        self._identities: list[Identity | None] = [None] * blocks
        self._slot_of: dict[int, int] = {}
        self._reset = list(range(blocks - 1, -1, -1))
        self._changes: list[Change] = []

    def __contains__(self, sequence_hash: int) -> bool:
        return sequence_hash in self._slot_of

    def __len__(self) -> int:
        """How many blocks can be found."""
        return len(self._slot_of)

    @property
    def available(self) -> int:
        """How many `allocate` can give."""
        return len(self._reset) + len(self._inactive)

    @property
    def inactive(self) -> int:
        return len(self._inactive)

    @property
    def reset(self) -> int:
        return len(self._reset)

    def allocate(self, count: int) -> list[int] | None:
        """Holds places to be filled: empty ones first, then those of inactive blocks; None if there are not so many."""
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
            self._states[slot], self._holders[slot] = State.MUTABLE, 1
            slots.append(slot)
        self.counts.allocations += count
        return slots

    def stage(self, slot: int, identity: Identity) -> None:
        """All of it is written."""
        assert self._states[slot] is State.MUTABLE, "a block was completed that nobody was filling"
        self._states[slot], self._identities[slot] = State.STAGED, identity
        self.counts.stagings += 1

    def register(self, slot: int) -> int:
        """Makes a staged block findable. The place that holds the content from now on: an older one of it stays."""
        identity = self._identities[slot]
        assert self._states[slot] is State.STAGED, "a block was registered before it was whole"
        assert identity is not None, "a block was registered that was forgotten meanwhile"
        older = self._slot_of.get(identity.sequence_hash)
        if older is not None:
            self.counts.duplicate_blocks += 1
            self._hold(older)
            self.release([slot])
            return older
        self._states[slot] = State.REGISTERED
        self._slot_of[identity.sequence_hash] = slot
        self.counts.registrations += 1
        self._changes.append(Change(identity, is_stored=True))
        return slot

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Holds the blocks of the longest prefix of these that is here."""
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
        """Holds whichever of these are here: their places by their hashes."""
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
        """One more holder of a block that somebody holds."""
        assert self._holders[slot] > 0, "a block was passed on by somebody who did not hold it"
        self._holders[slot] += 1

    def release(self, slots: Sequence[int]) -> None:
        """Lets go. The end of a sequence becomes unused before its beginning, which more others may share."""
        for slot in reversed(slots):
            self._holders[slot] -= 1
            assert self._holders[slot] >= 0, "a block was released twice"
            if self._holders[slot] > 0:
                continue
            identity = self._identities[slot]
            if self._states[slot] is not State.REGISTERED or identity is None:
                self._empty(slot)
            elif self.is_keeping:
                self._inactive.add(slot, identity.sequence_hash, identity.priority)
            else:
                self._unregister(slot)
                self._empty(slot)

    def forget(self, sequence_hash: int) -> bool:
        """Its content is no good: nobody finds it from now on. False where it is not here."""
        slot = self._slot_of.get(sequence_hash)
        if slot is None:
            return False
        self._unregister(slot)
        if self._holders[slot] == 0:
            self._inactive.remove(slot)
            self._empty(slot)
        else:
            self._states[slot] = State.STAGED
        return True

    def clear(self) -> None:
        """Forgets all; what is held stays with its holders."""
        for sequence_hash in list(self._slot_of):
            self.forget(sequence_hash)

    def identity(self, slot: int) -> Identity:
        """What a registered or staged block holds."""
        identity = self._identities[slot]
        assert identity is not None, "an empty block has no content"
        return identity

    def held(self) -> int:
        """Places that somebody holds."""
        return self.total - self.available

    def restore(self, content: Mapping[int, Identity]) -> list[int]:
        """What the places of an unused pool hold from before, parents first. The places whose content is a duplicate."""
        assert len(self._reset) == self.total, "a pool in use was restored"
        duplicates = []
        for slot, identity in content.items():
            if identity.sequence_hash in self._slot_of:
                duplicates.append(slot)
                continue
            self._states[slot], self._identities[slot] = State.REGISTERED, identity
            self._slot_of[identity.sequence_hash] = slot
            self._changes.append(Change(identity, is_stored=True))
        self._reset = [slot for slot in self._reset if self._states[slot] is State.RESET]
        for identity in reversed(list(content.values())):
            slot = self._slot_of[identity.sequence_hash]
            if identity is self._identities[slot]:
                self._inactive.add(slot, identity.sequence_hash, identity.priority)
        return duplicates

    def content(self) -> list[Identity]:
        """All that can be found."""
        return [self.identity(slot) for slot in self._slot_of.values()]

    def take_changes(self) -> list[Change]:
        """What became readable or unreadable since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def validate(self) -> None:
        """Asserts what must hold between any two calls."""
        held = sum(1 for count in self._holders if count > 0)
        assert held + self.available == self.total, "a place was lost"
        assert len(set(self._reset)) == len(self._reset), "a place is empty twice"
        for slot in self._reset:
            assert self._states[slot] is State.RESET, "an empty place has content"
            assert self._holders[slot] == 0, "an empty place is held"
        for sequence_hash, slot in self._slot_of.items():
            identity = self._identities[slot]
            assert self._states[slot] is State.REGISTERED, "a block can be found that is not whole"
            assert identity is not None, "a block can be found that is nothing"
            assert identity.sequence_hash == sequence_hash, "a block is found under a wrong name"
        registered = sum(1 for state in self._states if state is State.REGISTERED)
        assert registered == len(self._slot_of), "a registered block cannot be found"

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
        self._states[slot], self._identities[slot] = State.RESET, None
        self._reset.append(slot)


def told_anew(content: Mapping[Tier, Sequence[Identity]]) -> list[tuple[Tier, list[Change]]]:
    """Changes that lead from nothing to what tiers hold, each block after its parent, wherever that is."""
    nearest: dict[int, tuple[Tier, Identity]] = {}
    found = [(tier, identity) for tier, identities in content.items() for identity in identities]
    for tier, identity in found:
        nearest.setdefault(identity.sequence_hash, (tier, identity))
    others = [(tier, identity) for tier, identity in found if nearest[identity.sequence_hash][0] is not tier]
    following: dict[int | None, list[int]] = {}
    for key, (_, identity) in nearest.items():
        following.setdefault(identity.parent_hash if identity.parent_hash in nearest else None, []).append(key)
    ordered: list[tuple[Tier, Identity]] = []
    waiting = following.get(None, [])[::-1]
    while waiting:
        key = waiting.pop()
        ordered.append(nearest[key])
        waiting += following.get(key, [])[::-1]
    told: list[tuple[Tier, list[Change]]] = []
    for tier, identity in ordered + others:
        if not told or told[-1][0] is not tier:
            told.append((tier, []))
        told[-1][1].append(Change(identity, is_stored=True))
    return told
