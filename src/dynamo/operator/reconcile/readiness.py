"""Readiness of LeaderWorkerSets and of Grove's PodCliques and PodCliqueScalingGroups, by their status."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentStatus

GroveKind: TypeAlias = Literal["PodClique", "PodCliqueScalingGroup"]
NOT_READY, UPDATING, CAPACITY, PODS = (
    "SomeResourcesNotReady",
    "Updating",
    "InsufficientCapacity",
    "PodsNotReady",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReadiness:
    """State of one workload."""

    is_ready: bool
    reason: str = ""
    """Reason for the graph's condition; empty when the workload is ready."""
    message: str = ""
    status: ComponentStatus


def leader_worker_set_readiness(name: str, observed: KubeObject | None) -> WorkloadReadiness:
    """Return the readiness of a LeaderWorkerSet; `observed` is None before it exists."""
    status: KubeObject = (observed or {}).get("status") or {}
    ready = int(status.get("readyReplicas") or 0)
    found = ComponentStatus(
        component_kind="LeaderWorkerSet",
        component_names=[name],
        replicas=int(status.get("replicas") or 0),
        updated_replicas=int(status.get("updatedReplicas") or 0),
        ready_replicas=ready,
    )
    if observed is None:
        return WorkloadReadiness(is_ready=False, reason=NOT_READY, message="resource not found", status=found)
    desired = _desired(observed)
    if desired == 0:
        return WorkloadReadiness(is_ready=True, status=found)
    if ready < desired:
        message = f"{ready} of {desired} groups are ready"
        return WorkloadReadiness(is_ready=False, reason=PODS, message=message, status=found)
    if (_condition(status, "Available") or {}).get("status") != "True":
        message = "the condition Available is not true"
        return WorkloadReadiness(is_ready=False, reason=UPDATING, message=message, status=found)
    return WorkloadReadiness(is_ready=True, status=found)


def grove_readiness(kind: GroveKind, name: str, observed: KubeObject | None) -> WorkloadReadiness:
    """Return the readiness of a PodClique or of a PodCliqueScalingGroup; `observed` is None before it exists."""
    status: KubeObject = (observed or {}).get("status") or {}
    serving_field = "readyReplicas" if kind == "PodClique" else "availableReplicas"
    counts = {
        one: int(status.get(one) or 0) for one in ("replicas", "updatedReplicas", "scheduledReplicas", serving_field)
    }
    found = ComponentStatus(
        component_kind=kind,
        component_names=[name],
        replicas=counts["replicas"],
        updated_replicas=counts["updatedReplicas"],
    )
    if kind == "PodClique":
        found.ready_replicas = counts[serving_field]
    else:
        found.available_replicas = counts[serving_field]
    if observed is None:
        return WorkloadReadiness(is_ready=False, reason=NOT_READY, message="resource not found", status=found)
    generation = int(observed.get("metadata", {}).get("generation") or 0)
    seen = status.get("observedGeneration")
    if seen is None or int(seen) < generation:
        message = f"generation {generation} is not processed"
        return WorkloadReadiness(is_ready=False, reason=NOT_READY, message=message, status=found)
    found.scheduled_replicas = counts["scheduledReplicas"]
    desired = _desired(observed)
    if desired == 0 or all(counts[one] == desired for one in ("replicas", "updatedReplicas", serving_field)):
        return WorkloadReadiness(is_ready=True, status=found)
    reason, message = _grove_reason(kind, status, counts, desired, counts[serving_field])
    return WorkloadReadiness(is_ready=False, reason=reason, message=message, status=found)


def _grove_reason(
    kind: GroveKind, status: KubeObject, counts: dict[str, int], desired: int, serving: int
) -> tuple[str, str]:
    """Return why a workload is not ready: missing capacity, an update in progress, or pods that are not ready."""
    gated, scheduled = int(status.get("scheduleGatedReplicas") or 0), counts["scheduledReplicas"]
    condition_type = "PodCliqueScheduled" if kind == "PodClique" else "MinAvailableBreached"
    condition = _condition(status, condition_type) or {}
    if gated:
        return CAPACITY, f"{gated} replicas are not scheduled"
    if condition.get("status") == "False" and str(condition.get("reason", "")).startswith("InsufficientScheduled"):
        return CAPACITY, f"{condition['reason']}: {condition.get('message', '')}"
    if 0 < scheduled < desired:
        return CAPACITY, f"{scheduled} of {desired} replicas are scheduled"
    if counts["updatedReplicas"] != desired:
        return UPDATING, f"{counts['updatedReplicas']} of {desired} replicas are updated"
    if counts["replicas"] != desired:
        return UPDATING, f"{counts['replicas']} replicas exist; {desired} are desired"
    return PODS, f"{serving} of {desired} replicas are ready"


def _desired(observed: KubeObject) -> int:
    replicas = (observed.get("spec") or {}).get("replicas")
    return 1 if replicas is None else int(replicas)


def _condition(status: KubeObject, name: str) -> dict[str, Any] | None:
    return next((one for one in status.get("conditions") or [] if one.get("type") == name), None)
