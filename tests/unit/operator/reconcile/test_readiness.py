"""Readiness of workloads by their status."""

from typing import Any

import pytest

from dynamo.operator.reconcile.readiness import grove_readiness, leader_worker_set_readiness

AVAILABLE = [{"type": "Available", "status": "True"}]


def lws(desired: int | None, **status: Any) -> dict[str, Any]:
    return {"spec": {} if desired is None else {"replicas": desired}, "status": status}


@pytest.mark.parametrize(
    ("observed", "is_ready"),
    [
        (None, False),
        (lws(0), True),
        (lws(2), False),
        (lws(2, readyReplicas=1, conditions=AVAILABLE), False),
        (lws(2, readyReplicas=2), False),
        (lws(2, readyReplicas=2, conditions=[{"type": "Available", "status": "False"}]), False),
        (lws(2, readyReplicas=2, conditions=AVAILABLE), True),
        (lws(None, readyReplicas=1, conditions=AVAILABLE), True),
    ],
)
def test_leader_worker_set_readiness_follows_its_status(observed, is_ready) -> None:
    found = leader_worker_set_readiness("g-decode-0", observed)
    assert found.is_ready == is_ready
    assert bool(found.reason) is bool(found.message) is not is_ready
    assert (found.status.component_kind, found.status.component_names) == ("LeaderWorkerSet", ["g-decode-0"])


def test_status_has_the_counts_of_the_leader_worker_set() -> None:
    status = leader_worker_set_readiness("n", lws(3, replicas=3, readyReplicas=2, updatedReplicas=1)).status
    assert (status.replicas, status.ready_replicas, status.updated_replicas) == (3, 2, 1)


def clique(desired: int = 2, generation: int = 3, seen: int | None = 3, **status: Any) -> dict[str, Any]:
    if seen is not None:
        status["observedGeneration"] = seen
    return {"metadata": {"generation": generation}, "spec": {"replicas": desired}, "status": status}


FULL = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "availableReplicas": 2}


@pytest.mark.parametrize("kind", ["PodClique", "PodCliqueScalingGroup"])
@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        (None, "SomeResourcesNotReady"),
        (clique(seen=None, **FULL), "SomeResourcesNotReady"),
        (clique(seen=2, **FULL), "SomeResourcesNotReady"),
        (clique(desired=0), ""),
        (clique(**FULL), ""),
        (clique(**{**FULL, "readyReplicas": 1, "availableReplicas": 1}), "PodsNotReady"),
        (clique(**{**FULL, "updatedReplicas": 1}), "Updating"),
        (clique(**{**FULL, "replicas": 3}), "Updating"),
        (clique(scheduledReplicas=1), "InsufficientCapacity"),
        (clique(scheduleGatedReplicas=2), "InsufficientCapacity"),
    ],
)
def test_grove_readiness_follows_its_status(kind, observed, reason) -> None:
    found = grove_readiness(kind, "g-0-decode", observed)
    assert (found.is_ready, found.reason) == (not reason, reason)
    assert found.status.component_kind == kind


@pytest.mark.parametrize(
    ("kind", "condition", "reason"),
    [
        ("PodClique", "PodCliqueScheduled", "InsufficientScheduledPods"),
        ("PodCliqueScalingGroup", "MinAvailableBreached", "InsufficientScheduledPodCliqueScalingGroupReplicas"),
    ],
)
def test_unschedulable_condition_is_reported_as_insufficient_capacity(kind, condition, reason) -> None:
    conditions = [{"type": condition, "status": "False", "reason": reason, "message": "no nodes"}]
    found = grove_readiness(kind, "n", clique(conditions=conditions))
    assert (found.reason, found.message) == ("InsufficientCapacity", f"{reason}: no nodes")


def test_ready_workload_without_scheduled_count_is_ready() -> None:
    assert grove_readiness("PodClique", "n", clique(**FULL)).is_ready
    status = grove_readiness("PodCliqueScalingGroup", "n", clique(**FULL)).status
    assert (status.available_replicas, status.ready_replicas, status.scheduled_replicas) == (2, None, 0)
