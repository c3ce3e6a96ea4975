"""Phases of requests: the complete sequence, its faults, and convergence from every state between two writes."""

import copy
from typing import Any

import pytest
import yaml
from tests.unit.operator.reconcile.requests.requests_world import (
    GRAPH,
    HARDWARE,
    RESULT,
    UID,
    RequestWorld,
    request_object,
)

from dynamo.operator.reconcile.requests.phases import GENERATED_SPEC
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

JOB, OUTPUT, DEPLOYED = (
    ("Job", "profile-chat"),
    ("ConfigMap", "dgdr-output-chat"),
    ("DynamoGraphDeployment", "chat-dgd"),
)


def profiled(world: RequestWorld) -> RequestWorld:
    """Reconcile a cluster to the end of its job."""
    world.reconcile()
    world.publish("Done", "done", final_config=RESULT)
    world.end_job()
    return world


def test_request_is_profiled_deployed_and_monitored() -> None:
    world = RequestWorld()
    world.reconcile()
    assert (world.phase, world.status["profilingPhase"], world.status["profilingJobName"]) == (
        "Profiling",
        "Initializing",
        "profile-chat",
    )
    assert {kind for kind, _ in world.objects} == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    world.publish("SweepingDecode", "2 of 5")
    world.reconcile()
    assert (world.status["profilingPhase"], world.condition("Profiling")) == (
        "SweepingDecode",
        ("False", "SweepingDecode"),
    )
    world.publish("Done", "done", final_config=RESULT)
    world.end_job()
    world.reconcile()
    assert (world.phase, world.status["dgdName"], world.condition("Profiling")) == (
        "Deploying",
        "chat-dgd",
        ("True", "ProfilingCompleted"),
    )
    assert "profilingPhase" not in world.status
    world.reconcile()
    assert world.condition("DeploymentReady") == ("False", "DeploymentInProgress")
    world.advance()
    world.reconcile()
    assert (world.phase, world.condition("Succeeded")) == ("Deployed", ("True", "Deployed"))
    assert world.status["deploymentInfo"] == {"replicas": 3, "availableReplicas": 3}
    assert world.events == [
        "Initialized", "ProfilingJobCreated", "SpecGenerated", "DeploymentCreated", "DeploymentReady",
    ]  # fmt: skip


def test_generated_graph_has_tracking_labels_no_owner_and_its_config_maps() -> None:
    world = profiled(RequestWorld())
    world.reconcile()
    labels = {
        "dgdr.nvidia.com/name": "chat",
        "dgdr.nvidia.com/namespace": "space",
        "nvidia.com/managed-by": "dynamo-operator",
    }
    assert world.objects[DEPLOYED]["metadata"] == {"name": "chat-dgd", "namespace": "space", "labels": labels}
    assert world.objects["ConfigMap", "planner-config-1a2b"]["metadata"]["labels"] == labels


def test_graph_is_generated_but_not_deployed_without_auto_apply() -> None:
    world = profiled(RequestWorld(request_object({"autoApply": False})))
    world.settle()
    assert (world.phase, world.condition("Succeeded")) == ("Ready", ("True", "SpecGenerated"))
    assert DEPLOYED not in world.objects and ("ConfigMap", "planner-config-1a2b") in world.objects
    kept = yaml.safe_load(world.request["metadata"]["annotations"][GENERATED_SPEC])
    assert kept == world.status["profilingResults"]["selectedConfig"]


def test_v1alpha1_request_with_targets_in_its_configuration_is_deployed() -> None:
    sla = {"isl": 3000, "osl": 150, "ttft": 200, "itl": 20}
    value = request_object()
    value |= {
        "apiVersion": V1ALPHA1,
        "spec": {
            "model": "Qwen/Qwen3-32B",
            "backend": "vllm",
            "profilingConfig": {"profilerImage": "planner:1", "config": {"sla": sla}, "outputPVC": "results"},
            "deploymentOverrides": {"name": "mine", "labels": {"team": "a"}},
            "autoApply": True,
        },
    }
    world = RequestWorld(value)
    gpus = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "143771"}
    world.nodes = [{"metadata": {"labels": gpus}}]
    world.settle()
    assert (world.phase, world.status["dgdName"]) == ("Deployed", "mine")
    assert world.objects["DynamoGraphDeployment", "mine"]["metadata"]["labels"]["team"] == "a"
    pod = world.objects[JOB]["spec"]["template"]["spec"]
    config = yaml.safe_load(pod["containers"][0]["args"][1])
    assert (config["sla"], config["workload"]) == ({"ttft": 200, "itl": 20}, {"isl": 3000, "osl": 150})
    assert (config["hardware"]["gpuSku"], config["hardware"]["totalGpus"]) == ("h200_sxm", 8)
    assert pod["volumes"][0] == {"name": "profiling-output", "persistentVolumeClaim": {"claimName": "results"}}


@pytest.mark.parametrize(
    ("spec", "condition", "reason", "text"),
    [
        ({"hardware": {}}, "Validation", "ValidationFailed", "set spec.hardware.gpuSku"),
        ({"searchStrategy": "thorough"}, "Validation", "ValidationFailed", "spec.backend: auto"),
        (
            {"modelCache": {"pvcName": "none"}},
            "Validation",
            "ValidationFailed",
            "spec.modelCache.pvcName: claim 'none'",
        ),
        ({"image": ""}, "Profiling", "JobCreationFailed", "spec.image: is required"),
    ],
)
def test_request_that_cannot_be_profiled_fails_with_the_field_name(
    spec: dict[str, Any], condition: str, reason: str, text: str
) -> None:
    world = RequestWorld(request_object(spec))
    world.has_model_cache = False
    world.settle()
    assert (world.phase, world.condition(condition), world.objects) == ("Failed", ("False", reason), {})
    assert any(text in one["message"] for one in world.status["conditions"])


def test_failed_job_reports_its_phase_and_cause() -> None:
    world = RequestWorld()
    world.reconcile()
    ended = {
        "name": "profiler",
        "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "out of memory"}},
    }
    world.pods = [{"metadata": {"name": "p"}, "status": {"containerStatuses": [ended]}}]
    world.publish("SweepingPrefill")
    world.end_job("Failed", "BackoffLimitExceeded")
    world.settle()
    assert (world.phase, world.status["profilingPhase"]) == ("Failed", "SweepingPrefill")
    assert world.condition("Profiling") == world.condition("Succeeded") == ("False", "SweepingPrefillFailed")
    assert "exit code 1, Error, out of memory" in next(
        one["message"] for one in world.status["conditions"] if one["type"] == "Profiling"
    )
    assert world.events[-1] == "ProfilingJobFailed"


@pytest.mark.parametrize(
    "text", ["null", "kind: ConfigMap\nmetadata: {name: a}", "a: [", "kind: DynamoGraphDeployment"]
)
def test_result_without_a_graph_fails_the_request(text: str) -> None:
    world = RequestWorld()
    world.reconcile()
    world.publish("Done", final_config=text)
    world.end_job()
    world.settle()
    assert (world.phase, world.condition("SpecGenerated")) == ("Failed", ("False", "GenerationFailed"))


def test_missing_result_fails_the_request_after_a_timeout() -> None:
    world = RequestWorld()
    world.reconcile()
    world.end_job()
    assert world.plan().requeue_s is not None
    world.reconcile()
    assert world.phase == "Profiling"
    world.time += 120
    world.reconcile()
    assert (world.phase, world.condition("SpecGenerated")) == ("Failed", ("False", "GenerationFailed"))


def test_image_pull_failure_is_reported_once() -> None:
    world = RequestWorld()
    world.reconcile()
    waiting = {"name": "profiler", "image": "planner:1", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    world.pods = [{"metadata": {"name": "p"}, "status": {"containerStatuses": [waiting]}}]
    world.reconcile()
    world.reconcile()
    assert (world.phase, world.condition("Profiling")) == ("Profiling", ("False", "ImagePullFailed"))
    assert world.events.count("ImagePullFailed") == 1


def test_job_deleted_before_its_end_is_recreated() -> None:
    world = RequestWorld()
    world.reconcile()
    del world.objects[JOB]
    world.settle()
    assert world.phase == "Deployed"


def test_output_and_job_of_an_earlier_request_of_the_same_name_are_not_used() -> None:
    world = profiled(RequestWorld())
    old = {name: world.objects[name] for name in (JOB, OUTPUT)}
    world = RequestWorld(request_object(uid="uid-2"))
    world.objects |= old
    plan = world.plan()
    assert [one["kind"] for one in plan.apply] == ["Job"]
    assert plan.status is not None and plan.status["phase"] == "Profiling"


def test_changed_specification_is_rejected_once_and_the_original_is_deployed() -> None:
    world = RequestWorld()
    world.reconcile()
    world.request["spec"] = {**world.request["spec"], "autoApply": False, "model": "other"}
    world.request["metadata"]["generation"] = 2
    world.settle()
    assert (world.phase, world.status["observedGeneration"]) == ("Deployed", 1)
    assert world.events.count("SpecChangeRejected") == 1
    assert world.condition("Validation") == ("False", "SpecChangeRejected")


def test_degraded_graphs_recover_and_deleted_graphs_fail_the_request() -> None:
    world = RequestWorld()
    world.settle()
    world.objects[DEPLOYED]["status"]["state"] = "pending"
    world.reconcile()
    world.reconcile()
    assert (world.phase, world.condition("DeploymentReady")) == ("Deploying", ("False", "DeploymentDegraded"))
    world.settle()
    assert (world.phase, world.events[-2:]) == ("Deployed", ["DeploymentDegraded", "DeploymentReady"])
    del world.objects[DEPLOYED]
    world.reconcile()
    world.reconcile()
    assert (world.phase, world.condition("DeploymentReady")) == ("Failed", ("False", "DeploymentDeleted"))
    assert "dgdName" not in world.status and DEPLOYED not in world.objects
    assert world.events.count("DeploymentDeleted") == 1


@pytest.mark.parametrize("passes", range(4))
@pytest.mark.parametrize("writes", range(6))
def test_reconciliation_recovers_from_an_interruption_between_writes(passes: int, writes: int) -> None:
    world = RequestWorld()
    for _ in range(passes):
        world.reconcile()
        world.advance()
    world.reconcile(writes)
    world.settle()
    assert world.phase == "Deployed"
    assert [kind for kind, _ in world.objects].count("DynamoGraphDeployment") == 1


@pytest.mark.parametrize("passes", range(6))
def test_repeated_reconciliation_of_an_unchanged_state_writes_nothing(passes: int) -> None:
    world = RequestWorld()
    for _ in range(passes):
        world.reconcile()
        world.advance()
    world.reconcile()
    world.reconcile()  # The graph that the first pass created is observed.
    events = list(world.events)
    assert (world.reconcile(), world.events) == (0, events)


def test_existing_job_is_not_written_again() -> None:
    world = RequestWorld(request_object({"hardware": HARDWARE}))
    world.reconcile()
    world.request["status"] = {}  # The status was not written.
    plan = world.plan()
    assert (plan.create_unowned, plan.apply) == ([], [])
    assert plan.status is not None and plan.status["phase"] == "Profiling"


def test_foreign_graph_with_the_same_name_is_not_overwritten_and_fails_the_request() -> None:
    world = profiled(RequestWorld())
    existing: KubeObject = {**GRAPH, "metadata": {"name": "chat-dgd", "uid": UID}, "spec": {"components": []}}
    world.objects[DEPLOYED] = existing
    world.settle()
    assert world.objects[DEPLOYED]["spec"] == {"components": []}
    assert (world.phase, world.condition("DeploymentReady")) == ("Failed", ("False", "NameConflict"))


def test_deleted_job_is_recreated_from_the_original_specification_or_fails() -> None:
    world = RequestWorld()
    world.reconcile()
    annotations = world.objects[JOB]["metadata"]["annotations"]
    world.publish("SweepingPrefill")
    world.request["spec"] = {**world.request["spec"], "model": "other"}
    world.request["metadata"]["generation"] = 2
    unpublished = copy.deepcopy(world)
    world.objects[OUTPUT]["metadata"]["annotations"] = annotations
    for one in (world, unpublished):
        del one.objects[JOB]
        one.reconcile()
    assert '"model":"org/m"' in world.objects[JOB]["spec"]["template"]["spec"]["containers"][0]["args"][1]
    assert world.objects[JOB]["metadata"]["annotations"] == annotations
    assert (unpublished.phase, unpublished.condition("Profiling")) == ("Failed", ("False", "JobCreationFailed"))
