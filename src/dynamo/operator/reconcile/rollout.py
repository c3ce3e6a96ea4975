"""Managed rolling update: how many workers of the new and of each earlier generation run.

A generation is the set of workers with one hash. During an update both run: at most `desired + surge` replicas are
declared and at least `desired - unavailable` stay available. A generation that is abandoned half-way is treated as an
earlier one, so an update that is reverted or replaced needs no special case.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import MAX_SURGE, MAX_UNAVAILABLE, STRATEGY, replicas_of
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoComponentDeployment

DEFAULT_PERCENT = "25%"


@dataclass(frozen=True, slots=True)
class WorkerReplicas:
    """Replicas of one component in one or several generations."""

    declared: int = 0
    available: int = 0
    running: int = 0
    """Pods that are not terminated, terminating ones excluded."""

    def __add__(self, other: "WorkerReplicas") -> "WorkerReplicas":
        return WorkerReplicas(
            self.declared + other.declared, self.available + other.available, self.running + other.running
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTargets:
    """Replicas that each generation of one component should declare."""

    new: int
    old: Mapping[str, int] = field(default_factory=dict)
    """By the name of the DynamoComponentDeployment."""


def generation_of(deployed: DynamoComponentDeployment) -> WorkerReplicas:
    """Return the replicas of one DynamoComponentDeployment."""
    reported = deployed.status.component if deployed.status else None
    return WorkerReplicas(
        1 if deployed.spec.replicas is None else deployed.spec.replicas,
        (reported and reported.available_replicas) or 0,
        (reported and reported.replicas) or 0,
    )


def replica_targets(
    component: ComponentSpec,
    new: WorkerReplicas,
    old: Sequence[DynamoComponentDeployment],
    annotations: Mapping[str, str],
) -> ReplicaTargets:
    """Return the next step of a component's update. Without earlier generations this is the desired state.

    `annotations` give the strategy: Recreate, or RollingUpdate with max-surge and max-unavailable.
    """
    desired = replicas_of(component)
    surge, unavailable = limits(annotations, desired)
    if not old:
        return ReplicaTargets(new=desired)
    total = sum((generation_of(one) for one in old), WorkerReplicas())
    if annotations.get(STRATEGY) == "Recreate":
        return ReplicaTargets(
            new=desired if all(is_drained(one) for one in old) else 0, old={one.metadata.name: 0 for one in old}
        )
    floor = desired - unavailable
    new_unavailable = max(0, new.declared - new.available)
    removable = max(0, total.declared + new.declared - floor - new_unavailable)
    unhealthy = max(0, total.declared - total.available)
    surplus = max(0, total.available + new.available - floor)
    old_target = max(0, total.declared - min(removable, unhealthy + surplus))
    budget = max(0, desired + surge - total.declared - new.declared)
    return ReplicaTargets(new=min(desired, new.declared + budget), old=_allocate(old, old_target))


def limits(annotations: Mapping[str, str], desired: int) -> tuple[int, int]:
    """Return how many replicas may be added and how many may be missing; percentages round up and down.

    Raise `WorkloadError` for an annotation that is neither.
    """
    surge = _scaled(MAX_SURGE, annotations, desired, is_up=True)
    unavailable = min(desired, _scaled(MAX_UNAVAILABLE, annotations, desired, is_up=False))
    return (1, 0) if surge == unavailable == 0 else (surge, unavailable)


def is_drained(deployed: DynamoComponentDeployment) -> bool:
    """Return whether an earlier generation has no pods left and its controller has seen that it should not."""
    status = deployed.status
    return (
        deployed.spec.replicas == 0
        and status is not None
        and (status.observed_generation or 0) >= deployed.metadata.generation
        and (status.component is None or not status.component.replicas)
    )


def _allocate(old: Sequence[DynamoComponentDeployment], target: int) -> dict[str, int]:
    """Divide the replicas between earlier generations: unavailable ones end first, then those of the oldest."""
    found = {one.metadata.name: generation_of(one) for one in old}
    by_age = [
        one.metadata.name
        for one in sorted(old, key=lambda it: (it.metadata.creation_timestamp or "", it.metadata.name))
    ]
    given = {name: min(state.declared, state.available) for name, state in found.items()}
    excess = sum(given.values()) - target
    for name in by_age:
        removed = min(given[name], max(0, excess))
        given[name] -= removed
        excess -= removed
    for name in reversed(by_age):
        added = min(found[name].declared - given[name], max(0, -excess))
        given[name] += added
        excess += added
    return given


def _scaled(name: str, annotations: Mapping[str, str], whole: int, *, is_up: bool) -> int:
    text = annotations.get(name) or DEFAULT_PERCENT
    if not re.fullmatch(r"\d+%?", text):
        raise WorkloadError(f"annotation {name}: {text!r} is neither a number nor a percentage")
    if not text.endswith("%"):
        return int(text)
    product = int(text[:-1]) * whole
    return -(-product // 100) if is_up else product // 100
