"""Components that start from checkpoints: which one, what their pods become, and what is shown of it."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import NO_GROVE, SETTINGS
from tests.unit.operator.reconcile.test_checkpoints import IDENTITY, checkpoint

from dynamo.operator.reconcile.checkpoints import ARTIFACT_VERSION, CHECKPOINT_ID, identity_hash
from dynamo.operator.reconcile.component import component_plan
from dynamo.operator.reconcile.names import SnapshotStorage
from dynamo.operator.reconcile.plan import Plan
from dynamo.operator.reconcile.restores import (
    IS_TARGET,
    checkpoint_statuses,
    restore_notes,
    restores_of,
    starts_from_checkpoint,
    startup_probe,
    storage_of,
)
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.models import CheckpointStatus, DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoComponentDeployment

STORAGE = SnapshotStorage("snapshots", "/checkpoints")
NOW = "2026-01-01T00:00:00Z"


def component(**wanted: Any) -> ComponentSpec:
    containers = [{"name": "main", "image": "i", "args": ["a"], "readinessProbe": {"httpGet": {"path": "/health"}}}]
    value = {
        "name": "decode",
        "type": "worker",
        "replicas": 2,
        "podTemplate": {"spec": {"containers": containers}},
        "experimental": {"checkpoint": {"enabled": True, **wanted}},
    }
    return decode(ComponentSpec, value)


def stored(phase: str | None, **given: Any) -> DynamoCheckpoint:
    made = checkpoint(**given)
    made.status = None if phase is None else decode(CheckpointStatus, {"phase": phase})
    return made


def planned(wanted: ComponentSpec, *checkpoints: DynamoCheckpoint) -> Plan:
    """Return the plan of a component alone."""
    restores = restores_of([wanted], checkpoints, STORAGE)
    value = {"metadata": {"name": "d", "namespace": "space"}, "spec": wanted}
    deployed = decode(DynamoComponentDeployment, {"metadata": value["metadata"], "spec": {}})
    for field in ("name", "type", "replicas", "pod_template", "experimental"):
        setattr(deployed.spec, field, getattr(wanted, field))
    return component_plan(deployed, None, SETTINGS, NO_GROVE, NOW, restores.get("decode"))


def workload(plan: Plan) -> KubeObject:
    return next(one for one in plan.apply if one["kind"] == "Deployment")


def test_pods_of_a_ready_checkpoint_are_restore_targets() -> None:
    made = workload(planned(component(checkpointRef="c"), stored("Ready")))
    template = made["spec"]["template"]
    digest = identity_hash(checkpoint().spec.identity)
    assert made["spec"]["replicas"] == 2
    assert template["metadata"]["labels"] | {IS_TARGET: "true", CHECKPOINT_ID: digest} == template["metadata"]["labels"]
    assert template["metadata"]["annotations"][ARTIFACT_VERSION] == "1"
    (main,) = template["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in main["env"]}
    assert (env["DYN_SNAPSHOT_CONTROL_DIR"], env["SNAPSHOT_RESTORE_STANDBY"]) == ("/snapshot-control", "1")
    mounts = {one["name"]: one for one in main["volumeMounts"]}
    assert mounts["snapshot-control"]["subPath"] == "main"
    assert mounts["checkpoint-storage"]["mountPath"] == "/checkpoints"
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    assert volumes["checkpoint-storage"]["persistentVolumeClaim"] == {"claimName": "snapshots"}
    assert volumes["snapshot-control"] == {"name": "snapshot-control", "emptyDir": {}}
    assert template["spec"]["securityContext"]["seccompProfile"]["type"] == "Localhost"
    assert main["startupProbe"]["failureThreshold"] == 2**31 - 1


@pytest.mark.parametrize("phase", ["Pending", "Creating", "Failed", None])
def test_pods_start_without_a_checkpoint_that_is_not_ready(phase: str | None) -> None:
    made = workload(planned(component(checkpointRef="c"), stored(phase)))
    assert made == workload(planned(component(checkpointRef="c")))
    assert made["spec"]["replicas"] == 2
    assert IS_TARGET not in made["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(
    ("checkpoints", "replicas", "reason"),
    [
        ([], 0, "DynamoCheckpoint c does not exist"),
        ([stored("Creating")], 0, "DynamoCheckpoint c is not ready"),
        ([stored("Failed")], 2, "Deployment is not ready"),
        ([stored("Ready")], 2, "Deployment is not ready"),
    ],
)
def test_component_that_waits_has_no_pods_until_its_checkpoint_is_decided(
    checkpoints: list[DynamoCheckpoint], replicas: int, reason: str
) -> None:
    plan = planned(component(checkpointRef="c", startupPolicy="WaitForCheckpoint"), *checkpoints)
    assert workload(plan)["spec"]["replicas"] == replicas
    assert plan.status is not None
    available = next(one for one in plan.status["conditions"] if one["type"] == "Available")
    assert (available["status"], available["message"]) == ("False", reason)


def test_checkpoint_is_found_by_identity_and_the_oldest_is_chosen() -> None:
    same = [stored("Ready", name="b", created="2"), stored("Creating", name="a", created="1")]
    other = stored("Ready", identity={"model": "other"}, name="o")
    found = restores_of([component(identity=IDENTITY)], [other, *same], None)
    assert (found["decode"].name, found["decode"].state) == ("a", "Waiting")
    absent = restores_of([component(identity=IDENTITY)], [other], None)["decode"]
    assert absent.text == f"a DynamoCheckpoint of identity {identity_hash(checkpoint().spec.identity)} does not exist"


def test_components_without_a_checkpoint_or_of_several_nodes_have_none() -> None:
    several = component(checkpointRef="c")
    several.multinode = decode(ComponentSpec, {"name": "a", "multinode": {"nodeCount": 2}}).multinode
    off = component(checkpointRef="c")
    assert off.experimental is not None
    assert off.experimental.checkpoint is not None
    off.experimental.checkpoint.enabled = False
    assert restores_of([several, off, component()], [stored("Ready")], None) == {}


def test_target_container_must_exist() -> None:
    plan = planned(component(checkpointRef="c", targetContainerName="engine"), stored("Ready"))
    assert not plan.apply
    assert "targetContainerName: 'engine' is not a container" in plan.events[0].message


def test_storage_is_that_of_the_snapshot_agent() -> None:
    def agent(**volume: Any) -> KubeObject:
        container = {"name": "agent", "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints/"}]}
        spec = {"containers": [container], "volumes": [{"name": "checkpoints", **volume}]}
        return {"spec": {"template": {"spec": spec}}}

    assert storage_of([agent(hostPath={}), agent(persistentVolumeClaim={"claimName": "snapshots"})]) == STORAGE
    assert storage_of([agent(hostPath={})]) is None


def test_own_probe_is_kept_without_an_end() -> None:
    given = {"startupProbe": {"httpGet": {"path": "/live"}, "initialDelaySeconds": 60, "failureThreshold": 3}}
    probe = startup_probe(given)
    assert (probe["httpGet"], "initialDelaySeconds" in probe) == ({"path": "/live"}, False)
    assert startup_probe({})["exec"]["command"] == ["cat", "/snapshot-control/restore-complete"]


def test_states_are_shown_once() -> None:
    wanted = [component(checkpointRef="c")]
    absent, ready = restores_of(wanted, [], None), restores_of(wanted, [stored("Ready")], None)
    assert [(one.type, one.message) for one in restore_notes(absent, None)] == [
        ("Warning", "decode: DynamoCheckpoint c does not exist; pods start without it")
    ]
    assert restore_notes(absent, checkpoint_statuses(absent)) == []
    (note,) = restore_notes(ready, checkpoint_statuses(absent))
    assert note.message == "decode: DynamoCheckpoint c is ready; pods are restored from it"
    assert checkpoint_statuses({}) is None


def test_objects_with_checkpoints_are_recognized() -> None:
    experimental = {"experimental": {"checkpoint": {"enabled": True}}}
    assert starts_from_checkpoint({"spec": experimental})
    assert starts_from_checkpoint({"spec": {"components": [{}, experimental]}})
    assert not starts_from_checkpoint({"spec": {"components": [{}]}})
