"""Scaling adapters: replicas of the component, status for autoscalers, missing graphs and components."""

from typing import Any

from dynamo.operator.reconcile.adapters import RETRY_S, adapter_plan
from dynamo.operator.reconcile.plan import Plan
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment, DynamoGraphDeploymentScalingAdapter

NOW = "2026-01-01T00:00:00Z"


def graph(replicas: int | None = 2, reported: int | None = None) -> DynamoGraphDeployment:
    component: dict[str, Any] = {"name": "decode"} | ({} if replicas is None else {"replicas": replicas})
    value: dict[str, Any] = {
        "metadata": {"name": "chat", "namespace": "space"},
        "spec": {"components": [{"name": "Frontend"}, component]},
    }
    if reported is not None:
        value["status"] = {"components": {"decode": {"replicas": reported}}}
    return decode(DynamoGraphDeployment, value)


def plan(target: DynamoGraphDeployment | None, replicas: int = 5, component: str = "decode", **status: Any) -> Plan:
    value = {
        "metadata": {"name": "chat-decode", "namespace": "space"},
        "spec": {"replicas": replicas, "dgdRef": {"name": "chat", "componentName": component}},
        "status": status,
    }
    return adapter_plan(decode(DynamoGraphDeploymentScalingAdapter, value), target, NOW)


def test_replicas_of_the_adapter_become_those_of_the_component() -> None:
    found = plan(graph())
    assert [(patch.ref.kind, patch.ref.name, patch.value) for patch in found.patch] == [
        (
            "DynamoGraphDeployment",
            "chat",
            [
                {"op": "test", "path": "/spec/components/1/name", "value": "decode"},
                {"op": "add", "path": "/spec/components/1/replicas", "value": 5},
            ],
        )
    ]
    assert found.status is not None and found.status["lastScaleTime"] == NOW
    assert [event.message for event in found.events] == ["component decode of chat: 2 to 5 replicas"]


def test_component_without_replicas_defaults_to_one() -> None:
    assert plan(graph(None), replicas=1).patch == ()
    assert len(plan(graph(None), replicas=2).patch) == 1


def test_equal_replicas_produce_no_patch_and_keep_the_last_scale_time() -> None:
    found = plan(graph(5, reported=3), lastScaleTime="before")
    assert (found.patch, found.events) == ((), ())
    assert found.status == {
        "replicas": 3,
        "selector": "nvidia.com/dynamo-graph-deployment-name=chat,nvidia.com/dynamo-component=decode",
        "lastScaleTime": "before",
    }


def test_missing_graph_or_component_is_an_event_and_retried() -> None:
    for found, reason in ((plan(None), "GraphNotFound"), (plan(graph(), component="x"), "ComponentNotFound")):
        assert [event.reason for event in found.events] == [reason]
        assert (found.status, found.patch, found.requeue_s) == (None, (), RETRY_S)
