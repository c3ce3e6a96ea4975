"""Each rank of the workers has a slot, which is used again once the rank is gone."""

import math

from dynamo.kv_router.decision import RouteRequest, WorkerFacts
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.worker_slots import WorkerSlots


def make(*, limits_blocks: bool = True) -> WorkerSlots:
    workers = WorkerSlots(KvIndex(), 100, limits_blocks=limits_blocks)
    workers.set_worker(WorkerFacts(1, dp_size=2, kv_blocks=50, batch_tokens=100))
    workers.set_worker(WorkerFacts(2, taints=frozenset({"zone=a"})))
    return workers


def test_ranks_have_consecutive_slots_with_the_facts_of_their_worker() -> None:
    workers = make()
    assert workers.ranks == {0: (1, 0), 1: (1, 1), 2: (2, 0)}
    assert workers.slots_of(1) == [0, 1]
    assert [workers.batch_tokens_of(slot) for slot in range(3)] == [100, 100, None]
    assert workers.taints_of(2) == {"zone=a"}
    assert list(workers.capacity) == [50, 50, math.inf]
    assert list(make(limits_blocks=False).capacity) == [math.inf] * 3
    workers.validate()


def test_slot_of_a_removed_rank_is_used_again() -> None:
    workers = make()
    smaller = WorkerFacts(1, dp_size=1)
    assert workers.removed_by(smaller) == [(1, 1)]
    workers.release((1, 1))
    workers.set_worker(smaller)
    assert workers.set_worker(WorkerFacts(3)) == [1]
    assert workers.removed_by(WorkerFacts(4)) == []
    workers.validate()


def test_ranks_that_a_snapshot_refers_to_do_not_change() -> None:
    workers = make()
    shared = workers.share_ranks()
    workers.release((1, 1))
    assert shared == {0: (1, 0), 1: (1, 1), 2: (2, 0)}
    assert workers.ranks == {0: (1, 0), 2: (2, 0)}


def test_slot_is_far_if_its_worker_lacks_the_taint_of_the_transfer_domain() -> None:
    workers = make()
    near = RouteRequest("a", b"", 8, near_taint="zone=a")
    assert [workers.is_far(near, slot) for slot in (0, 2)] == [True, False]
    assert not workers.is_far(RouteRequest("a", b"", 8), 0), "without transfer domains no worker is far"
