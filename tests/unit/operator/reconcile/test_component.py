"""Components: Deployment, Service, update strategy, readiness and status."""

from typing import Any

import pytest

from dynamo.operator.reconcile.component import (
    component_objects,
    component_plan,
    gpus,
    is_ready,
    runtime_namespace,
    workload_name,
)
from dynamo.operator.reconcile.names import COMPONENT, GRAPH, NAMESPACE, WORKER_HASH, OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import Multinode, ObjectMeta, decode
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentDeploymentSpec,
    ComponentDeploymentStatus,
    DynamoComponentDeployment,
)

FACTS = ClusterFacts(has_lws=True)
NOW = "2026-01-01T00:00:00Z"
LATER = "2026-01-01T00:01:00Z"
LABELS = {GRAPH: "chat", COMPONENT: "decode", NAMESPACE: "space-chat", WORKER_HASH: "0123abcd"}


def deployed(labels: dict[str, str] = LABELS, annotations: dict[str, str] | None = None, **spec: Any) -> Any:
    return DynamoComponentDeployment(
        metadata=ObjectMeta(
            name="chat-decode-0123abcd",
            namespace="space",
            labels=labels,
            annotations=annotations or {},
            generation=3,
        ),
        spec=ComponentDeploymentSpec(**({"type": "decode", "replicas": 2} | spec)),
    )


def workload(**status: Any) -> dict[str, Any]:
    reported = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2} | {
        "availableReplicas": 2,
        "conditions": [{"type": "Available", "status": "True"}],
    }
    return {
        "metadata": {"name": "chat-decode-0123abcd", "generation": 1},
        "spec": {"replicas": 2},
        "status": reported | status,
    }


def test_component_has_a_deployment_and_a_service_with_its_name() -> None:
    made, service = component_objects(deployed(), OperatorSettings(), FACTS)
    assert (made["kind"], service["kind"]) == ("Deployment", "Service")
    assert made["metadata"]["name"] == service["metadata"]["name"] == "chat-decode-0123abcd"
    assert service["spec"]["selector"] == made["spec"]["selector"]["matchLabels"]
    assert made["spec"]["selector"]["matchLabels"].items() <= made["spec"]["template"]["metadata"]["labels"].items()


def test_component_without_a_graph_has_its_own_runtime_namespace() -> None:
    made, _ = component_objects(deployed(labels={}), OperatorSettings(), FACTS)
    env = {one["name"]: one.get("value") for one in made["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["DYN_NAMESPACE"] == "space-chat-decode-0123abcd"
    assert "DYN_NAMESPACE_WORKER_SUFFIX" not in env


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}),
        (
            {
                "nvidia.com/deployment-rolling-update-max-surge": "2",
                "nvidia.com/deployment-rolling-update-max-unavailable": "0",
            },
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}},
        ),
        ({"nvidia.com/deployment-strategy": "Recreate"}, {"type": "Recreate"}),
    ],
)
def test_update_strategy_is_read_from_annotations(annotations: dict[str, str], expected: dict[str, Any]) -> None:
    made, _ = component_objects(deployed(annotations=annotations), OperatorSettings(), FACTS)
    assert made["spec"]["strategy"] == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"observedGeneration": 0}, False),
        ({"updatedReplicas": 1}, False),
        ({"availableReplicas": 1}, False),
        ({"replicas": 3}, False),
        ({"conditions": []}, False),
    ],
)
def test_deployment_is_ready_only_when_all_pods_are_current(changed: dict[str, Any], expected: bool) -> None:
    assert is_ready(workload(**changed)) is expected


def test_empty_deployment_is_ready_and_a_missing_or_paused_one_is_not() -> None:
    empty = workload(availableReplicas=0)
    empty["spec"]["replicas"] = 0
    assert is_ready(empty)
    assert not is_ready(None)
    paused = workload()
    paused["spec"]["paused"] = True
    assert not is_ready(paused)


def test_component_status_has_replicas_namespace_gpus_and_power_limit() -> None:
    template = {
        "metadata": {"annotations": {"dynamo.nvidia.com/gpu-power-limit": "400"}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]},
    }
    status = component_plan(deployed(pod_template=template), workload(), OperatorSettings(), FACTS, NOW).status
    assert status is not None
    assert status["component"] == {
        "componentKind": "Deployment",
        "componentNames": ["chat-decode-0123abcd"],
        "replicas": 2,
        "updatedReplicas": 2,
        "readyReplicas": 2,
        "availableReplicas": 2,
        "runtimeNamespace": "space-chat-0123abcd",
        "runtimeComponentName": "decode",
        "gpusPerEngine": 4,
        "gpusPerReplica": 4,
        "gpuPowerLimitWatts": 400,
    }
    assert [(one["type"], one["status"]) for one in status["conditions"]] == [
        ("Available", "True"),
        ("DynamoComponentReady", "True"),
    ]
    assert status["observedGeneration"] == 3


def test_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    first = component_plan(deployed(), workload(), OperatorSettings(), FACTS, NOW).status
    assert first is not None
    again = deployed()
    again.status = decode(ComponentDeploymentStatus, first)
    second = component_plan(again, workload(), OperatorSettings(), FACTS, LATER).status
    assert second == first
    changed = component_plan(again, workload(availableReplicas=0), OperatorSettings(), FACTS, LATER).status
    assert changed is not None
    assert {one["lastTransitionTime"] for one in changed["conditions"]} == {LATER}


COMMAND = ["python3", "-m", "dynamo.vllm", "--model", "m", "--tensor-parallel-size", "8"]


def of_several_nodes() -> Any:
    main = {"name": "main", "command": COMMAND, "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    return deployed(multinode=Multinode(2), pod_template={"spec": {"containers": [main]}})


def test_multinode_component_has_a_leader_worker_set() -> None:
    plan = component_plan(of_several_nodes(), None, OperatorSettings(), FACTS, NOW)
    assert [one["kind"] for one in plan.apply] == ["LeaderWorkerSet", "Service"]
    assert plan.apply[0]["metadata"]["name"] == workload_name(of_several_nodes())[1] == "chat-decode-0123abcd-0"
    assert plan.status is not None
    assert plan.status["conditions"][0]["reason"] == "LeaderWorkerSetNotReady"


def test_leader_worker_set_status_counts_groups_and_all_gpus() -> None:
    status = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2} | {
        "conditions": [{"type": "Available", "status": "True"}]
    }
    observed = {"metadata": {"name": "x"}, "spec": {"replicas": 2}, "status": status}
    plan = component_plan(of_several_nodes(), observed, OperatorSettings(), FACTS, NOW)
    assert plan.status is not None
    assert plan.status["conditions"][0]["status"] == "True"
    found = plan.status["component"]
    assert (found["componentKind"], found["readyReplicas"], found["availableReplicas"]) == ("LeaderWorkerSet", 2, 2)
    assert (found["gpusPerReplica"], found["runtimeNamespace"]) == (8, "space-chat-0123abcd")


def test_multinode_component_without_cluster_support_has_a_condition_and_an_event() -> None:
    plan = component_plan(of_several_nodes(), None, OperatorSettings(), ClusterFacts(), NOW)
    assert plan.apply == ()
    assert plan.status is not None
    assert plan.status["conditions"][0]["reason"] == "CannotRender"
    assert "spec.multinode: requires LeaderWorkerSet" in plan.status["conditions"][0]["message"]
    assert [event.reason for event in plan.events] == ["CannotRender"]


def test_gpus_are_the_limit_or_request_of_the_main_container() -> None:
    assert gpus(None) == 0
    assert gpus({"spec": {"containers": [{"name": "other", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}}) == 0
    assert gpus({"spec": {"containers": [{"name": "main", "resources": {"requests": {"nvidia.com/gpu": 2}}}]}}) == 2


def test_workers_register_in_the_namespace_of_their_generation() -> None:
    assert runtime_namespace(deployed()) == "space-chat-0123abcd"
    assert runtime_namespace(deployed(labels={GRAPH: "chat"})) == "space-chat"
