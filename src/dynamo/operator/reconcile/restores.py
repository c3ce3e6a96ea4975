"""Restores: pods that start from a DynamoCheckpoint in place of loading their model. Pure.

A component names its checkpoint, an identity, or gets a checkpoint of its own (`automatic_checkpoints`). When the checkpoint is ready, its pods become restore targets: the container waits in
standby while the snapshot agent of the node puts the captured processes into it. Otherwise pods start as without a checkpoint, or,
with `startupPolicy: WaitForCheckpoint`, not before it is ready or has failed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dynamo.operator.reconcile.checkpoints import (
    ARTIFACT_VERSION,
    CHECKPOINT_ID,
    DEFAULT_ARTIFACT_VERSION,
    SECCOMP_PROFILE,
    checkpoint_id,
    identity_hash,
)
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, node_count
from dynamo.operator.reconcile.names import MAIN, PREFIX, Restore, RestoreState, SnapshotStorage
from dynamo.operator.reconcile.plan import EventNote
from dynamo.protocols.kubernetes.common import CheckpointIdentity, KubeObject
from dynamo.protocols.kubernetes.models import DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import ComponentCheckpoint, ComponentCheckpointStatus, ComponentSpec

AGENT_LABEL = "app.kubernetes.io/component=snapshot-agent"
"""Selector of the DaemonSet of the snapshot agent, whose claim has the checkpoints."""
AGENT, AGENT_VOLUME = "agent", "checkpoints"
IS_TARGET = f"{PREFIX}snapshot-is-restore-target"
STORAGE_VOLUME = "checkpoint-storage"
CONTROL_VOLUME, CONTROL_DIR = "snapshot-control", "/snapshot-control"
STANDBY = {"DYN_SNAPSHOT_CONTROL_DIR": CONTROL_DIR, "SNAPSHOT_RESTORE_STANDBY": "1"}
RESTORED_FILE = f"{CONTROL_DIR}/restore-complete"
PROBE_FAILURES_MAX = (1 << 31) - 1
"""A restore takes as long as it takes: the startup probe does not end it."""


def starts_from_checkpoint(value: KubeObject) -> bool:
    """Return whether a graph or a component's object names a checkpoint for its pods."""
    spec = value.get("spec") or {}
    return any((one.get("experimental") or {}).get("checkpoint") for one in (spec, *(spec.get("components") or ())))


def storage_of(daemon_sets: Iterable[KubeObject]) -> SnapshotStorage | None:
    """Return where the snapshot agents of a namespace keep checkpoints; None if they mount no claim."""
    for one in daemon_sets:
        spec = one["spec"]["template"]["spec"]
        mounts = (
            mount
            for container in spec.get("containers") or ()
            if container.get("name") == AGENT
            for mount in container.get("volumeMounts") or ()
        )
        path = next((mount["mountPath"].rstrip("/") for mount in mounts if mount["name"] == AGENT_VOLUME), "")
        volumes = (volume for volume in spec.get("volumes") or () if volume["name"] == AGENT_VOLUME)
        claim = next(
            (one["persistentVolumeClaim"]["claimName"] for one in volumes if one.get("persistentVolumeClaim")), ""
        )
        if path and claim:
            return SnapshotStorage(claim, path)
    return None


def restores_of(
    components: Iterable[ComponentSpec], checkpoints: Sequence[DynamoCheckpoint], storage: SnapshotStorage | None
) -> dict[str, Restore]:
    """Return the checkpoint of each component that has one, by the component's name; `checkpoints` are the namespace's.

    Components of several nodes start without.
    """
    found: dict[str, Restore] = {}
    for component in components:
        wanted = component.experimental and component.experimental.checkpoint
        if wanted and wanted.enabled and node_count(component) == 1:
            restore = _restore(wanted, checkpoints, storage)
            if restore is not None:
                found[component.name or ""] = restore
    return found


def _restore(
    wanted: ComponentCheckpoint, checkpoints: Sequence[DynamoCheckpoint], storage: SnapshotStorage | None
) -> Restore | None:
    waits = wanted.startup_policy == "WaitForCheckpoint"
    if wanted.checkpoint_ref:
        same = [one for one in checkpoints if one.metadata.name == wanted.checkpoint_ref]
        wanted_hash = ""
    elif wanted.identity is not None:
        wanted_hash = identity_hash(wanted.identity)
        same = with_identity(checkpoints, wanted.identity)
    else:
        return None
    if not same:
        return Restore(wanted.checkpoint_ref or "", wanted_hash, DEFAULT_ARTIFACT_VERSION, "Absent", waits)
    chosen = min(same, key=lambda one: (one.metadata.creation_timestamp or "", one.metadata.name))
    phase = chosen.status.phase if chosen.status else None
    state: RestoreState = phase if phase in ("Ready", "Failed") else "Waiting"
    version = chosen.metadata.annotations.get(ARTIFACT_VERSION) or DEFAULT_ARTIFACT_VERSION
    return Restore(chosen.metadata.name, checkpoint_id(chosen), version, state, waits, storage)


def with_identity(checkpoints: Iterable[DynamoCheckpoint], identity: CheckpointIdentity) -> list[DynamoCheckpoint]:
    """Return the checkpoints of an identity."""
    wanted = identity_hash(identity)
    return [one for one in checkpoints if identity_hash(one.spec.identity) == wanted]


def add_restore(component: ComponentSpec, restore: Restore, template: KubeObject) -> None:
    """Make the pods of a template restore targets. Raise `WorkloadError` if the target container does not exist."""
    wanted = component.experimental and component.experimental.checkpoint
    name = (wanted and wanted.target_container_name) or MAIN
    spec = template["spec"]
    target = next((one for one in spec["containers"] if one.get("name") == name), None)
    if target is None:
        raise WorkloadError(
            f"experimental.checkpoint.targetContainerName: {name!r} is not a container of the pod template"
        )
    metadata = template["metadata"]
    metadata["labels"] = {**metadata["labels"], IS_TARGET: "true", CHECKPOINT_ID: restore.hash}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ARTIFACT_VERSION: restore.version}
    spec["securityContext"] = {
        **spec["securityContext"],
        "seccompProfile": {"type": "Localhost", "localhostProfile": SECCOMP_PROFILE},
    }
    _add(spec, "volumes", {"name": CONTROL_VOLUME, "emptyDir": {}})
    _add(target, "volumeMounts", {"name": CONTROL_VOLUME, "mountPath": CONTROL_DIR, "subPath": name})
    if restore.storage is not None:
        claim = {"claimName": restore.storage.claim}
        _add(spec, "volumes", {"name": STORAGE_VOLUME, "persistentVolumeClaim": claim})
        _add(target, "volumeMounts", {"name": STORAGE_VOLUME, "mountPath": restore.storage.path})
    env = [one for one in target.get("env") or () if one["name"] not in STANDBY]
    target["env"] = [*env, *({"name": name, "value": value} for name, value in STANDBY.items())]
    target["startupProbe"] = startup_probe(target)


def startup_probe(container: Mapping[str, Any]) -> KubeObject:
    """Return the probe that holds back the others until the restored processes answer: one of theirs, without an end."""
    given = next(
        (container[one] for one in ("startupProbe", "livenessProbe", "readinessProbe") if container.get(one)), None
    )
    if given is None:
        given = {"exec": {"command": ["cat", RESTORED_FILE]}}
    own = {"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": PROBE_FAILURES_MAX, "successThreshold": 1}
    return {**{name: value for name, value in given.items() if name != "initialDelaySeconds"}, **own}


def _add(place: KubeObject, field: str, value: KubeObject) -> None:
    """Add an entry that the template does not have."""
    entries: list[KubeObject] = place.setdefault(field, [])
    if all(one["name"] != value["name"] for one in entries):
        entries.append(value)


def checkpoint_statuses(restores: Mapping[str, Restore]) -> dict[str, ComponentCheckpointStatus] | None:
    """Return the checkpoints of a graph's status; None if no component has one."""
    return {
        name: ComponentCheckpointStatus(
            checkpoint_name=one.name or None,
            checkpoint_id=one.hash or None,
            identity_hash=one.hash or None,
            ready=one.is_ready,
        )
        for name, one in restores.items()
    } or None


def restore_notes(
    restores: Mapping[str, Restore], before: Mapping[str, ComponentCheckpointStatus] | None
) -> list[EventNote]:
    """Return the events of components whose checkpoint has another state than in the status before."""
    notes: list[EventNote] = []
    now = checkpoint_statuses(restores) or {}
    for name, one in restores.items():
        known = (before or {}).get(name)
        if known == now[name]:
            continue
        if one.is_ready:
            notes.append(
                EventNote("Normal", "RestoresFromCheckpoint", f"{name}: {one.text}; pods are restored from it")
            )
        else:
            effect = "pods are not started before it is" if one.is_awaited else "pods start without it"
            kind: Literal["Normal", "Warning"] = "Warning" if one.state in ("Failed", "Absent") else "Normal"
            notes.append(EventNote(kind, "CheckpointNotReady", f"{name}: {one.text}; {effect}"))
    return notes
