"""KvHoldings: what one rank's KV cache and the tiers below it hold, told by events, and how to tell it again.

Whoever missed an event asks for the newest ones, which are kept as they were, or for all: a few events that lead from
nothing to the present state (docs/kv-events.md). A block that was evicted before the blocks that follow it is remembered
as long as they are held, for without it nobody could say where they belong.
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
BLOCKS_MAX = 1 << 18  # Per rank, once for each tier that holds one: a dump of them fits in one message of 32 MiB.
_BITS = {name: 1 << number for number, name in enumerate(TIERS)}


class _Place:
    """A block and what comes before it."""

    __slots__ = ("block", "followers", "parent_hash", "tiers")

    def __init__(self, block: StoredBlock, parent_hash: int | None, tiers: int) -> None:
        self.block = block
        self.parent_hash = parent_hash
        self.followers = 0
        self.tiers = tiers
        """A bit for each that holds it."""


@dataclass(frozen=True, slots=True)
class PendingDump:
    """A dump under way, and the last event that it knows of."""

    dump: KvDump
    last_event_id: int


class KvHoldings:
    """The blocks of one rank. Events must be applied in the order of their ids, from 1, with none left out."""

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
        """How often a block is held by another tier as well."""

    def held(self, tier: str = TIERS[0]) -> dict[int, int]:
        """The tokens hash of each block that a tier holds, by its own hash."""
        bit = _BITS[tier]
        return {key: place.block.tokens_hash for key, place in self._places.items() if place.tiers & bit}

    def apply(self, told: WorkerKvEvent) -> None:
        """The next event happened."""
        event = told.event
        assert event.event_id == self.last_event_id + 1, "an event of the cache was left out"
        self.last_event_id = event.event_id
        self._recent.append(told)
        bit = _BITS.get(told.storage_tier)
        if bit is None:
            return
        if event.data == "cleared":
            if told.storage_tier == TIERS[0]:  # As routers have it: the engine forgot everything.
                self._places.clear()
                self._more = 0
        elif event.data.stored is not None:
            self._store(event.data.stored, bit)
        elif event.data.removed is not None:
            for block_hash in event.data.removed.block_hashes:
                self._remove(block_hash, bit)

    def answer(self, query: KvSourceQuery) -> KvSourceAnswer:
        """What a router wants to know."""
        return self.short_answer(query) or self.told(self.begin_dump())

    def short_answer(self, query: KvSourceQuery) -> KvSourceAnswer | None:
        """The same, None where a dump is needed. The end of a range is not looked at: what is newer helps as well."""
        for name, asked, own in (
            ("worker_id", query.worker_id, self._worker_id),
            ("dp_rank", query.dp_rank, self._dp_rank),
        ):
            if asked != own:
                return KvSourceAnswer(error=f"{name} {asked}: this source speaks of {own}")
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
        """What is held now, to be told when it has been worked through."""
        places = self._places.values()
        blocks, parents = [place.block for place in places], [place.parent_hash for place in places]
        made = KvDump(blocks, parents, [place.tiers for place in places], self._tell)
        return PendingDump(made, self.last_event_id)

    def told(self, pending: "PendingDump") -> KvSourceAnswer:
        """A dump that was begun, and what happened since, so that it is never older than what a router has heard."""
        events = pending.dump.complete()
        last_event_id = pending.last_event_id
        since = self.last_event_id - last_event_id
        if 0 < since <= len(self._recent):
            last_event_id = self.last_event_id
            for told in list(self._recent)[-since:]:
                event = NumberedKvEvent(len(events) + 1, told.event.data, self._dp_rank)
                events.append(WorkerKvEvent(self._worker_id, told.storage_tier, told.residency_domain, event))
        return KvSourceAnswer(dump=KvSourceDump(events, last_event_id))

    def dump(self) -> list[WorkerKvEvent]:
        """Events that lead from nothing to what is held; their ids count from 1 and mean nothing else."""
        dump = self.told(self.begin_dump()).dump
        assert dump is not None, "a dump that is none"
        return dump.events

    def validate(self) -> None:
        """Raises `AssertionError` where the parts disagree."""
        followers: dict[int, int] = {}
        for place in self._places.values():
            if place.parent_hash is not None:
                assert place.parent_hash in self._places, "a block follows one that nobody remembers"
                followers[place.parent_hash] = followers.get(place.parent_hash, 0) + 1
        for key, place in self._places.items():
            assert place.followers == followers.get(key, 0), "a block does not know how many follow it"
            assert place.tiers or place.followers, "a block is remembered for no reason"
        more = sum(place.tiers.bit_count() - 1 for place in self._places.values() if place.tiers)
        assert self._more == more, "the tiers of the blocks are miscounted"
        assert len(self._places) + more <= self._blocks_max, "more blocks than there is room for"

    def _store(self, stored: Stored, bit: int) -> None:
        """Blocks whose predecessor is unknown are nobody's prefix and are left out, here as in a router."""
        parent_hash = stored.parent_hash
        for block in stored.blocks:
            place = self._places.get(block.block_hash)
            has_room = len(self._places) + self._more < self._blocks_max
            if place is not None:
                if place.tiers and not place.tiers & bit:
                    if not has_room:
                        return
                    self._more += 1
                place.tiers |= bit
            elif not has_room or not self._follow(parent_hash):
                return
            else:
                self._places[block.block_hash] = _Place(block, parent_hash, bit)
            parent_hash = block.block_hash

    def _follow(self, parent_hash: int | None) -> bool:
        """Counts one more follower; False where there is nothing to follow."""
        if parent_hash is None:
            return True
        parent = self._places.get(parent_hash)
        if parent is None:
            return False
        parent.followers += 1
        return True

    def _remove(self, block_hash: int, bit: int) -> None:
        """Forgets it, and the evicted blocks before it that nothing follows any more."""
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

    def _tell(self, number: int, change: Stored | Removed, tier: str) -> WorkerKvEvent:
        data = KvEventData(stored=change) if isinstance(change, Stored) else KvEventData(removed=change)
        return WorkerKvEvent(self._worker_id, tier, "worker", NumberedKvEvent(number, data, self._dp_rank))
