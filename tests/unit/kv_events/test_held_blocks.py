"""The blocks of a rank follow from its events, and a replay gives the same result."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.kv_events.dump import TIERS
from dynamo.kv_events.held_blocks import CachedBlocks
from dynamo.protocols.kv_events import (
    KvEventData,
    KvSourceAnswer,
    KvSourceInvalidRange,
    KvSourceQuery,
    KvSourceTooNew,
    NumberedKvEvent,
    Removed,
    Stored,
    StoredBlock,
    WorkerKvEvent,
)

WORKER = 42
RECENT = 4
BLOCKS = 6
DEVICE, HOST, DISK, _ = TIERS


def make_event(
    number: int, change: Stored | Removed | None, tier: str = "device", worker_id: int = WORKER
) -> WorkerKvEvent:
    """None: the cache was cleared."""
    if isinstance(change, Stored):
        data: KvEventData | str = KvEventData(stored=change)
    else:
        data = "cleared" if change is None else KvEventData(removed=change)
    return WorkerKvEvent(worker_id, tier, "worker", NumberedKvEvent(number, data, 0))  # type: ignore[arg-type]


def stored(parent_hash: int | None, *hashes: int) -> Stored:
    return Stored(parent_hash, None, [StoredBlock(one, one * 10) for one in hashes])


def holdings(*changes: Stored | Removed | None, **limits: int) -> CachedBlocks:
    made = CachedBlocks(WORKER, **limits)
    for number, change in enumerate(changes, 1):
        made.apply(make_event(number, change))
    made.validate()
    return made


def send_request(made: CachedBlocks, start: int | None = None, end: int | None = None) -> KvSourceAnswer:
    return made.answer(KvSourceQuery(WORKER, 0, start, end))


class Router:
    """Simplest consumer of events: a dict of blocks and their parents for each tier."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.held: dict[str, dict[int, int]] = {tier: {} for tier in TIERS}

    def apply(self, worker_event: WorkerKvEvent) -> None:
        data, held = worker_event.event.data, self.held[worker_event.storage_tier]
        if data == "cleared":
            if worker_event.storage_tier == "device":
                for one in self.held.values():
                    one.clear()
        elif data.stored is not None:
            parent_hash = data.stored.parent_hash
            for block in data.stored.blocks:
                known = self.known()
                if block.block_hash not in known:
                    if parent_hash is not None and parent_hash not in known:
                        break
                    self.parents[block.block_hash] = parent_hash
                held[block.block_hash] = block.tokens_hash
                parent_hash = block.block_hash
        elif data.removed is not None:
            for block_hash in data.removed.block_hashes:
                held.pop(block_hash, None)

    def known(self) -> set[int]:
        """Return the held blocks, and their parents."""
        found: set[int] = set()
        for block_hash in (one for held in self.held.values() for one in held):
            at: int | None = block_hash
            while at is not None and at not in found:
                found.add(at)
                at = self.parents[at]
        return found


def tiered(*changes: tuple[str, Stored | Removed | None], **limits: int) -> CachedBlocks:
    made = CachedBlocks(WORKER, **limits)
    for number, (tier, change) in enumerate(changes, 1):
        made.apply(make_event(number, change, tier))
    made.validate()
    return made


def test_held_blocks_dump_lists_every_tier_from_the_nearest() -> None:
    made = tiered(
        (DISK, stored(None, 1, 2, 3)), (DEVICE, stored(None, 1)), (HOST, stored(None, 1, 2)), ("external", stored(3, 4))
    )
    assert made.held() == {1: 10}
    assert made.held(HOST) == {1: 10, 2: 20}
    assert made.dump() == [
        make_event(1, stored(None, 1)),
        make_event(2, stored(None, 1, 2), HOST),
        make_event(3, stored(None, 1, 2, 3), DISK),
        make_event(4, stored(3, 4), "external"),
    ]


def test_held_blocks_dump_moves_a_block_needed_by_a_nearer_tier() -> None:
    made = tiered((DEVICE, stored(None, 1, 2)), (DISK, stored(None, 1)), (DEVICE, Removed([1])))
    assert made.dump() == [
        make_event(1, stored(None, 1, 2)), make_event(2, stored(None, 1), DISK), make_event(3, Removed([1])),
    ]  # fmt: skip


def test_held_blocks_dump_lists_a_missing_parent_with_its_child() -> None:
    made = tiered((HOST, stored(None, 1, 2)), (HOST, Removed([1])))
    assert made.dump() == [make_event(1, stored(None, 1, 2), HOST), make_event(2, Removed([1]), HOST)]


def test_held_blocks_keep_a_block_until_the_last_tier_evicts_it() -> None:
    made = tiered((DEVICE, stored(None, 1)), (HOST, stored(None, 1)), (DEVICE, Removed([1])), (DISK, Removed([1])))
    assert (made.held(), made.held(HOST)) == ({}, {1: 10})
    made.apply(make_event(5, Removed([1]), HOST))
    made.validate()
    assert made.dump() == []


def test_held_blocks_are_empty_after_an_engine_reset() -> None:
    made = tiered((DEVICE, stored(None, 1)), (HOST, stored(None, 1, 2)), (DEVICE, None))
    made.validate()
    assert made.dump() == []


def test_held_blocks_count_each_tier_of_a_block() -> None:
    made = tiered((DEVICE, stored(None, 1, 2)), (HOST, stored(None, 1, 2)), blocks_max=3)
    assert (made.held(), made.held(HOST)) == ({1: 10, 2: 20}, {1: 10})


def test_held_blocks_ignore_an_unknown_tier() -> None:
    made = tiered((DEVICE, stored(None, 1)), ("tape", stored(None, 7)))
    answer = send_request(made, 2)
    assert answer.events is not None
    assert answer.events.events == [make_event(2, stored(None, 7), "tape")]
    assert made.dump() == [make_event(1, stored(None, 1))]


def test_held_blocks_are_empty_before_the_first_event() -> None:
    made = holdings()
    assert made.held() == {}
    assert send_request(made).dump is not None
    assert send_request(made, 1).dump is not None
    assert made.dump() == []


def test_held_blocks_dump_stored_blocks_as_one_chain() -> None:
    made = holdings(stored(None, 1, 2), stored(2, 3))
    assert made.dump() == [make_event(1, stored(None, 1, 2, 3))]
    assert made.held() == {1: 10, 2: 20, 3: 30}


def test_held_blocks_dump_a_forked_chain_parents_first() -> None:
    made = holdings(stored(None, 1, 2), stored(2, 3), stored(2, 4, 5))
    assert made.dump() == [
        make_event(1, stored(None, 1, 2)),
        make_event(2, stored(2, 3)),
        make_event(3, stored(2, 4, 5)),
    ]


def test_held_blocks_ignore_a_block_with_unknown_parent() -> None:
    assert holdings(stored(9, 1)).held() == {}


def test_held_blocks_dump_an_evicted_block_with_children() -> None:
    made = holdings(stored(None, 1, 2), Removed([1]))
    assert made.held() == {2: 20}
    assert made.dump() == [make_event(1, stored(None, 1, 2)), make_event(2, Removed([1]))]
    made.apply(make_event(3, stored(None, 1)))
    assert made.dump() == [make_event(1, stored(None, 1, 2))]


def test_held_blocks_forget_an_evicted_leaf() -> None:
    made = holdings(stored(None, 1, 2, 3), Removed([1]), Removed([2]), Removed([3]))
    assert made.dump() == []
    assert made.last_event_id == 4


def test_held_blocks_are_empty_after_a_clear() -> None:
    made = holdings(stored(None, 1, 2), None)
    assert made.held() == {}
    assert made.dump() == []


def test_held_blocks_return_recent_events_unchanged() -> None:
    changes = [stored(None, number) for number in range(1, 7)]
    made = holdings(*changes, recent_max=RECENT)
    events = [make_event(number, change) for number, change in enumerate(changes, 1)]
    for start, end in ((3, 3), (4, None), (6, 100)):  # The end does not matter.
        answer = send_request(made, start, end)
        assert answer.events is not None
        assert (answer.events.events, answer.events.last_event_id) == (events[start - 1 :], 6)


def test_held_blocks_return_a_dump_for_old_ranges() -> None:
    made = holdings(*(stored(None, number) for number in range(1, 7)), recent_max=RECENT)
    for start in (None, 0, 1, 2):
        dump = send_request(made, start).dump
        assert dump is not None
        assert (len(dump.events), dump.last_event_id, dump.reset_scope) == (6, 6, "all")


def test_held_blocks_refuse_a_range_in_the_future() -> None:
    made = holdings(stored(None, 1))
    assert send_request(made, 2, 9).too_new == KvSourceTooNew(2, 9, 1)
    assert send_request(made, 2).too_new == KvSourceTooNew(2, 1, 1)


def test_held_blocks_refuse_an_end_before_its_start() -> None:
    assert send_request(holdings(stored(None, 1)), 5, 2).invalid_range == KvSourceInvalidRange(5, 2)


def test_held_blocks_source_refuses_queries_for_other_workers_and_ranks() -> None:
    made = holdings(stored(None, 1))
    assert "worker_id" in (made.answer(KvSourceQuery(1, 0)).error or "")
    assert "dp_rank" in (made.answer(KvSourceQuery(WORKER, 3)).error or "")


def test_held_blocks_are_bounded() -> None:
    made = holdings(stored(None, 1, 2, 3), stored(3, 4), Removed([3]), stored(2, 5), blocks_max=3)
    assert made.held() == {1: 10, 2: 20, 5: 50}


HASHES = st.integers(1, BLOCKS)
PARENTS = st.one_of(st.none(), HASHES)
NAMES = st.sampled_from(TIERS)


def everything(made: CachedBlocks) -> dict[str, dict[int, int]]:
    return {tier: made.held(tier) for tier in TIERS}


class HoldingsMachine(RuleBasedStateMachine):
    """Any events, as a faulty engine might publish them."""

    def __init__(self) -> None:
        super().__init__()
        self.made = CachedBlocks(WORKER, recent_max=RECENT)
        self.model = Router()
        self.late = Router()
        self.late_id = 0

    def happen(self, change: Stored | Removed | None, tier: str = DEVICE) -> None:
        worker_event = make_event(self.made.last_event_id + 1, change, tier)
        self.made.apply(worker_event)
        self.model.apply(worker_event)

    @rule(parent=PARENTS, hashes=st.lists(HASHES, max_size=4, unique=True), tier=NAMES)
    def store(self, parent: int | None, hashes: list[int], tier: str) -> None:
        self.happen(stored(parent, *(one for one in hashes if one != parent)), tier)

    @rule(hashes=st.lists(HASHES, max_size=3), tier=NAMES)
    def remove(self, hashes: list[int], tier: str) -> None:
        self.happen(Removed(hashes), tier)

    @rule()
    def clear(self) -> None:
        self.happen(None)

    @precondition(lambda self: self.late_id < self.made.last_event_id)
    @rule()
    def catch_up(self) -> None:
        """A router that received everything up to an id requests the events after it."""
        answer = send_request(self.made, self.late_id + 1)
        if answer.dump is not None:
            self.late = Router()
            events = answer.dump.events
        else:
            assert answer.events is not None
            events = answer.events.events
        for worker_event in events:
            self.late.apply(worker_event)
        self.late_id = self.made.last_event_id
        assert self.late.held == everything(self.made)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert everything(self.made) == self.model.held

    @invariant()
    def a_dump_leads_to_the_same(self) -> None:
        reader = Router()
        for worker_event in self.made.dump():
            reader.apply(worker_event)
        assert reader.held == everything(self.made)
        assert reader.known() == self.model.known()

    def teardown(self) -> None:
        self.made.validate()


TestHoldings = HoldingsMachine.TestCase
TestHoldings.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.integers(0, 12), st.integers(0, 12))
def test_held_blocks_answer_every_range_in_exactly_one_way(start: int, end: int) -> None:
    answer = send_request(holdings(*(stored(None, number) for number in range(1, 7)), recent_max=RECENT), start, end)
    parts = (answer.events, answer.dump, answer.too_new, answer.invalid_range, answer.error)
    assert sum(part is not None for part in parts) == 1


def test_held_blocks_dump_includes_concurrent_events() -> None:
    made = holdings(stored(None, 1, 2))
    pending = made.begin_dump()
    made.apply(make_event(2, stored(2, 3)))
    made.apply(make_event(3, Removed([1])))
    dump = made.complete_dump(pending).dump
    assert dump is not None
    assert dump.events == [make_event(1, stored(None, 1, 2)), make_event(2, stored(2, 3)), make_event(3, Removed([1]))]
    assert dump.last_event_id == 3


def test_held_blocks_dump_omits_events_beyond_the_recent_buffer() -> None:
    made = holdings(stored(None, 1), recent_max=2)
    pending = made.begin_dump()
    for number in range(2, 6):
        made.apply(make_event(number, stored(None, number)))
    dump = made.complete_dump(pending).dump
    assert dump is not None
    assert (len(dump.events), dump.last_event_id) == (1, 1)
