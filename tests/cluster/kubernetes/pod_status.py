"""Status of the pods of both API servers, as the kubelet of a node reports it."""

from tests.cluster.kubernetes.errors import Object
from tests.cluster.kubernetes.metadata import now
from tests.cluster.kubernetes.workloads import condition

READY, WAITING, OUTCOME = "dynamo.test/ready", "dynamo.test/waiting-reason", "dynamo.test/outcome"
"""Annotations of pods: "false" keeps a pod unready, with a reason; "Failed" makes the pod of a job fail."""
ADDRESSES_PER_BLOCK = 250


def pod_address(number: int) -> str:
    """Return the address of the pod with a number."""
    high, low = divmod(number, ADDRESSES_PER_BLOCK)
    return f"10.1.{high}.{low + 1}"


def running_status(pod: Object, ip: str) -> Object:
    """Return the status of a pod that runs, or of one of a job that has ended; annotations of the pod change it."""
    annotations = pod["metadata"].get("annotations") or {}
    is_job = any(one["kind"] == "Job" for one in pod["metadata"].get("ownerReferences") or ())
    waiting = annotations.get(WAITING)
    phase = annotations.get(OUTCOME, "Succeeded") if is_job else "Pending" if waiting else "Running"
    is_ready = annotations.get(READY) != "false" and phase == "Running"
    state: Object = {"waiting": {"reason": waiting}} if waiting else {"running": {"startedAt": now()}}
    if is_job:
        reason = "Completed" if phase == "Succeeded" else "Error"
        state = {"terminated": {"exitCode": int(phase != "Succeeded"), "reason": reason}}
    containers = [
        {"name": one["name"], "image": one["image"], "ready": is_ready, "restartCount": 0, "started": is_ready,
         "imageID": "", "state": state} for one in pod["spec"]["containers"]
    ]  # fmt: skip
    conditions = [
        condition(kind, is_ready or kind == "PodScheduled")
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    return {
        "phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions, "containerStatuses": containers,
        "startTime": now(),
    }  # fmt: skip
