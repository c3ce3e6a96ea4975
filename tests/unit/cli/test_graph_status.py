"""Status rows of a graph: ready and desired replicas, phase, last event and the reason."""

from typing import Any

import pytest

from dynamo.cli.graph_status import COMPONENT_LABEL, pod_reason, rows_of

Object = dict[str, Any]


def graph(components: Object, conditions: list[Object] | None = None) -> Object:
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "metadata": {"name": "g"},
        "spec": {"components": [{"name": "Frontend", "replicas": 1}, {"name": "decode", "replicas": 2}]},
        "status": {"components": components, "conditions": conditions or []},
    }


def pod(name: str, component: str, **status: Any) -> Object:
    return {"metadata": {"name": name, "labels": {COMPONENT_LABEL: component}}, "status": status}


def event(name: str, kind: str, message: str, at: str) -> Object:
    involved = {"name": name, "kind": kind}
    return {"involvedObject": involved, "reason": "R", "message": message, "lastTimestamp": at}


WAITING = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}, "name": "main"}


def test_rows_show_why_a_component_is_not_ready() -> None:
    pods = [pod("p", "decode", phase="Pending", containerStatuses=[WAITING])]
    events = [event("p", "Pod", "old", "2026-01-01"), event("p", "Pod", "new", "2026-01-02")]
    front, decode = rows_of(graph({"Frontend": {"readyReplicas": 1}, "decode": {"readyReplicas": 0}}), pods, events)
    assert front.cells == ("Frontend", "1/1", "Ready", "-", "-")
    assert decode.cells == ("decode", "0/2", "Pending", "R: new", "p: main ImagePullBackOff: no image")


def test_component_without_pods_shows_the_condition_of_the_graph() -> None:
    failed = {"type": "Ready", "status": "False", "reason": "NoLWS", "message": "not installed"}
    rows = rows_of(graph({}, [failed]), [], [event("g", "DynamoGraphDeployment", "decode waits", "2026")])
    assert rows[1].cells == ("decode", "0/2", "NoPods", "R: decode waits", "NoLWS: not installed")
    assert rows[0].event == ""


def test_ready_pods_are_counted_before_the_operator_reports() -> None:
    ready = {"type": "Ready", "status": "True"}
    rows = rows_of(graph({}), [pod("p", "Frontend", conditions=[ready])], [])
    assert [(row.ready, row.phase) for row in rows] == [(1, "Ready"), (0, "NoPods")]


def test_replicas_of_several_nodes_are_counted_as_groups_before_the_operator_reports() -> None:
    value, ready = graph({}), {"type": "Ready", "status": "True"}
    value["spec"]["components"][1]["multinode"] = {"nodeCount": 2}
    pods = [pod(f"p{index}", "decode", conditions=[ready]) for index in range(3)]
    assert rows_of(value, pods, [])[1].ready == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]}, "Unschedulable: no GPU"),
        ({"containerStatuses": [{"name": "main", "state": {"terminated": {"reason": "OOMKilled"}}}]}, "main OOMKilled"),
        ({"conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]}, "ContainersNotReady"),
        ({}, ""),
    ],
)  # fmt: skip
def test_reason_of_a_pod(status: Object, reason: str) -> None:
    assert pod_reason({"status": status}) == reason


def test_groups_of_grove_count_their_available_replicas() -> None:
    group = {"componentKind": "PodCliqueScalingGroup", "availableReplicas": 2}
    rows = rows_of(graph({"Frontend": {"readyReplicas": 1}, "decode": group}), [], [])
    assert rows[1].cells[:3] == ("decode", "2/2", "Ready")
