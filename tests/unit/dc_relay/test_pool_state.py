"""PoolState: blocks of several ranks, their canonical hashes and a filter that is full."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.dc_relay.pool_state import PoolState
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent
from dynamo.tokens.hashing import sequence_hashes


def stored(worker: int, parent: int | None, *keys: int, tier: str = "device") -> WorkerKvEvent:
    """Return blocks whose token hash is ten times their key."""
    data = KvEventData(stored=Stored(parent, None, [StoredBlock(key, 10 * key) for key in keys]))
    return WorkerKvEvent(worker, tier, "worker", NumberedKvEvent(1, data, 0))


def removed(worker: int, *keys: int) -> WorkerKvEvent:
    return WorkerKvEvent(worker, "device", "worker", NumberedKvEvent(1, KvEventData(removed=Removed(list(keys))), 0))


def test_blocks_are_in_the_filter_by_their_canonical_sequence_hashes() -> None:
    state = PoolState(32)
    assert state.apply(stored(1, None, 1, 2))
    assert state.apply(stored(1, 2, 3))
    assert all(one in state.filter for one in sequence_hashes([10, 20, 30]))
    state.validate()


def test_block_of_two_workers_remains_until_both_remove_it() -> None:
    state = PoolState(32)
    state.apply(stored(1, None, 1))
    state.apply(stored(2, None, 1))
    state.apply(removed(1, 1))
    assert 10 in state.filter
    state.forget(2, 0)
    assert 10 not in state.filter
    state.validate()


def test_event_with_an_unknown_parent_is_a_missed_event() -> None:
    state = PoolState(32)
    assert not state.apply(stored(1, 99, 1))
    assert not len(state)


def test_blocks_outside_the_device_are_not_counted() -> None:
    state = PoolState(32)
    assert state.apply(stored(1, None, 1, tier="disk"))
    assert not len(state)


def test_key_reused_for_other_content_releases_the_former_block() -> None:
    state = PoolState(32)
    state.apply(stored(1, None, 1, 2))
    state.apply(stored(1, None, 2))
    assert 20 in state.filter
    assert len(state) == 2
    state.validate()


def test_full_filter_omits_blocks_without_removing_others() -> None:
    state = PoolState(2)
    state.apply(stored(1, None, *range(1, 31)))
    assert state.omitted
    state.validate()
    state.apply(removed(1, *range(15, 31)))
    state.validate()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 12)), max_size=60))
def test_any_order_of_events_keeps_the_counts(steps: list[tuple[int, int, int]]) -> None:
    state = PoolState(2)
    for kind, worker, key in steps:
        if kind == 0:
            state.apply(removed(worker, key))
        elif kind == 1:
            state.forget(worker, 0)
        else:
            state.apply(stored(worker, None if kind == 2 else key % 5, key))
        state.validate()
