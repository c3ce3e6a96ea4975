"""Replicas of the new and of earlier generations during a managed update."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import MAX_SURGE, MAX_UNAVAILABLE, STRATEGY
from dynamo.operator.reconcile.rollout import WorkerReplicas, is_drained, limits, replica_targets
from dynamo.protocols.kubernetes.common import ObjectMeta
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentDeploymentSpec,
    ComponentDeploymentStatus,
    ComponentSpec,
    ComponentStatus,
    DynamoComponentDeployment,
)


def deployed(name: str, declared: int, available: int, created: int = 0) -> DynamoComponentDeployment:
    reported = ComponentStatus(replicas=available, available_replicas=available)
    return DynamoComponentDeployment(
        metadata=ObjectMeta(name=name, generation=1, creation_timestamp=f"2026-01-0{created + 1}T00:00:00Z"),
        spec=ComponentDeploymentSpec(replicas=declared),
        status=ComponentDeploymentStatus(component=reported, observed_generation=1),
    )


@pytest.mark.parametrize(
    ("surge", "unavailable", "desired", "expected"),
    [
        ("", "", 4, (1, 1)),
        ("", "", 5, (2, 1)),
        ("", "", 1, (1, 0)),
        ("0", "0", 3, (1, 0)),
        ("0%", "10%", 3, (1, 0)),
        ("100%", "0", 3, (3, 0)),
        ("2", "5", 3, (2, 3)),
    ],
)
def test_percentages_round_up_for_surge_and_down_for_unavailable(
    surge: str, unavailable: str, desired: int, expected: tuple[int, int]
) -> None:
    assert limits({MAX_SURGE: surge, MAX_UNAVAILABLE: unavailable}, desired) == expected


def test_desired_replicas_are_used_without_earlier_generations() -> None:
    targets = replica_targets(ComponentSpec(name="a", replicas=3), WorkerReplicas(), [], {})
    assert (targets.new, targets.old) == (3, {})


def test_update_starts_with_the_surge_and_removes_the_allowed_unavailable_replicas() -> None:
    targets = replica_targets(ComponentSpec(name="a", replicas=4), WorkerReplicas(), [deployed("old", 4, 4)], {})
    assert (targets.new, targets.old) == (1, {"old": 3})


def test_unavailable_old_replicas_are_removed_first_then_those_of_the_oldest_generation() -> None:
    old = [deployed("oldest", 2, 2), deployed("broken", 2, 0, 1), deployed("newest", 2, 2, 2)]
    targets = replica_targets(ComponentSpec(name="a", replicas=4), WorkerReplicas(), old, {})
    assert targets.old == {"oldest": 1, "broken": 0, "newest": 2}


def test_recreate_waits_until_no_earlier_pod_runs() -> None:
    annotations = {STRATEGY: "Recreate"}
    one = ComponentSpec(name="a", replicas=2)
    waiting = replica_targets(one, WorkerReplicas(), [deployed("old", 0, 1)], annotations)
    assert (waiting.new, waiting.old) == (0, {"old": 0})
    assert replica_targets(one, WorkerReplicas(), [deployed("old", 0, 0)], annotations).new == 2


def test_generation_is_drained_when_zero_replicas_are_observed_and_no_pod_remains() -> None:
    assert is_drained(deployed("old", 0, 0))
    assert not is_drained(deployed("old", 1, 0))
    assert not is_drained(deployed("old", 0, 1))
    unseen = deployed("old", 0, 0)
    unseen.metadata.generation = 2
    assert not is_drained(unseen)


@given(
    desired=st.integers(0, 20),
    old=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=3),
    new=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    surge=st.sampled_from(["", "0", "1", "25%", "100%"]),
    unavailable=st.sampled_from(["", "0", "1", "50%"]),
)
def test_update_step_never_violates_the_availability_floor_or_the_surge_ceiling(
    desired: int, old: list[tuple[int, int]], new: tuple[int, int], surge: str, unavailable: str
) -> None:
    annotations = {MAX_SURGE: surge, MAX_UNAVAILABLE: unavailable}
    earlier = [deployed(f"old-{i}", declared, min(pair, declared), i) for i, (declared, pair) in enumerate(old)]
    present = WorkerReplicas(new[0], min(new), min(new))
    targets = replica_targets(ComponentSpec(name="a", replicas=desired), present, earlier, annotations)
    most, missing = limits(annotations, desired)
    declared_old = sum(one.spec.replicas or 0 for one in earlier)
    available_old = sum(min(one.spec.replicas or 0, targets.old[one.metadata.name]) for one in earlier)
    serving = sum(
        min(one.status.component.available_replicas or 0, targets.old[one.metadata.name])
        for one in earlier
        if one.status and one.status.component
    )
    before = sum(min(pair, declared) for declared, pair in old) + present.available
    assert serving + present.available >= min(before, desired - missing)
    assert targets.new <= desired
    if targets.new > present.declared:
        assert targets.new + declared_old <= desired + most
    assert available_old <= declared_old
    assert all(0 <= targets.old[one.metadata.name] <= (one.spec.replicas or 0) for one in earlier)


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "10 %"])
def test_update_limit_that_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="neither a number nor a percentage"):
        limits({MAX_SURGE: text}, 3)
