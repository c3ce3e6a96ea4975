"""Checkpoints that a graph makes for its components: which, with what job, and what the components refer to."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import NO_GROVE, SETTINGS
from tests.unit.operator.reconcile.test_checkpoints import IDENTITY, checkpoint

from dynamo.operator.reconcile.automatic_checkpoints import DELETION_POLICY, AutomaticCheckpoints, automatic_checkpoints
from dynamo.operator.reconcile.checkpoints import CHECKPOINT_ID, checkpoint_plan, job_name
from dynamo.operator.reconcile.graph import context_of_graph, graph_plan
from dynamo.operator.reconcile.graph_pass import ObservedGraph
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import SELECTOR
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.models import DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

NOW = "2026-01-01T00:00:00Z"
ID = "d6f39e0721d8f8be9a0a72b6ea0f1c71"
"""Of the graph below without workers, computed with upstream's rule: the SHA-256 digest of its fields as JSON."""


def graph(kind: str = "decode", image: str = "i", **wanted: Any) -> DynamoGraphDeployment:
    main = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", "m"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    helper = {"name": "helper", "image": "h"}
    worker = {
        "name": "decode",
        "type": kind,
        "podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [main, helper]}},
        "experimental": {"checkpoint": {"enabled": True, **wanted}},
    }
    metadata = {"name": "chat", "namespace": "space", "uid": "u1"}
    spec = {"components": [worker], "env": [{"name": "HF_HOME", "value": "/models"}]}
    return decode(DynamoGraphDeployment, {"metadata": metadata, "spec": spec})


def made(value: DynamoGraphDeployment, *known: DynamoCheckpoint) -> AutomaticCheckpoints:
    return automatic_checkpoints(value, context_of_graph(value, SETTINGS, "space"), known)


def reference(found: AutomaticCheckpoints) -> str | None:
    (component,) = found.graph.spec.components or []
    assert component.experimental is not None and component.experimental.checkpoint is not None
    return component.experimental.checkpoint.checkpoint_ref


def test_checkpoint_runs_the_container_of_the_component_alone() -> None:
    found = made(graph())
    (value,) = found.owned
    name = value["metadata"]["name"]
    assert reference(found) == name
    assert value["spec"]["identity"]["model"] == "space/chat"
    assert value["spec"]["identity"]["backendFramework"] == "vllm"
    template = value["spec"]["job"]["podTemplateSpec"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert SELECTOR not in template["metadata"]["labels"]
    assert template["spec"]["restartPolicy"] == "Never"
    (main,) = template["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in main["env"]}
    assert (env["HF_HOME"], env["DYN_NAMESPACE"], main["args"]) == ("/models", "space-chat", ["--model", "m"])
    stored = decode(DynamoCheckpoint, value)
    (job,) = checkpoint_plan(stored, None, [], NOW).apply
    identifier = value["metadata"]["labels"][CHECKPOINT_ID]
    assert (name, job["metadata"]["name"]) == (f"checkpoint-{identifier}", f"checkpoint-job-{identifier}-1")
    assert job_name(stored) == job["metadata"]["name"]


def test_existing_checkpoint_is_not_made_again_and_another_generation_has_its_own() -> None:
    (value,) = made(graph()).owned
    again = made(graph(), decode(DynamoCheckpoint, value))
    assert (again.owned, reference(again)) == ([], value["metadata"]["name"])
    (other,) = made(graph(image="i:2"), decode(DynamoCheckpoint, value)).owned
    assert other["metadata"]["name"] != value["metadata"]["name"]


def test_identity_of_a_component_that_is_no_worker_has_no_generation() -> None:
    with pytest.raises(WorkloadError, match=r"set spec\.backendFramework"):
        made(graph("frontend"))
    (value,) = made(graph("frontend", identity={"model": "m", "backendFramework": "vllm"})).owned
    assert value["metadata"]["name"] == f"checkpoint-{ID}"


def test_checkpoint_that_is_retained_has_no_owner() -> None:
    found = made(graph(deletionPolicy="Retain"))
    assert found.owned == []
    assert found.retained[0]["metadata"]["annotations"][DELETION_POLICY] == "Retain"


@pytest.mark.parametrize("wanted", [{"checkpointRef": "weights"}, {"identity": IDENTITY}, {"enabled": False}])
def test_component_that_names_a_checkpoint_or_wants_none_gets_none(wanted: KubeObject) -> None:
    found = made(graph(**wanted), checkpoint())
    assert (found.owned, found.retained, reference(found)) == ([], [], wanted.get("checkpointRef"))


def test_job_of_the_component_changes_the_pod() -> None:
    main = {
        "name": "main",
        "env": [{"name": "HF_HOME", "value": "/other"}],
        "readinessProbe": {"exec": {"command": ["a"]}},
    }
    template = {
        "metadata": {"annotations": {"note": "b"}},
        "spec": {"containers": [main, {"name": "saver", "image": "s"}], "nodeSelector": {"gpu": "yes"}},
    }
    (value,) = made(graph(job={"podTemplate": template})).owned
    found = value["spec"]["job"]["podTemplateSpec"]
    assert found["metadata"]["annotations"]["note"] == "b"
    assert found["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert [one["name"] for one in found["spec"]["containers"]] == ["main", "saver"]
    target = found["spec"]["containers"][0]
    assert target["readinessProbe"] == {"exec": {"command": ["a"]}}
    assert {one["name"]: one.get("value") for one in target["env"]}["HF_HOME"] == "/other"


def test_container_that_does_not_exist_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"decode.*targetContainerName: 'x' is not a container"):
        made(graph(targetContainerName="x"))


def test_plan_of_a_graph_creates_its_checkpoint_and_the_component_waits_for_it() -> None:
    value = graph(startupPolicy="WaitForCheckpoint")
    plan = graph_plan(value, ObservedGraph(), SETTINGS, NO_GROVE, NOW)
    (created,) = [one for one in plan.create if one["kind"] == "DynamoCheckpoint"]
    (component,) = [one for one in plan.apply if one["kind"] == "DynamoComponentDeployment"]
    wanted = component["spec"]["experimental"]["checkpoint"]
    assert wanted["checkpointRef"] == created["metadata"]["name"]
    assert "job" not in wanted
    assert plan.status is not None
    assert plan.status["checkpoints"]["decode"]["checkpointName"] == created["metadata"]["name"]
