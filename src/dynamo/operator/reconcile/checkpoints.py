"""Reconcile of a DynamoCheckpoint: the job that runs a worker until it is captured, and the phase of the checkpoint. Pure."""

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from dynamo.operator.reconcile.conditions import with_condition
from dynamo.operator.reconcile.multinode import gpus_of
from dynamo.operator.reconcile.names import (
    COMPONENT_TYPE,
    GLOBAL_NAMESPACE,
    MANAGED_BY,
    NAMESPACE,
    OPERATOR,
    PREFIX,
    SYSTEM_PORT,
    WORKER_TYPES,
)
from dynamo.operator.reconcile.plan import EventNote, Plan
from dynamo.protocols.kubernetes.common import CheckpointIdentity, Condition, KubeObject, encode
from dynamo.protocols.kubernetes.models import CheckpointStatus, DynamoCheckpoint

HASH_LENGTH = 16
IS_SOURCE = f"{PREFIX}snapshot-is-checkpoint-source"
CHECKPOINT_ID = f"{PREFIX}snapshot-checkpoint-id"
ARTIFACT_VERSION = f"{PREFIX}snapshot-artifact-version"
CAPTURE_STATUS = f"{PREFIX}snapshot-checkpoint-status"
"""Annotation of the job: the snapshot agent writes `completed` or `failed`."""
DEFAULT_ARTIFACT_VERSION = "1"
SECCOMP_PROFILE = "profiles/block-iouring.json"
ACTIVE_DEADLINE_S = 3600
BACKOFF_LIMIT = 3
TTL_S = 300
SHARED_MEMORY = "shared-memory"
SHARED_MEMORY_SIZE = "8Gi"
LAUNCHER = "cuda-checkpoint"
"""Command under which processes with several GPUs are started, so that they can be captured together."""


class CannotCheckpoint(ValueError):
    """A checkpoint's job cannot be made; the message names the field."""


def identity_hash(identity: CheckpointIdentity) -> str:
    """Return the identity of a checkpoint: 16 hexadecimal digits of its normalized JSON, as upstream computes them."""
    optional: KubeObject = {}
    if identity.dynamo_version:
        optional["dynamoVersion"] = identity.dynamo_version
    optional["tensorParallelSize"] = identity.tensor_parallel_size or 1
    optional["pipelineParallelSize"] = identity.pipeline_parallel_size or 1
    if identity.dtype:
        optional["dtype"] = identity.dtype
    if identity.max_model_len:
        optional["maxModelLen"] = identity.max_model_len
    if identity.extra_parameters:
        optional["extraParameters"] = dict(sorted(identity.extra_parameters.items()))
    text = msgspec.json.encode({"model": identity.model, "backendFramework": identity.backend_framework, **optional})
    for character in (b"<", b">", b"&"):  # Go escapes these in JSON; the hash is of the escaped text.
        text = text.replace(character, b"\\u%04x" % character[0])
    return hashlib.sha256(text).hexdigest()[:HASH_LENGTH]


def checkpoint_id(checkpoint: DynamoCheckpoint) -> str:
    """Return the name of a checkpoint's artifact: of its label if a graph made it, else of its identity."""
    return checkpoint.metadata.labels.get(CHECKPOINT_ID) or identity_hash(checkpoint.spec.identity)


def job_name(checkpoint: DynamoCheckpoint) -> str:
    """Return the name of a checkpoint's job."""
    version = checkpoint.metadata.annotations.get(ARTIFACT_VERSION) or DEFAULT_ARTIFACT_VERSION
    return f"checkpoint-job-{checkpoint_id(checkpoint)}-{version}"


def checkpoint_plan(
    checkpoint: DynamoCheckpoint, job: KubeObject | None, others: Iterable[DynamoCheckpoint], now: str
) -> Plan:
    """Return the job and the status of a checkpoint.

    `job` is the one of name `job_name`, `others` are the checkpoints of the namespace. `now` is a timestamp of RFC 3339.
    The job is written only while it does not exist: its pods cannot be changed afterwards.
    """
    known = checkpoint.status or CheckpointStatus()
    if known.phase in ("Ready", "Failed"):
        return Plan(status=encode(known))
    status = msgspec.structs.replace(
        known,
        phase="Pending",
        identity_hash=checkpoint_id(checkpoint),
        checkpoint_id=checkpoint_id(checkpoint),
        job_name=job_name(checkpoint),
        message=None,
    )
    owner = _first_with_identity(checkpoint, others)
    if owner is not None:
        text = f"checkpoint identity hash {status.identity_hash} is already owned by {owner}"
        status.job_name = None
        return _failed(status, "DuplicateIdentity", text, now)
    if job is None:
        try:
            wanted = checkpoint_job(checkpoint)
        except CannotCheckpoint as error:
            return _failed(status, "InvalidJob", str(error), now)
        return Plan(apply=[wanted], status=encode(status))
    if not any(one.type == "JobCreated" and one.status == "True" for one in known.conditions or ()):
        status.conditions = _with(
            status, "JobCreated", "True", "JobCreated", f"Checkpoint job {status.job_name} created", now
        )
    return _observed(status, job, now)


def _observed(status: CheckpointStatus, job: KubeObject, now: str) -> Plan:
    ended = {
        one.get("type"): one for one in (job.get("status") or {}).get("conditions") or () if one["status"] == "True"
    }
    captured = (job["metadata"].get("annotations") or {}).get(CAPTURE_STATUS)
    if "Failed" in ended or captured == "failed":
        reason = ended.get("Failed", {}).get("message") or "the snapshot agent reported a failure"
        return _failed(status, "JobFailed", f"Checkpoint job failed: {reason}", now)
    if "Complete" not in ended:
        status.phase = "Creating"
        return Plan(status=encode(status))
    status.phase, status.created_at = "Ready", now
    text = "Checkpoint job completed"
    status.conditions = _with(status, "JobCompleted", "True", "JobSucceeded", text, now)
    note = EventNote("Normal", "CheckpointReady", "Checkpoint creation completed successfully")
    return Plan(status=encode(status), events=[note])


def checkpoint_job(checkpoint: DynamoCheckpoint) -> KubeObject:
    """Return the job of a checkpoint. Raise `CannotCheckpoint` for a template from which none can be made."""
    given = checkpoint.spec.job
    template = copy.deepcopy(given.pod_template_spec)
    pod: KubeObject = template.setdefault("spec", {})
    main = _target(pod.get("containers") or [], given.target_container_name)
    hash_value = checkpoint_id(checkpoint)
    version = checkpoint.metadata.annotations.get(ARTIFACT_VERSION) or DEFAULT_ARTIFACT_VERSION
    metadata: KubeObject = template.setdefault("metadata", {})
    labels = {IS_SOURCE: "true", CHECKPOINT_ID: hash_value}
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ARTIFACT_VERSION: version}
    pod["restartPolicy"] = "Never"
    security: KubeObject = pod.setdefault("securityContext", {})
    security["seccompProfile"] = {"type": "Localhost", "localhostProfile": SECCOMP_PROFILE}
    main["env"] = _environment(metadata["labels"], main.get("env") or [])
    _add_shared_memory(checkpoint, pod, main)
    _launch_together(checkpoint.spec.identity, main)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(checkpoint),
            "namespace": checkpoint.metadata.namespace,
            "labels": {CHECKPOINT_ID: hash_value, MANAGED_BY: OPERATOR},
        },
        "spec": {
            "activeDeadlineSeconds": _given(given.active_deadline_seconds, ACTIVE_DEADLINE_S),
            "backoffLimit": _given(given.backoff_limit, BACKOFF_LIMIT),
            "ttlSecondsAfterFinished": _given(given.ttl_seconds_after_finished, TTL_S),
            "template": template,
        },
    }


def _target(containers: Sequence[KubeObject], name: str | None) -> KubeObject:
    path = "spec.job.podTemplateSpec.spec.containers"
    if not containers:
        raise CannotCheckpoint(f"{path}: must have at least one container")
    if not name:
        return containers[0]
    found = next((one for one in containers if one.get("name") == name), None)
    if found is None:
        names = ", ".join(str(one.get("name")) for one in containers)
        raise CannotCheckpoint(f"spec.job.targetContainerName: {name!r} is not a container of {path}: {names}")
    return found


def _environment(labels: KubeObject, given: Sequence[KubeObject]) -> list[KubeObject]:
    """Return the environment of a worker; what the template sets takes precedence."""
    kind = labels.get(COMPONENT_TYPE)
    values = {
        "DYN_NAMESPACE": labels.get(NAMESPACE) or GLOBAL_NAMESPACE,
        "DYN_COMPONENT": kind if kind in WORKER_TYPES else "worker",
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_SYSTEM_ENABLED": "true",
        "DYN_SYSTEM_PORT": str(SYSTEM_PORT),
    }
    fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}
    own: list[KubeObject] = [{"name": name, "value": value} for name, value in values.items()]
    own += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    names = {one["name"] for one in given}
    return [*(one for one in own if one["name"] not in names), *given]


def _add_shared_memory(checkpoint: DynamoCheckpoint, pod: KubeObject, main: KubeObject) -> None:
    given = checkpoint.spec.job.shared_memory
    if given is not None and given.disabled:
        return
    volumes: list[KubeObject] = pod.setdefault("volumes", [])
    if any(one.get("name") == SHARED_MEMORY for one in volumes):
        return
    size = (given and given.size) or SHARED_MEMORY_SIZE
    volumes.append({"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    main.setdefault("volumeMounts", []).append({"name": SHARED_MEMORY, "mountPath": "/dev/shm"})  # noqa: S108


def _launch_together(identity: CheckpointIdentity, main: KubeObject) -> None:
    ranks = (identity.tensor_parallel_size or 1) * (identity.pipeline_parallel_size or 1)
    if max(ranks, gpus_of(main)) == 1 or main.get("command") == [LAUNCHER]:
        return
    if not main.get("command"):
        path = "spec.job.podTemplateSpec.spec.containers"
        raise CannotCheckpoint(f"{path}: container {main.get('name')!r} must have a command, which {LAUNCHER} starts")
    main["args"] = ["--launch-job", *main["command"], *(main.get("args") or [])]
    main["command"] = [LAUNCHER]


def _first_with_identity(checkpoint: DynamoCheckpoint, others: Iterable[DynamoCheckpoint]) -> str | None:
    """Return the name of an older checkpoint with the same identity; of equal age, the first by name is the older."""

    def age(one: DynamoCheckpoint) -> tuple[str, str]:
        return one.metadata.creation_timestamp or "", one.metadata.name

    wanted = identity_hash(checkpoint.spec.identity)
    same = [one for one in others if identity_hash(one.spec.identity) == wanted and age(one) < age(checkpoint)]
    return min(same, key=age).metadata.name if same else None


def _failed(status: CheckpointStatus, reason: str, text: str, now: str) -> Plan:
    status.phase, status.message = "Failed", text
    status.conditions = _with(status, "JobCompleted", "False", reason, text, now)
    return Plan(status=encode(status), events=[EventNote("Warning", "CheckpointFailed", text)])


def _with(
    status: CheckpointStatus, kind: str, value: Literal["True", "False"], reason: str, text: str, now: str
) -> list[Condition]:
    return with_condition(status.conditions, Condition(type=kind, status=value, reason=reason, message=text), now)


def _given(value: Any, default: int) -> Any:
    return default if value is None else value
