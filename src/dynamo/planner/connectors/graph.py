"""State of a DynamoGraphDeployment as the planner reads it. Pure: objects are JSON data of v1beta1.

A component serves `availableReplicas`, or `readyReplicas` where the first is absent. It is stable if desired, updated and
serving replicas are equal. Replicas that are missing only because their pods are starting are pending; a pod that is
terminating or failed, or a status that describes an older specification, means that they are missing for another reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.errors import DuplicateSubComponentError, SubComponentNotFoundError
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.planner import RolloutPhase

GENERIC_WORKER = "worker"
"""Type of an aggregated worker."""
WORKER_TYPES = frozenset({GENERIC_WORKER, PREFILL, DECODE})
SUFFIXED_KINDS = frozenset({"Deployment", "LeaderWorkerSet"})
"""Workloads whose workers register in a namespace with their generation as suffix."""
GENERATION_ANNOTATIONS = ("nvidia.com/current-worker-hash", "nvidia.com/current-worker-hash-v2")
GRAPH_LABEL = "nvidia.com/dynamo-graph-deployment-name"
CAPTURE_LABEL = "nvidia.com/snapshot-job-uid"
"""Label of pods that capture a checkpoint; they do not serve."""
SETTLED = frozenset({RolloutPhase.NONE, RolloutPhase.COMPLETED})
STARTING = frozenset({"Pending", "Running"})
GROUPED_KIND = "PodCliqueScalingGroup"
"""Its `updatedReplicas` contain available replicas only."""


@dataclass(frozen=True, slots=True)
class RoleReplicas:
    """Replicas of one component."""

    component: str
    desired: int
    serving: int
    is_stable: bool


class PlannedGraph:
    """One DynamoGraphDeployment and its pods."""

    def __init__(self, value: KubeObject, pods: Sequence[KubeObject] | None = None) -> None:
        """Read the state; `pods` is None if they may not be listed."""
        self.value = value
        self.pods = None if pods is None else [pod for pod in pods if CAPTURE_LABEL not in _labels(pod)]
        self.status: Mapping[str, Any] = value.get("status") or {}

    @property
    def name(self) -> str:
        """Name of the object."""
        name: str = self.value["metadata"]["name"]
        return name

    @property
    def components(self) -> dict[str, Mapping[str, Any]]:
        """The components by name."""
        return {one["name"]: one for one in self.value["spec"].get("components") or []}

    @property
    def is_ready(self) -> bool:
        """Whether the condition Ready is true."""
        conditions = self.status.get("conditions") or []
        return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)

    @property
    def is_observed(self) -> bool:
        """Whether the status describes the present specification."""
        generation, observed = self.value["metadata"].get("generation"), self.status.get("observedGeneration")
        return generation is not None and observed is not None and int(observed) >= int(generation)

    @property
    def rollout(self) -> RolloutPhase:
        """Phase of the rolling update."""
        return RolloutPhase((self.status.get("rollingUpdate") or {}).get("phase") or "")

    def component_of(self, role: str) -> str:
        """Return the component of a role: the only one of that type, or for decode the only generic worker.

        Raise `DuplicateSubComponentError` or `SubComponentNotFoundError`.
        """
        named = [name for name, one in self.components.items() if one.get("type") == role]
        if not named and role == DECODE:
            named = [name for name, one in self.components.items() if one.get("type") == GENERIC_WORKER]
        if len(named) > 1:
            raise DuplicateSubComponentError(role, named)
        if not named:
            raise SubComponentNotFoundError(role)
        return named[0]

    def component_status(self, name: str) -> Mapping[str, Any]:
        """Return the status of a component; empty if there is none."""
        found: Mapping[str, Any] = (self.status.get("components") or {}).get(name) or {}
        return found

    def replicas(self, name: str) -> RoleReplicas:
        """Return the replicas of a component."""
        status = self.component_status(name)
        desired = int(self.components[name].get("replicas") or 0)
        available = status.get("availableReplicas")
        serving = int(status.get("readyReplicas") or 0) if available is None else int(available)
        return RoleReplicas(name, desired, serving, desired == int(status.get("updatedReplicas") or 0) == serving)

    @property
    def has_ending_pods(self) -> bool:
        """Whether a pod is terminating; False if pods may not be listed."""
        return any(pod["metadata"].get("deletionTimestamp") for pod in self.pods or ())

    def pending(self) -> dict[str, int]:
        """Return the replicas of each worker component that only have to start; empty if anything else is under way."""
        pods = self.pods
        if not pods or not self.is_observed or self.rollout not in SETTLED or self.has_ending_pods:
            return {}
        if any((pod.get("status") or {}).get("phase") not in STARTING for pod in pods):
            return {}
        found = {}
        for name, component in self.components.items():
            if component.get("type") == "planner":
                continue
            replicas, status = self.replicas(name), self.component_status(name)
            existing, updated = status.get("replicas"), status.get("updatedReplicas")
            if existing is None or updated is None or not 0 <= replicas.serving <= existing <= replicas.desired:
                return {}
            if updated != (replicas.serving if status.get("componentKind") == GROUPED_KIND else existing):
                return {}
            if replicas.is_stable:
                continue
            if component.get("type") not in WORKER_TYPES or replicas.desired <= replicas.serving:
                return {}
            found[name] = replicas.desired - replicas.serving
        return found

    @property
    def is_settled(self) -> bool:
        """Whether no component is changing, so that numbers may be set."""
        others = (name for name, one in self.components.items() if one.get("type") != "planner")
        return (
            self.is_ready
            and self.is_observed
            and self.rollout in SETTLED
            and not self.has_ending_pods
            and all(self.replicas(name).is_stable for name in others)
        )

    def hold(self, changes: Mapping[str, int]) -> str:
        """Return why these numbers may not be set now; empty if they may."""
        if self.is_settled:
            return ""
        gives_up = all(
            number <= self.replicas(name).serving and number < self.replicas(name).desired
            for name, number in changes.items()
        )
        if gives_up and self.pending():
            return ""
        if self.rollout not in SETTLED:
            return f"rolling update: {self.rollout.value}"
        if not self.is_ready:
            return f"DynamoGraphDeployment {self.name} is not ready"
        return f"DynamoGraphDeployment {self.name}: replicas are starting or ending"

    def worker_namespace(self, base: str) -> str:
        """Return the Dynamo namespace in which the present generation of workers registers."""
        annotations = self.value["metadata"].get("annotations") or {}
        generation = next((annotations[name] for name in GENERATION_ANNOTATIONS if annotations.get(name)), "")
        for name, component in self.components.items():
            status = self.component_status(name)
            if component.get("type") in WORKER_TYPES and status:
                if status.get("runtimeNamespace"):
                    return str(status["runtimeNamespace"])
                is_suffixed = generation and status.get("componentKind") in SUFFIXED_KINDS
                return f"{base}-{generation}" if is_suffixed else base
        return base

    def gpus(self, name: str) -> tuple[int | None, int | None]:
        """Return the GPUs of an engine and of a replica; None where the operator has not reported them yet."""
        if not self.is_observed:
            return None, None
        status = self.component_status(name)
        return status.get("gpusPerEngine") or None, status.get("gpusPerReplica") or None

    def watts(self, name: str) -> int | None:
        """Return the power limit of a replica; None if it is unknown."""
        watts, (_, gpus) = self.component_status(name).get("gpuPowerLimitWatts"), self.gpus(name)
        return None if not watts or gpus is None else int(watts) * gpus


def replicas_patch(graph: PlannedGraph, name: str, replicas: int) -> list[dict[str, Any]]:
    """Return the JSON patch that sets the replicas of a component, and fails if the list has changed meanwhile."""
    index = list(graph.components).index(name)
    return [
        {"op": "test", "path": f"/spec/components/{index}/name", "value": name},
        {"op": "add", "path": f"/spec/components/{index}/replicas", "value": replicas},
    ]


def adapter_name(graph: str, component: str) -> str:
    """Return the name of a component's DynamoGraphDeploymentScalingAdapter."""
    return f"{graph}-{component.lower()}"


def _labels(pod: KubeObject) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}
