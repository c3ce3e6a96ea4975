"""Slots: unfinished requests of each rank."""

import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.errors import HttpError
from dynamo.protocols.active_sequences import AddedSequence, PrefillLoadHint
from dynamo.slot_tracker.tracker import SlotTracker, TrackedWorker

PLACE = ("m", "default")


def worker(worker_id: int, **more: int) -> TrackedWorker:
    given = {"block_size": 4, "dp_start": 0, "dp_size": 1, **more}
    return TrackedWorker(worker_id, *PLACE, given["block_size"], given["dp_start"], given["dp_size"])


@pytest.fixture
def tracker() -> SlotTracker:
    made = SlotTracker(ManualClock(), expiry_s=300.0)
    made.register(worker(1, dp_size=2))
    made.register(worker(2))
    return made


def loads(tracker: SlotTracker) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (one.worker_id, one.dp_rank): (one.active_prefill_tokens, one.active_decode_blocks) for one in tracker.loads()
    }


def test_requests_with_a_common_prefix_share_blocks(tracker: SlotTracker) -> None:
    tracker.add("a", (1, 0), PLACE, [1, 2, -3], 12)
    tracker.add("b", (1, 0), PLACE, [1, 2, 4], 4)
    assert loads(tracker) == {(1, 0): (16, 4), (1, 1): (0, 0), (2, 0): (0, 0)}
    potential = {(one.worker_id, one.dp_rank): one for one in tracker.potential_loads(PLACE, [1, 2, 5], 12)}
    first = potential[(1, 0)]
    assert (first.potential_prefill_tokens, first.potential_decode_blocks, first.active_requests) == (28, 5, 2)
    assert potential[(2, 0)].potential_decode_blocks == 3
    assert tracker.prefill_complete("a", PLACE)
    assert tracker.free("b", PLACE) and not tracker.free("b", PLACE)
    assert loads(tracker)[(1, 0)] == (0, 3)
    assert not tracker.prefill_complete("b", PLACE)


def test_contradictory_operation_is_refused(tracker: SlotTracker) -> None:
    tracker.add("a", (1, 0), PLACE, [1], 4)
    for status, work in (
        (409, lambda: tracker.register(worker(1))),
        (409, lambda: tracker.register(worker(3, block_size=8))),
        (400, lambda: tracker.register(worker(3, dp_size=0))),
        (400, lambda: tracker.register(worker(3, block_size=0))),
        (409, lambda: tracker.add("a", (2, 0), PLACE, [1], 4)),
        (404, lambda: tracker.add("b", (9, 0), PLACE, [1], 4)),
        (404, lambda: tracker.add("b", (1, 7), PLACE, [1], 4)),
        (404, lambda: tracker.add("b", (1, 0), ("n", "default"), [1], 4)),
        (404, lambda: tracker.potential_loads(("n", "default"), [1], 4)),
        (404, lambda: tracker.free("a", ("n", "default"))),
        (404, lambda: tracker.unregister(9, *PLACE)),
    ):
        with pytest.raises(HttpError) as caught:
            work()
        assert caught.value.code == status


def test_unregistered_worker_loses_its_requests(tracker: SlotTracker) -> None:
    tracker.add("a", (1, 1), PLACE, [1], 4)
    tracker.unregister(1, *PLACE)
    assert loads(tracker) == {(2, 0): (0, 0)}
    tracker.register(worker(3))
    tracker.add("a", (3, 0), PLACE, [1], 4)
    assert loads(tracker) == {(2, 0): (0, 0), (3, 0): (4, 1)}
    tracker.unregister(2, *PLACE)
    tracker.unregister(3, *PLACE)
    assert tracker.loads() == [] and tracker.workers() == []


def test_unfinished_request_expires() -> None:
    clock = ManualClock()
    tracker = SlotTracker(clock, expiry_s=300.0)
    tracker.register(worker(1))
    tracker.add("a", (1, 0), PLACE, [1], 4)
    clock.advance(301.0)
    assert loads(tracker) == {(1, 0): (0, 0)}


def test_requests_of_peers_are_counted(tracker: SlotTracker) -> None:
    tracker.replica_added("p/a", (1, 0), PLACE, AddedSequence([1, 2], True, None, PrefillLoadHint(8)))
    tracker.replica_added("p/b", (1, 0), PLACE, AddedSequence(None, False))
    tracker.replica_added("p/c", (9, 0), PLACE, AddedSequence([1]))
    tracker.replica_added("p/d", (1, 0), ("n", "default"), AddedSequence([1]))
    assert loads(tracker)[(1, 0)] == (8, 2)
    tracker.replica_prefilled("p/a", PLACE)
    tracker.replica_freed("p/b", PLACE)
    assert loads(tracker)[(1, 0)] == (0, 2)
    tracker.replica_freed("p/a", PLACE)
    tracker.replica_freed("p/a", ("n", "default"))
    assert loads(tracker)[(1, 0)] == (0, 0)
