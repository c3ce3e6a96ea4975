"""Constraints of a request, failed and busy workers, and a bound session select the ranks that may serve it."""

from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument, NoMatchingWorker, NotReady, Overloaded
from dynamo.kv_router.affinity import Affinity, Mode
from dynamo.kv_router.decision import RouteRequest, WorkerFacts
from dynamo.kv_router.eligibility import eligible_slots, eligible_slots_of_session
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.worker_slots import WorkerSlots


def workers_of(*facts: WorkerFacts) -> WorkerSlots:
    workers = WorkerSlots(KvIndex(), 100, limits_blocks=True)
    for one in facts:
        workers.set_worker(one)
    return workers


def three_workers() -> WorkerSlots:
    """Slots 0 and 1: workers 1 and 2; slots 2 and 3: the ranks of worker 3, which has a taint."""
    return workers_of(WorkerFacts(1), WorkerFacts(2), WorkerFacts(3, dp_size=2, taints=frozenset({"gpu=h200"})))


def request_of(**constraints: Any) -> RouteRequest:
    return RouteRequest("a", b"", 8, **constraints)


@pytest.mark.parametrize(
    ("constraints", "slots"),
    [
        ({}, [0, 1, 2, 3]),
        ({"allowed": frozenset({2})}, [1]),
        ({"worker_id": 3}, [2, 3]),
        ({"required_taints": frozenset({"gpu=h200"})}, [2, 3]),
        ({"dp_rank": 1}, [3]),
        ({"avoid": frozenset({1}), "busy": frozenset({3})}, [1]),
        ({"dp_rank": 0, "avoid": frozenset({1})}, [1, 2]),
    ],
)
def test_eligible_slots_are_those_that_meet_every_constraint(constraints: dict[str, Any], slots: list[int]) -> None:
    found, filtered = eligible_slots(three_workers(), request_of(**constraints))
    assert list(found) == slots
    assert sorted([*found, *filtered]) == [0, 1, 2, 3], "each other slot has a reason"


def test_ineligible_slots_have_the_reason() -> None:
    constraints = request_of(required_taints=frozenset({"gpu=h200"}), dp_rank=0)
    _, filtered = eligible_slots(three_workers(), constraints)
    assert filtered == {0: "lacks gpu=h200", 1: "lacks gpu=h200", 3: "the request names another rank"}
    _, filtered = eligible_slots(three_workers(), request_of(busy=frozenset({1, 2}), avoid=frozenset({2})))
    assert filtered == {0: "above a busy threshold", 1: "failed or unresponsive"}


@pytest.mark.parametrize(
    ("constraints", "error", "message"),
    [
        ({"busy": frozenset({1, 2, 3})}, Overloaded, "every eligible worker"),
        ({"worker_id": 2, "busy": frozenset({2})}, Overloaded, "worker 2, named by the request"),
        ({"required_taints": frozenset({"zone=a"})}, NoMatchingWorker, "lacks zone=a"),
        (
            {"required_taints": frozenset({"gpu=h200"}), "avoid": frozenset({3})},
            NotReady,
            "failed or unresponsive; lacks gpu=h200",
        ),
        ({"worker_id": 99}, InvalidArgument, "worker 99"),
        ({"dp_rank": 7}, InvalidArgument, "dp_rank 7"),
    ],
)
def test_request_without_an_eligible_worker_is_refused(
    constraints: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        eligible_slots(three_workers(), request_of(**constraints))
    assert raised.type is error


def test_request_is_refused_while_there_is_no_worker() -> None:
    with pytest.raises(NotReady, match="no worker serves"):
        eligible_slots(workers_of(), request_of())


@pytest.mark.parametrize(("mode", "slots_if_busy"), [("hard", [1]), ("soft", [0, 2, 3])])
def test_session_keeps_its_worker_while_it_is_eligible(mode: Mode, slots_if_busy: list[int]) -> None:
    workers, affinity = three_workers(), Affinity(60.0, mode)
    affinity.bind("s", "before", (2, 0), 0.0)
    slots, filtered = eligible_slots_of_session(workers, affinity, request_of(session="s"), 1.0)
    assert slots == [1]
    assert set(filtered.values()) == {"the session is bound to another worker"}

    def eligible(**constraints: Any) -> list[int]:
        return list(eligible_slots_of_session(workers, affinity, request_of(**constraints), 1.0)[0])

    assert eligible(session="s", busy=frozenset({2})) == slots_if_busy
    assert eligible(session="s", avoid=frozenset({2})) == [0, 2, 3]
    assert eligible(session="s", worker_id=1) == [0], "a worker that the request names wins"
    assert eligible(session="other") == [0, 1, 2, 3]
    workers.workers.pop(2)
    workers.release((2, 0))
    assert eligible(session="s") == [0, 2, 3]
