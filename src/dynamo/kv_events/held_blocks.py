"""KvHoldings: blocks in one rank's KV cache and its lower tiers, built from events, with answers to recovery queries.

A router that missed an event requests the newest ones, which are kept, or all: a dump of events that recreate the
present state (docs/kv-events.md). A block that was evicted before its descendants is kept as long as they are cached,
because their position depends on it.
"""

from collections import deque
from dataclasses import dataclass

from dynamo.kv_events.dump import TIERS, KvDump
from dynamo.protocols.kv_events import (
    KvEventData,
    KvSourceAnswer,
    KvSourceDump,
    KvSourceEvents,
    KvSourceInvalidRange,
    KvSourceQuery,
    KvSourceTooNew,
    NumberedKvEvent,
    Removed,
    Stored,
    StoredBlock,
    WorkerKvEvent,
)

RECENT_MAX = 1024  # As upstream: some seconds of a busy worker, longer than an event plane takes to reconnect.
BLOCKS_MAX = 1 << 18  # Per rank, counted once per tier that holds a block: their dump fits in one message of 32 MiB.
_BITS = {name: 1 << number for number, name in enumerate(TIERS)}


class _Place:
    """A block and its parent."""

    __slots__ = ("block", "followers", "parent_hash", "tiers")

    def __init__(self, block: StoredBlock, parent_hash: int | None, tiers: int) -> None:
        self.block = block
        self.parent_hash = parent_hash
        self.followers = 0
        self.tiers = tiers
        """Bit set of the tiers that hold the block."""


@dataclass(frozen=True, slots=True)
class PendingDump:
    """A dump in progress, and the last event that it covers."""

    dump: KvDump
    last_event_id: int


class CachedBlocks:
    """Blocks of one rank. Events must be applied in the order of their ids, from 1, without gaps."""

    def __init__(
        self, worker_id: int, dp_rank: int = 0, recent_max: int = RECENT_MAX, blocks_max: int = BLOCKS_MAX
    ) -> None:
        self.last_event_id = 0
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._blocks_max = blocks_max
        self._recent: deque[WorkerKvEvent] = deque(maxlen=recent_max)
        self._places: dict[int, _Place] = {}
        self._more = 0
        """Sum over all blocks of the tiers beyond the first that hold them."""

    def held(self, tier: str = TIERS[0]) -> dict[int, int]:
        """Return the tokens hash of each block in a tier, by block hash."""
        bit = _BITS[tier]
        return {key: place.block.tokens_hash for key, place in self._places.items() if place.tiers & bit}

    def apply(self, kv_event: WorkerKvEvent) -> None:
        """Apply the next event."""
        event = kv_event.event
        assert event.event_id == self.last_event_id + 1, "event ids must be consecutive"
        self.last_event_id = event.event_id
        self._recent.append(kv_event)
        bit = _BITS.get(kv_event.storage_tier)
        if bit is None:
            return
        if event.data == "cleared":
            if kv_event.storage_tier == TIERS[0]:  # As in routers: clearing the device clears all tiers.
                self._places.clear()
                self._more = 0
        elif event.data.stored is not None:
            self._store(event.data.stored, bit)
        elif event.data.removed is not None:
            for block_hash in event.data.removed.block_hashes:
                self._remove(block_hash, bit)

    def answer(self, query: KvSourceQuery) -> KvSourceAnswer:
        """Answer a router's recovery query."""
        return self.short_answer(query) or self.complete_dump(self.begin_dump())

    def short_answer(self, query: KvSourceQuery) -> KvSourceAnswer | None:
        """Answer a query without a dump, None if a dump is needed. The range's end is ignored, as newer events help."""
        for name, requested, own in (
            ("worker_id", query.worker_id, self._worker_id),
            ("dp_rank", query.dp_rank, self._dp_rank),
        ):
            if requested != own:
                return KvSourceAnswer(error=f"{name} {requested}: this source serves {own}")
        start, end, newest = query.start_event_id, query.end_event_id, self.last_event_id
        if start is not None and end is not None and end < start:
            return KvSourceAnswer(invalid_range=KvSourceInvalidRange(start, end))
        if start is None or not self._recent or start < self._recent[0].event.event_id:
            return None
        if start > newest:
            return KvSourceAnswer(too_new=KvSourceTooNew(start, newest if end is None else end, newest))
        kept = list(self._recent)[start - newest - 1 :]
        return KvSourceAnswer(events=KvSourceEvents(kept, newest))

    def begin_dump(self) -> "PendingDump":
        """Start a dump of the present state."""
        places = self._places.values()
        blocks, parents = [place.block for place in places], [place.parent_hash for place in places]
        made = KvDump(blocks, parents, [place.tiers for place in places], self._make_event)
        return PendingDump(made, self.last_event_id)

    def complete_dump(self, pending: "PendingDump") -> KvSourceAnswer:
        """Complete a dump and append later events, so that it is never older than the events a router has received."""
        events = pending.dump.complete()
        last_event_id = pending.last_event_id
        since = self.last_event_id - last_event_id
        if 0 < since <= len(self._recent):
            last_event_id = self.last_event_id
            for kv_event in list(self._recent)[-since:]:
                event = NumberedKvEvent(len(events) + 1, kv_event.event.data, self._dp_rank)
                events.append(WorkerKvEvent(self._worker_id, kv_event.storage_tier, kv_event.residency_domain, event))
        return KvSourceAnswer(dump=KvSourceDump(events, last_event_id))

    def dump(self) -> list[WorkerKvEvent]:
        """Return events that recreate the present state; their ids count from 1 and have no other meaning."""
        dump = self.complete_dump(self.begin_dump()).dump
        assert dump is not None, "the answer must be a dump"
        return dump.events

    def validate(self) -> None:
        """Raise `AssertionError` if the parts are inconsistent."""
        followers: dict[int, int] = {}
        for place in self._places.values():
            if place.parent_hash is not None:
                assert place.parent_hash in self._places, "the parent of a block is missing"
                followers[place.parent_hash] = followers.get(place.parent_hash, 0) + 1
        for key, place in self._places.items():
            assert place.followers == followers.get(key, 0), "the followers of a block are miscounted"
            assert place.tiers or place.followers, "a block without tiers and followers is kept"
        more = sum(place.tiers.bit_count() - 1 for place in self._places.values() if place.tiers)
        assert self._more == more, "the tiers of the blocks are miscounted"
        assert len(self._places) + more <= self._blocks_max, "more blocks than the maximum"

    def _store(self, stored: Stored, bit: int) -> None:
        """Store blocks; those with an unknown parent match no prompt and are skipped, as in a router."""
        parent_hash = stored.parent_hash
        for block in stored.blocks:
            place = self._places.get(block.block_hash)
            has_space = len(self._places) + self._more < self._blocks_max
            if place is not None:
                if place.tiers and not place.tiers & bit:
                    if not has_space:
                        return
                    self._more += 1
                place.tiers |= bit
            elif not has_space or not self._follow(parent_hash):
                return
            else:
                self._places[block.block_hash] = _Place(block, parent_hash, bit)
            parent_hash = block.block_hash

    def _follow(self, parent_hash: int | None) -> bool:
        """Count one more follower of a block; return False if the block is unknown."""
        if parent_hash is None:
            return True
        parent = self._places.get(parent_hash)
        if parent is None:
            return False
        parent.followers += 1
        return True

    def _remove(self, block_hash: int, bit: int) -> None:
        """Remove a block from a tier, and evicted ancestors without remaining followers."""
        place = self._places.get(block_hash)
        if place is None or not place.tiers & bit:
            return
        place.tiers ^= bit
        self._more -= bool(place.tiers)
        key: int | None = block_hash
        while key is not None:
            place = self._places[key]
            if place.tiers or place.followers:
                return
            del self._places[key]
            key = place.parent_hash
            if key is not None:
                self._places[key].followers -= 1

    def _make_event(self, number: int, change: Stored | Removed, tier: str) -> WorkerKvEvent:
        data = KvEventData(stored=change) if isinstance(change, Stored) else KvEventData(removed=change)
        return WorkerKvEvent(self._worker_id, tier, "worker", NumberedKvEvent(number, data, self._dp_rank))
