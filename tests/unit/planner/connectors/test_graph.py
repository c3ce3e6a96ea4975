"""State of a DynamoGraphDeployment as the planner reads it."""

from typing import Any

import pytest

from dynamo.planner.connectors.graph import PlannedGraph, adapter_name, replicas_patch
from dynamo.planner.errors import DuplicateSubComponentError, SubComponentNotFoundError
from dynamo.protocols.planner import RolloutPhase

SERVING = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "availableReplicas": 2}


def graph(
    components: dict[str, dict[str, Any]],
    statuses: dict[str, dict[str, Any]] | None = None,
    pods: list[dict[str, Any]] | None = None,
    **status: Any,
) -> PlannedGraph:
    spec = {"components": [{"name": name, **one} for name, one in components.items()]}
    conditions = [{"type": "Ready", "status": "True"}]
    given = {"observedGeneration": 3, "conditions": conditions, "components": statuses or {}, **status}
    return PlannedGraph({"metadata": {"name": "g", "generation": 3}, "spec": spec, "status": given}, pods)


def pod(phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {"metadata": metadata, "status": {"phase": phase}}


WORKER = {"w": {"type": "worker", "replicas": 2}}


@pytest.mark.parametrize(
    ("components", "role", "expected"),
    [
        ({"a": {"type": "prefill"}, "b": {"type": "decode"}}, "prefill", "a"),
        ({"a": {"type": "prefill"}, "b": {"type": "decode"}}, "decode", "b"),
        ({"f": {"type": "frontend"}, "w": {"type": "worker"}}, "decode", "w"),
        ({"w": {"type": "worker"}, "d": {"type": "decode"}}, "decode", "d"),
    ],
)
def test_role_is_that_of_the_type_and_decode_may_be_a_generic_worker(
    components: dict[str, dict[str, Any]], role: str, expected: str
) -> None:
    assert graph(components).component_of(role) == expected


def test_role_without_a_component_or_with_several_is_an_error() -> None:
    with pytest.raises(SubComponentNotFoundError):
        graph({"w": {"type": "worker"}}).component_of("prefill")
    with pytest.raises(DuplicateSubComponentError):
        graph({"a": {"type": "worker"}, "b": {"type": "worker"}}).component_of("decode")


@pytest.mark.parametrize(
    ("status", "serving", "is_stable"),
    [
        (SERVING, 2, True),
        ({**SERVING, "availableReplicas": 1}, 1, False),
        ({"readyReplicas": 2, "updatedReplicas": 2}, 2, True),
        ({**SERVING, "updatedReplicas": 1}, 2, False),
        ({}, 0, False),
    ],
)
def test_available_replicas_serve_and_equal_numbers_are_stable(
    status: dict[str, int], serving: int, is_stable: bool
) -> None:
    replicas = graph(WORKER, {"w": status}).replicas("w")
    assert (replicas.desired, replicas.serving, replicas.is_stable) == (2, serving, is_stable)


STARTING = {"w": {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 1, "availableReplicas": 1}}


def test_replicas_of_which_pods_are_starting_are_pending() -> None:
    assert graph(WORKER, STARTING, [pod(), pod("Pending")]).pending() == {"w": 1}


@pytest.mark.parametrize(
    ("pods", "status"),
    [
        (None, {}),
        ([], {}),
        ([pod(), pod("Failed")], {}),
        ([pod(), pod(deletionTimestamp="now")], {}),
        ([pod()], {"observedGeneration": 2}),
        ([pod()], {"rollingUpdate": {"phase": "InProgress"}}),
    ],
)
def test_replicas_are_not_pending_during_any_other_change(
    pods: list[dict[str, Any]] | None, status: dict[str, Any]
) -> None:
    assert graph(WORKER, STARTING, pods, **status).pending() == {}


def test_updated_replicas_of_a_scaling_group_are_the_available_ones() -> None:
    status = {**STARTING["w"], "componentKind": "PodCliqueScalingGroup", "updatedReplicas": 1}
    assert graph(WORKER, {"w": status}, [pod()]).pending() == {"w": 1}


def test_non_worker_component_is_never_pending() -> None:
    components = {"f": {"type": "frontend", "replicas": 2}}
    assert graph(components, {"f": STARTING["w"]}, [pod()]).pending() == {}


def test_pods_that_capture_a_checkpoint_are_not_counted() -> None:
    capturing = pod("Failed", labels={"nvidia.com/snapshot-job-uid": "u"})
    assert graph(WORKER, STARTING, [pod(), capturing]).pending() == {"w": 1}


def test_graph_is_settled_without_pending_changes() -> None:
    assert graph(WORKER, {"w": SERVING}, [pod()]).is_settled
    assert not graph(WORKER, STARTING, [pod()]).is_settled
    assert not graph(WORKER, {"w": SERVING}, [pod(deletionTimestamp="now")]).is_settled
    assert not graph(WORKER, {"w": SERVING}, conditions=[]).is_settled
    assert not graph(WORKER, {"w": SERVING}, observedGeneration=2).is_settled
    assert not graph(WORKER, {"w": SERVING}, rollingUpdate={"phase": "Failed"}).is_settled
    planner = {**WORKER, "p": {"type": "planner", "replicas": 1}}
    assert graph(planner, {"w": SERVING}).is_settled


def test_rollout_is_the_phase_of_the_status() -> None:
    assert graph(WORKER).rollout is RolloutPhase.NONE
    assert graph(WORKER, rollingUpdate={"phase": "InProgress"}).rollout is RolloutPhase.IN_PROGRESS


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"runtimeNamespace": "ns-new"}, "ns-new"),
        ({"componentKind": "Deployment"}, "ns-12345678"),
        ({"componentKind": "PodClique"}, "ns"),
        ({}, "ns"),
    ],
)
def test_worker_namespace_is_that_of_the_present_generation(status: dict[str, Any], expected: str) -> None:
    found = graph(WORKER, {"w": status})
    found.value["metadata"]["annotations"] = {"nvidia.com/current-worker-hash-v2": "12345678"}
    assert found.worker_namespace("ns") == expected


def test_gpus_and_watts_are_those_of_an_observed_status() -> None:
    status = {"w": {"gpusPerEngine": 4, "gpusPerReplica": 8, "gpuPowerLimitWatts": 300}}
    assert graph(WORKER, status).gpus("w") == (4, 8)
    assert graph(WORKER, status).watts("w") == 2400
    assert graph(WORKER, status, observedGeneration=1).watts("w") is None
    assert graph(WORKER).gpus("w") == (None, None)


def test_patch_fails_if_the_components_were_reordered() -> None:
    found = graph({"f": {"type": "frontend"}, **WORKER})
    assert replicas_patch(found, "w", 5) == [
        {"op": "test", "path": "/spec/components/1/name", "value": "w"},
        {"op": "add", "path": "/spec/components/1/replicas", "value": 5},
    ]
    assert adapter_name("g", "VllmWorker") == "g-vllmworker"
