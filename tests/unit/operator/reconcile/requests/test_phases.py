"""Phases of requests: the complete sequence, its faults, and convergence from every state between two writes."""

import copy
from typing import Any

import pytest
import yaml
from tests.unit.operator.reconcile.requests.request_cluster import (
    GRAPH,
    HARDWARE,
    RESULT,
    UID,
    RequestCluster,
    request_object,
)

from dynamo.operator.reconcile.requests.phases import GENERATED_SPEC
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

JOB, OUTPUT, DEPLOYED = (
    ("Job", "profile-chat"),
    ("ConfigMap", "dgdr-output-chat"),
    ("DynamoGraphDeployment", "chat-dgd"),
)


def profiled(cluster: RequestCluster) -> RequestCluster:
    """Reconcile a cluster to the end of its job."""
    cluster.reconcile()
    cluster.publish("Done", "done", final_config=RESULT)
    cluster.end_job()
    return cluster


def test_request_is_profiled_deployed_and_monitored() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    assert (cluster.phase, cluster.status["profilingPhase"], cluster.status["profilingJobName"]) == (
        "Profiling",
        "Initializing",
        "profile-chat",
    )
    assert {kind for kind, _ in cluster.objects} == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    cluster.publish("SweepingDecode", "2 of 5")
    cluster.reconcile()
    assert (cluster.status["profilingPhase"], cluster.condition("Profiling")) == (
        "SweepingDecode",
        ("False", "SweepingDecode"),
    )
    cluster.publish("Done", "done", final_config=RESULT)
    cluster.end_job()
    cluster.reconcile()
    assert (cluster.phase, cluster.status["dgdName"], cluster.condition("Profiling")) == (
        "Deploying",
        "chat-dgd",
        ("True", "ProfilingCompleted"),
    )
    assert "profilingPhase" not in cluster.status
    cluster.reconcile()
    assert cluster.condition("DeploymentReady") == ("False", "DeploymentInProgress")
    cluster.advance()
    cluster.reconcile()
    assert (cluster.phase, cluster.condition("Succeeded")) == ("Deployed", ("True", "Deployed"))
    assert cluster.status["deploymentInfo"] == {"replicas": 3, "availableReplicas": 3}
    assert cluster.events == [
        "Initialized", "ProfilingJobCreated", "SpecGenerated", "DeploymentCreated", "DeploymentReady",
    ]  # fmt: skip


def test_generated_graph_has_tracking_labels_no_owner_and_its_config_maps() -> None:
    cluster = profiled(RequestCluster())
    cluster.reconcile()
    labels = {
        "dgdr.nvidia.com/name": "chat",
        "dgdr.nvidia.com/namespace": "space",
        "nvidia.com/managed-by": "dynamo-operator",
    }
    assert cluster.objects[DEPLOYED]["metadata"] == {"name": "chat-dgd", "namespace": "space", "labels": labels}
    assert cluster.objects["ConfigMap", "planner-config-1a2b"]["metadata"]["labels"] == labels


def test_graph_is_generated_but_not_deployed_without_auto_apply() -> None:
    cluster = profiled(RequestCluster(request_object({"autoApply": False})))
    cluster.settle()
    assert (cluster.phase, cluster.condition("Succeeded")) == ("Ready", ("True", "SpecGenerated"))
    assert DEPLOYED not in cluster.objects and ("ConfigMap", "planner-config-1a2b") in cluster.objects
    kept = yaml.safe_load(cluster.request["metadata"]["annotations"][GENERATED_SPEC])
    assert kept == cluster.status["profilingResults"]["selectedConfig"]


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
    cluster = RequestCluster(value)
    gpus = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "143771"}
    cluster.nodes = [{"metadata": {"labels": gpus}}]
    cluster.settle()
    assert (cluster.phase, cluster.status["dgdName"]) == ("Deployed", "mine")
    assert cluster.objects["DynamoGraphDeployment", "mine"]["metadata"]["labels"]["team"] == "a"
    pod = cluster.objects[JOB]["spec"]["template"]["spec"]
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
    cluster = RequestCluster(request_object(spec))
    cluster.has_model_cache = False
    cluster.settle()
    assert (cluster.phase, cluster.condition(condition), cluster.objects) == ("Failed", ("False", reason), {})
    assert any(text in one["message"] for one in cluster.status["conditions"])


def test_failed_job_reports_its_phase_and_cause() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    ended = {
        "name": "profiler",
        "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "out of memory"}},
    }
    cluster.pods = [{"metadata": {"name": "p"}, "status": {"containerStatuses": [ended]}}]
    cluster.publish("SweepingPrefill")
    cluster.end_job("Failed", "BackoffLimitExceeded")
    cluster.settle()
    assert (cluster.phase, cluster.status["profilingPhase"]) == ("Failed", "SweepingPrefill")
    assert cluster.condition("Profiling") == cluster.condition("Succeeded") == ("False", "SweepingPrefillFailed")
    assert "exit code 1, Error, out of memory" in next(
        one["message"] for one in cluster.status["conditions"] if one["type"] == "Profiling"
    )
    assert cluster.events[-1] == "ProfilingJobFailed"


@pytest.mark.parametrize(
    "text", ["null", "kind: ConfigMap\nmetadata: {name: a}", "a: [", "kind: DynamoGraphDeployment"]
)
def test_result_without_a_graph_fails_the_request(text: str) -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    cluster.publish("Done", final_config=text)
    cluster.end_job()
    cluster.settle()
    assert (cluster.phase, cluster.condition("SpecGenerated")) == ("Failed", ("False", "GenerationFailed"))


def test_missing_result_fails_the_request_after_a_timeout() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    cluster.end_job()
    assert cluster.plan().requeue_s is not None
    cluster.reconcile()
    assert cluster.phase == "Profiling"
    cluster.time += 120
    cluster.reconcile()
    assert (cluster.phase, cluster.condition("SpecGenerated")) == ("Failed", ("False", "GenerationFailed"))


def test_image_pull_failure_is_reported_once() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    waiting = {"name": "profiler", "image": "planner:1", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    cluster.pods = [{"metadata": {"name": "p"}, "status": {"containerStatuses": [waiting]}}]
    cluster.reconcile()
    cluster.reconcile()
    assert (cluster.phase, cluster.condition("Profiling")) == ("Profiling", ("False", "ImagePullFailed"))
    assert cluster.events.count("ImagePullFailed") == 1


def test_job_deleted_before_its_end_is_recreated() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    del cluster.objects[JOB]
    cluster.settle()
    assert cluster.phase == "Deployed"


def test_output_and_job_of_an_earlier_request_of_the_same_name_are_not_used() -> None:
    cluster = profiled(RequestCluster())
    old = {name: cluster.objects[name] for name in (JOB, OUTPUT)}
    cluster = RequestCluster(request_object(uid="uid-2"))
    cluster.objects |= old
    plan = cluster.plan()
    assert [one["kind"] for one in plan.apply] == ["Job"]
    assert plan.status is not None and plan.status["phase"] == "Profiling"


def test_changed_specification_is_rejected_once_and_the_original_is_deployed() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    cluster.request["spec"] = {**cluster.request["spec"], "autoApply": False, "model": "other"}
    cluster.request["metadata"]["generation"] = 2
    cluster.settle()
    assert (cluster.phase, cluster.status["observedGeneration"]) == ("Deployed", 1)
    assert cluster.events.count("SpecChangeRejected") == 1
    assert cluster.condition("Validation") == ("False", "SpecChangeRejected")


def test_degraded_graphs_recover_and_deleted_graphs_fail_the_request() -> None:
    cluster = RequestCluster()
    cluster.settle()
    cluster.objects[DEPLOYED]["status"]["state"] = "pending"
    cluster.reconcile()
    cluster.reconcile()
    assert (cluster.phase, cluster.condition("DeploymentReady")) == ("Deploying", ("False", "DeploymentDegraded"))
    cluster.settle()
    assert (cluster.phase, cluster.events[-2:]) == ("Deployed", ["DeploymentDegraded", "DeploymentReady"])
    del cluster.objects[DEPLOYED]
    cluster.reconcile()
    cluster.reconcile()
    assert (cluster.phase, cluster.condition("DeploymentReady")) == ("Failed", ("False", "DeploymentDeleted"))
    assert "dgdName" not in cluster.status and DEPLOYED not in cluster.objects
    assert cluster.events.count("DeploymentDeleted") == 1


@pytest.mark.parametrize("passes", range(4))
@pytest.mark.parametrize("writes", range(6))
def test_reconciliation_recovers_from_an_interruption_between_writes(passes: int, writes: int) -> None:
    cluster = RequestCluster()
    for _ in range(passes):
        cluster.reconcile()
        cluster.advance()
    cluster.reconcile(writes)
    cluster.settle()
    assert cluster.phase == "Deployed"
    assert [kind for kind, _ in cluster.objects].count("DynamoGraphDeployment") == 1


@pytest.mark.parametrize("passes", range(6))
def test_repeated_reconciliation_of_an_unchanged_state_writes_nothing(passes: int) -> None:
    cluster = RequestCluster()
    for _ in range(passes):
        cluster.reconcile()
        cluster.advance()
    cluster.reconcile()
    cluster.reconcile()  # The graph that the first pass created is observed.
    events = list(cluster.events)
    assert (cluster.reconcile(), cluster.events) == (0, events)


def test_existing_job_is_not_written_again() -> None:
    cluster = RequestCluster(request_object({"hardware": HARDWARE}))
    cluster.reconcile()
    cluster.request["status"] = {}  # The status was not written.
    plan = cluster.plan()
    assert (plan.create_unowned, plan.apply) == ([], [])
    assert plan.status is not None and plan.status["phase"] == "Profiling"


def test_foreign_graph_with_the_same_name_is_not_overwritten_and_fails_the_request() -> None:
    cluster = profiled(RequestCluster())
    existing: KubeObject = {**GRAPH, "metadata": {"name": "chat-dgd", "uid": UID}, "spec": {"components": []}}
    cluster.objects[DEPLOYED] = existing
    cluster.settle()
    assert cluster.objects[DEPLOYED]["spec"] == {"components": []}
    assert (cluster.phase, cluster.condition("DeploymentReady")) == ("Failed", ("False", "NameConflict"))


def test_deleted_job_is_recreated_from_the_original_specification_or_fails() -> None:
    cluster = RequestCluster()
    cluster.reconcile()
    annotations = cluster.objects[JOB]["metadata"]["annotations"]
    cluster.publish("SweepingPrefill")
    cluster.request["spec"] = {**cluster.request["spec"], "model": "other"}
    cluster.request["metadata"]["generation"] = 2
    unpublished = copy.deepcopy(cluster)
    cluster.objects[OUTPUT]["metadata"]["annotations"] = annotations
    for one in (cluster, unpublished):
        del one.objects[JOB]
        one.reconcile()
    assert '"model":"org/m"' in cluster.objects[JOB]["spec"]["template"]["spec"]["containers"][0]["args"][1]
    assert cluster.objects[JOB]["metadata"]["annotations"] == annotations
    assert (unpublished.phase, unpublished.condition("Profiling")) == ("Failed", ("False", "JobCreationFailed"))
