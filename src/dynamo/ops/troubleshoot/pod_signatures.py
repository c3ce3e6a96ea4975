"""Signatures of pods, claims and jobs: images, scheduling, storage, crashes and probes. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dynamo.operator.validation.facts import part
from dynamo.ops.report import CheckStatus
from dynamo.ops.troubleshoot.case import CaseFacts
from dynamo.ops.troubleshoot.signature import EvidenceLine, Signature
from dynamo.protocols.kubernetes.common import KubeObject

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
KILLED = 137
"""Exit status of a container that was ended by SIGKILL, which is how the kernel ends one without memory."""
Find = Callable[[CaseFacts], Iterable[EvidenceLine]]


def name_of(value: KubeObject) -> str:
    """Return kind and name of an object as kubectl takes them."""
    return f"{str(value.get('kind') or 'pod').lower()}/{part(value, 'metadata').get('name') or ''}"


def containers(pod: KubeObject) -> Iterator[KubeObject]:
    """Yield the status of each container, initial ones first."""
    status = part(pod, "status")
    for group in ("initContainerStatuses", "containerStatuses"):
        yield from (one for one in status.get(group) or () if isinstance(one, dict))


def waiting(reasons: Iterable[str]) -> Find:
    """Return a search for containers that wait for one of the reasons."""
    wanted = frozenset(reasons)

    def find(case: CaseFacts) -> Iterator[EvidenceLine]:
        for pod in case.of("Pod"):
            for one in containers(pod):
                state = part(one, "state", "waiting")
                if state.get("reason") in wanted:
                    text = f"{one.get('name')} {state['reason']}: {state.get('message') or ''}"
                    yield EvidenceLine(name_of(pod), text.rstrip(": "))

    return find


def terminated(is_wanted: Callable[[KubeObject], bool]) -> Find:
    """Return a search for containers whose last run ended in a wanted way."""

    def find(case: CaseFacts) -> Iterator[EvidenceLine]:
        for pod in case.of("Pod"):
            for one in containers(pod):
                for at in ("state", "lastState"):
                    state = part(one, at, "terminated")
                    if state and is_wanted(state):
                        text = f"{one.get('name')} ended: {state.get('reason')}, exit code {state.get('exitCode')}"
                        yield EvidenceLine(name_of(pod), f"{text}, {one.get('restartCount') or 0} restarts")

    return find


def conditions(value: KubeObject) -> Iterator[KubeObject]:
    """Yield the conditions of an object."""
    found: Any = part(value, "status").get("conditions")
    yield from (one for one in (found if isinstance(found, list) else ()) if isinstance(one, dict))


def unscheduled(pattern: str) -> Find:
    """Return a search for pods that the scheduler cannot place for a reason."""
    wanted = re.compile(pattern, re.IGNORECASE)

    def find(case: CaseFacts) -> Iterator[EvidenceLine]:
        for pod in case.of("Pod"):
            for one in conditions(pod):
                message = str(one.get("message") or "")
                if one.get("type") == "PodScheduled" and one.get("status") == "False" and wanted.search(message):
                    yield EvidenceLine(name_of(pod), message)
        for event in case.open_events:
            message = str(event.get("message") or "")
            if event.get("reason") == "FailedScheduling" and wanted.search(message):
                yield EvidenceLine(f"pod/{part(event, 'involvedObject').get('name') or ''}", message)

    return find


def pending_claims(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the claims that are not bound."""
    for claim in case.of("PersistentVolumeClaim"):
        if part(claim, "status").get("phase") in {"Pending", "Lost"}:
            storage = part(claim, "spec").get("storageClassName")
            text = f"{part(claim, 'status')['phase']}, storage class {storage or 'of the cluster (default)'}"
            yield EvidenceLine(f"pvc/{part(claim, 'metadata').get('name') or ''}", text)


def failed_jobs(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the jobs that failed."""
    for job in case.of("Job"):
        for one in conditions(job):
            if one.get("type") == "Failed" and one.get("status") == "True":
                yield EvidenceLine(name_of(job), f"{one.get('reason') or 'Failed'}: {one.get('message') or ''}")


def evicted(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the pods that the node ended."""
    for pod in case.of("Pod"):
        status = part(pod, "status")
        if status.get("reason") in {"Evicted", "NodeLost", "UnexpectedAdmissionError", "Preempting"}:
            yield EvidenceLine(name_of(pod), f"{status['reason']}: {status.get('message') or ''}")


def terminating(case: CaseFacts) -> Iterator[EvidenceLine]:
    """Yield the pods that are being deleted and keep finalizers."""
    for pod in case.of("Pod"):
        metadata = part(pod, "metadata")
        if metadata.get("deletionTimestamp") and metadata.get("finalizers"):
            text = f"deleted at {metadata['deletionTimestamp']}, finalizers {', '.join(metadata['finalizers'])}"
            yield EvidenceLine(name_of(pod), text)


def of_objects(
    name: str,
    find: Find | None,
    cause: str,
    command: str,
    *,
    pattern: str = "",
    status: CheckStatus = CheckStatus.FAIL,
    is_symptom: bool = False,
) -> Signature:
    """Return a signature of objects; `pattern` finds the same failure in events and descriptions."""
    return Signature(
        name=name,
        find=find,
        pattern=re.compile(pattern) if pattern else None,
        cause=cause,
        command=command,
        status=status,
        is_symptom=is_symptom,
    )


POD_SIGNATURES = (
    of_objects(
        "image-pull",
        waiting(IMAGE_REASONS),
        "The image does not exist under this name and tag, or the registry refuses the pull",
        "kubectl describe pod POD; check image and tag, and imagePullSecrets",
        pattern=r"ErrImagePull|ImagePullBackOff|Failed to pull image|InvalidImageName",
    ),
    of_objects(
        "container-memory",
        terminated(lambda state: state.get("reason") == "OOMKilled" or state.get("exitCode") == KILLED),
        "The container exceeded its memory limit; loading weights needs about their size",
        "raise resources.limits.memory of the component; kubectl top pod POD",
        pattern=r"OOMKilled",
    ),
    of_objects(
        "gpu-shortage",
        unscheduled(r"Insufficient nvidia\.com/(?:gpu|mig)"),
        "No node has enough free GPUs",
        "kubectl describe nodes | grep -A6 'Allocated resources'; lower replicas or GPUs per replica",
        pattern=r"Insufficient nvidia\.com/gpu",
    ),
    of_objects(
        "device-shortage",
        unscheduled(r"Insufficient (?:rdma/|vpc\.amazonaws\.com/efa|hugepages|networking\.gke\.io)"),
        "No node offers the network device or the huge pages that the pod requests",
        "kubectl get nodes -o json | jq '.items[].status.allocatable'; install the device plugin, or drop the request",
    ),
    of_objects(
        "capacity",
        unscheduled(r"Insufficient (?:cpu|memory|ephemeral-storage)|Too many pods"),
        "No node has enough CPU, memory or room for pods",
        "kubectl describe nodes; lower resources.requests or add nodes",
    ),
    of_objects(
        "node-selection",
        unscheduled(
            r"untolerated taint|didn't match Pod's node affinity|node\(s\) had taint|didn't match node selector"
        ),
        "Taints, node selectors or affinity exclude all nodes",
        "kubectl get nodes --show-labels; add tolerations or correct nodeSelector in extraPodSpec",
    ),
    of_objects(
        "claim-missing",
        unscheduled(r'persistentvolumeclaim "[^"]+" not found'),
        "The pod mounts a claim that does not exist in its namespace",
        "kubectl get pvc; create the model cache before the graph, or set create: true",
        pattern=r'persistentvolumeclaim "[^"]+" not found',
    ),
    of_objects(
        "claim-pending",
        pending_claims,
        "The volume claim is not bound: no provisioner serves its storage class, or no volume fits",
        "kubectl describe pvc CLAIM; kubectl get storageclass; set storageClassName",
        pattern=r"unbound immediate PersistentVolumeClaims|ProvisioningFailed|no persistent volumes available",
    ),
    of_objects(
        "secret-missing",
        waiting({"CreateContainerConfigError"}),
        "A secret or config map that the pod names does not exist",
        "kubectl create secret generic hf-token-secret --from-literal=HF_TOKEN=… (or the name in the message)",
        pattern=r"(?:secret|configmap) \"[^\"]+\" not found|references non-existent secret key",
    ),
    of_objects(
        "mount",
        None,
        "A volume cannot be mounted",
        "kubectl describe pod POD; kubectl get volumeattachment",
        pattern=r"FailedMount|FailedAttachVolume|Multi-Attach error",
    ),
    of_objects(
        "container-start",
        waiting({"CreateContainerError", "RunContainerError"}),
        "The container runtime cannot start the command: a wrong command, user or device",
        "kubectl describe pod POD; check command and args of the component",
        pattern=r"exec: \"[^\"]+\": (?:executable file not found|stat)|failed to create (?:containerd task|shim task)",
    ),
    of_objects(
        "quota",
        None,
        "The namespace's quota forbids the pod",
        "kubectl describe resourcequota",
        pattern=r"exceeded quota|forbidden: failed quota",
    ),
    of_objects(
        "evicted",
        evicted,
        "The node ended the pod: memory or disk pressure, preemption, or the node was lost",
        "kubectl describe node NODE; raise requests, or set resources.limits.ephemeral-storage",
        pattern=r"The node was low on resource|TaintManagerEviction",
    ),
    of_objects(
        "job-failed",
        failed_jobs,
        "A job of the deployment failed, so what depends on it waits",
        "kubectl logs job/JOB; delete the job before it is created again",
        pattern=r"BackoffLimitExceeded|Job has reached the specified backoff limit",
    ),
    of_objects(
        "terminating",
        terminating,
        "A deleted pod waits for a finalizer, and its GPUs stay in use",
        "kubectl get pod POD -o yaml; check the controller that owns the finalizer",
        status=CheckStatus.WARN,
    ),
    of_objects(
        "probe",
        None,
        "A probe fails: the model loads for longer than the probe allows, or the process does not respond",
        "kubectl logs POD; raise failureThreshold of the startup probe for large models",
        pattern=r"Unhealthy: |(?:Startup|Liveness|Readiness) probe failed",
        status=CheckStatus.WARN,
        is_symptom=True,
    ),
    of_objects(
        "crash-loop",
        waiting({"CrashLoopBackOff"}),
        "A container ends again and again",
        "kubectl logs POD --previous; the causes above name the reason",
        pattern=r"CrashLoopBackOff|Back-off restarting failed container",
        is_symptom=True,
    ),
)
