"""Book: the tiers below the device, and the state of every copy between them. Pure.

                     admit ─▶ (the engine copies) ─▶ admitted
    device ──────────────────────────────────────────────────▶ host ──offer──▶ queue ──take_offloads──▶ disk, object
       ▲                                                        │ ▲                       (a thread copies) ─▶ offloaded
       └── (the engine copies) ◀── find ────────────────────────┘ └── take_onboards ◀── disk, object
                                                                     (a thread copies) ─▶ onboarded

Every slot that a copy reads or writes is held from the decision until the result of the copy is reported, so that no
block is read before it is complete, and no slot is reused while it is read.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.logical.frequency import Sketch
from dynamo.kvbm.logical.policies import Policy, worthy_prefix
from dynamo.kvbm.logical.pool import Pool


@dataclass(frozen=True, slots=True)
class TierCopy:
    """A copy of one block between the host tier and a slower tier; both slots are held."""

    tier: Tier
    host: int
    lower: int | None
    """Slot in the slower tier; None for an object that is not in the index but may exist in the store."""
    identity: BlockIdentity
    age: int
    """Number of calls of `clear` before the copy began."""


@dataclass(slots=True)
class Onboarding:
    """Plan for onboarding a prefix: blocks already in the host tier (held), and the copies for the rest."""

    held: list[int] = field(default_factory=list)
    copies: list[TierCopy] = field(default_factory=list)


@dataclass(slots=True)
class TierCounts:
    """Counters since the start."""

    offloaded: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    onboarded: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    looked_up: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    found: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    dropped: int = 0
    """Offers dropped because the host tier, a queue, or the tier below was full."""
    failed: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    """Copies that failed."""
    corrupt: int = 0
    """Blocks whose bytes differ from those written."""


class Book:
    """All tiers except the device."""

    def __init__(
        self,
        host: Pool,
        lower: Mapping[Tier, Pool],
        *,
        to_host: Policy,
        to_lower: Mapping[Tier, Policy],
        sketch: Sketch,
        queue_max: int,
        priority_min: int = 0,
    ) -> None:
        self.host = host
        self.lower = dict(lower)
        self.counts = TierCounts()
        self.paused: set[Tier] = set()
        """Tiers to which no blocks are written at the moment."""
        self._to_host = to_host
        self._to_lower = dict(to_lower)
        self._sketch = sketch
        self._queue_max = queue_max
        self._priority_min = priority_min
        self._queues: dict[Tier, deque[int]] = {tier: deque() for tier in lower}
        self._queued: dict[Tier, set[int]] = {tier: set() for tier in lower}
        self._age = 0

    # From the device.

    def worthy(self, identities: Sequence[BlockIdentity], now: float) -> list[BlockIdentity]:
        """Return the blocks, of a sequence's consecutive blocks, that are to be copied into the host tier."""
        chosen = worthy_prefix(identities, self._priority_min)
        return [one for one in chosen if self._to_host.passes(one, self.host, now)]

    def admit(self, count: int) -> list[int]:
        """Allocate up to `count` host slots to be filled."""
        slots = self.host.allocate(min(count, self.host.available)) or []
        self.counts.dropped += count - len(slots)
        return slots

    def admitted(self, slot: int, identity: BlockIdentity, now: float) -> None:
        """Register a block after its copy from the device is complete."""
        self.host.stage(slot, identity)
        slot = self.host.register(slot)
        self.counts.offloaded[Tier.HOST] += 1
        self.offer(slot, now)
        self.host.release([slot])

    # Lookups by the device.

    def find(self, hashes: Sequence[int], now: float) -> list[int]:
        """Hold the longest prefix in the host tier; release it with `host.release`."""
        for sequence_hash in hashes:
            self._sketch.observe(sequence_hash)
        slots = self.host.match(hashes)
        self.counts.looked_up[Tier.HOST] += len(hashes)
        self.counts.found[Tier.HOST] += len(slots)
        self.counts.onboarded[Tier.HOST] += len(slots)
        for slot in slots:
            self.offer(slot, now)
        return slots

    def touch(self, hashes: Sequence[int], now: float) -> None:
        """Record that the device uses its own copies of these blocks again."""
        for sequence_hash in hashes:
            self._sketch.observe(sequence_hash)
        slots = list(self.host.scan(hashes).values())
        for slot in slots:
            self.offer(slot, now)
        self.host.release(slots)

    def reach(self, hashes: Sequence[int], from_peer: int = 0) -> bool:
        """Return whether slower tiers contain, or may contain, the blocks that follow the host's part of a prefix."""
        for at, sequence_hash in enumerate(hashes):
            if sequence_hash not in self.host:
                is_known = any(sequence_hash in pool for pool in self.lower.values())
                return is_known or at < from_peer or Tier.OBJECT in self.lower
        return False

    # To slower tiers.

    def offer(self, slot: int, now: float) -> None:
        """Queue a held host block for copying to each lower tier whose policy accepts it and whose queue has space."""
        identity = self.host.identity(slot)
        key = identity.sequence_hash
        for tier, pool in self.lower.items():
            if tier in self.paused or key in self._queued[tier]:
                continue
            if not self._to_lower[tier].passes(identity, pool, now):
                continue
            if len(self._queues[tier]) >= self._queue_max:
                self.counts.dropped += 1
                continue
            self.host.hold_again(slot)
            self._queues[tier].append(slot)
            self._queued[tier].add(key)

    def waiting(self, tier: Tier) -> int:
        """Return the number of blocks waiting to be copied into a tier."""
        return len(self._queues[tier])

    def take_offloads(self, tier: Tier, limit: int) -> list[TierCopy]:
        """Return the next copies into a tier, at most `limit`."""
        copies: list[TierCopy] = []
        queue, pool = self._queues[tier], self.lower[tier]
        while queue and len(copies) < limit:
            slot = queue.popleft()
            identity = self.host.identity(slot)
            places = None if tier in self.paused else pool.allocate(1)
            if places is None:
                self.counts.dropped += 1
                self._queued[tier].discard(identity.sequence_hash)
                self.host.release([slot])
                continue
            copies.append(TierCopy(tier, slot, places[0], identity, self._age))
        return copies

    def offloaded(self, copy: TierCopy, *, is_whole: bool) -> None:
        """Record the end of a copy into a slower tier."""
        assert copy.lower is not None, "an offload without a slot"
        pool, slot = self.lower[copy.tier], copy.lower
        if is_whole and copy.age == self._age:
            pool.stage(slot, copy.identity)
            slot = pool.register(slot)
            self.counts.offloaded[copy.tier] += 1
        elif not is_whole:
            self.counts.failed[copy.tier] += 1
        pool.release([slot])
        if copy.age == self._age:
            self._queued[copy.tier].discard(copy.identity.sequence_hash)
        self.host.release([copy.host])

    # From slower tiers.

    def take_onboards(self, identities: Sequence[BlockIdentity], from_peer: int = 0) -> Onboarding:
        """Return the copies that onboard the longest available prefix; a peer has its first `from_peer` blocks."""
        found = Onboarding()
        places: list[tuple[BlockIdentity, Tier, int | None]] = []
        for at, identity in enumerate(identities):
            key = identity.sequence_hash
            here = self.host.match([key])
            if here:
                found.held += here
                continue
            tier, lower = self._look(key)
            if lower is None and at < from_peer:
                tier = Tier.PEER
            if tier is None:
                break
            places.append((identity, tier, lower))
        slots = self.host.allocate(min(len(places), self.host.available)) or []
        for host, (identity, tier, lower) in zip(slots, places, strict=False):
            found.copies.append(TierCopy(tier, host, lower, identity, self._age))
        for _, tier, lower in places[len(slots) :]:
            if lower is not None:
                self.lower[tier].release([lower])
        return found

    def onboarded(self, copy: TierCopy, *, is_whole: bool, is_corrupt: bool = False) -> int | None:
        """Record the end of a copy into the host. Return the slot of the block, which must be released; None on failure."""
        pool = self.lower.get(copy.tier)
        if pool is not None and copy.lower is not None:
            pool.release([copy.lower])
        if is_whole and copy.age == self._age:
            self.host.stage(copy.host, copy.identity)
            slot = self.host.register(copy.host)
            self.counts.onboarded[copy.tier] += 1
            if pool is not None and copy.lower is None:
                self._note(pool, copy.identity)
            return slot
        if is_corrupt:
            self.counts.corrupt += 1
        if not is_whole and (pool is None or copy.lower is not None):
            self.counts.failed[copy.tier] += 1
            if pool is not None and copy.age == self._age:
                pool.forget(copy.identity.sequence_hash)
        self.host.release([copy.host])
        return None

    def cancelled(self, copy: TierCopy) -> None:
        """Cancel a copy into the host: a preceding block is missing, or the ticket was ended."""
        if copy.lower is not None:
            self.lower[copy.tier].release([copy.lower])
        self.host.release([copy.host])

    def clear(self) -> None:
        """Drop all blocks; running copies are completed, and their blocks dropped then."""
        self._age += 1
        for tier, queue in self._queues.items():
            self.host.release(list(queue))
            queue.clear()
            self._queued[tier].clear()
        self.host.clear()
        for pool in self.lower.values():
            pool.clear()

    def validate(self) -> None:
        """Assert the invariants that hold between any two calls."""
        self.host.validate()
        for tier, pool in self.lower.items():
            pool.validate()
            assert len(self._queues[tier]) <= self._queue_max, "a queue is longer than its limit"
            assert {self.host.identity(slot).sequence_hash for slot in self._queues[tier]} <= self._queued[tier]

    def _note(self, pool: Pool, identity: BlockIdentity) -> None:
        """Add an object to the index that was found in the store."""
        places = pool.allocate(1)
        if places is not None:
            pool.stage(places[0], identity)
            pool.release([pool.register(places[0])])

    def _look(self, key: int) -> tuple[Tier | None, int | None]:
        """Return the fastest slower tier that contains a block, and its slot, which is now held."""
        for tier, pool in self.lower.items():
            self.counts.looked_up[tier] += 1
            slots = pool.match([key])
            if slots:
                self.counts.found[tier] += 1
                return tier, slots[0]
        return (Tier.OBJECT, None) if Tier.OBJECT in self.lower else (None, None)
