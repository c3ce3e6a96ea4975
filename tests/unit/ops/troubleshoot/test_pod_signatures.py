"""Each signature of pods, claims and jobs finds its failure in objects as a cluster returns them."""

from typing import Any

import pytest

from dynamo.ops.troubleshoot.case import CaseFacts
from dynamo.ops.troubleshoot.pod_signatures import POD_SIGNATURES
from dynamo.ops.troubleshoot.signature import matches


def pod(**status: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": "worker-0"}, "status": status}


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return pod(containerStatuses=[{"name": "main", "state": {"waiting": {"reason": reason, "message": message}}}])


def unplaced(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def event(reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Event",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": "Pod", "name": "worker-0"},
    }


CASES: dict[str, dict[str, Any]] = {
    "image-pull": waits("ImagePullBackOff", 'Back-off pulling image "nvcr.io/x:9"'),
    "container-memory": pod(
        containerStatuses=[
            {"name": "main", "restartCount": 3, "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
        ]
    ),
    "gpu-shortage": unplaced("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
    "device-shortage": unplaced("0/3 nodes are available: 3 Insufficient rdma/ib."),
    "capacity": unplaced("0/3 nodes are available: 3 Insufficient memory."),
    "node-selection": unplaced("0/3 nodes are available: 3 node(s) had untolerated taint {nvidia.com/gpu: present}."),
    "claim-missing": unplaced('persistentvolumeclaim "model-cache" not found'),
    "claim-pending": {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "model-cache"},
        "spec": {"storageClassName": "fast"},
        "status": {"phase": "Pending"},
    },
    "secret-missing": waits("CreateContainerConfigError", 'secret "hf-token-secret" not found'),
    "mount": event("FailedMount", "MountVolume.SetUp failed for volume"),
    "container-start": waits("RunContainerError", 'exec: "dynamo": executable file not found in $PATH'),
    "quota": event("FailedCreate", "pods is forbidden: exceeded quota: gpus, requested: 8, limited: 4"),
    "evicted": pod(phase="Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage."),
    "job-failed": {
        "kind": "Job",
        "metadata": {"name": "model-download"},
        "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]},
    },
    "terminating": {
        "kind": "Pod",
        "metadata": {"name": "worker-0", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]},
    },
    "probe": event("Unhealthy", "Startup probe failed: HTTP probe failed with statuscode: 503"),
    "crash-loop": waits("CrashLoopBackOff", "back-off 5m0s restarting failed container=main"),
}
HEALTHY = {
    "kind": "Pod",
    "metadata": {"name": "worker-0"},
    "status": {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
        "initContainerStatuses": [{"name": "i", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}],
        "containerStatuses": [{"name": "main", "state": {"running": {}}, "restartCount": 0}],
    },
}


def found(*values: dict[str, Any]) -> list[str]:
    objects: dict[str, tuple[dict[str, Any], ...]] = {}
    for value in values:
        objects[value["kind"]] = (*objects.get(value["kind"], ()), value)
    return [match.signature.name for match in matches(CaseFacts(objects=objects), POD_SIGNATURES)]


def test_each_signature_has_an_object() -> None:
    assert sorted(CASES) == sorted(one.name for one in POD_SIGNATURES)


@pytest.mark.parametrize("name", CASES)
def test_object_is_found_and_causes_no_other_failure(name: str) -> None:
    assert found(CASES[name]) == [name]


def test_healthy_objects_have_no_failure() -> None:
    bound = {**CASES["claim-pending"], "status": {"phase": "Bound"}}
    done = {
        "kind": "Job",
        "metadata": {"name": "j"},
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    }
    assert found(HEALTHY, bound, done, event("Scheduled", "assigned"), event("Pulled", "image present")) == []


def test_scheduling_event_without_a_pod_is_enough() -> None:
    assert found(event("FailedScheduling", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu")) == [
        "gpu-shortage"
    ]


def test_events_of_a_ready_pod_are_not_failures() -> None:
    assert found(HEALTHY, event("FailedMount", "x"), event("FailedScheduling", "Insufficient nvidia.com/gpu")) == []


def test_crash_is_listed_after_its_cause() -> None:
    assert found(CASES["crash-loop"], CASES["container-memory"]) == ["container-memory", "crash-loop"]


def test_malformed_objects_are_ignored() -> None:
    assert found({"kind": "Pod", "metadata": None, "status": {"conditions": None, "containerStatuses": ["x"]}}) == []
