"""Scale requests that planners send to a global planner, and its responses (endpoint `GlobalPlanner.scale_request`)."""

from typing import Any, Literal

import msgspec

MAX_TARGETS = 16
"""Targets of one request; a deployment has at most one per role."""
MAX_NAME = 253
"""Characters of a name, as in Kubernetes."""

ScaleResult = Literal["success", "error", "rejected", "scaling"]
WorkerRole = Literal["prefill", "decode"]


class TargetReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Desired number of replicas of one role."""

    sub_component_type: WorkerRole
    desired_replicas: int
    component_name: str | None = None


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a planner to scale a deployment."""

    caller_namespace: str
    graph_deployment_name: str
    k8s_namespace: str
    target_replicas: list[TargetReplica]
    blocking: bool = False
    timestamp: float | None = None
    predicted_load: dict[str, Any] | None = None

    @property
    def participant(self) -> str:
        """The key of the deployment: `<Kubernetes namespace>/<deployment name>`."""
        return f"{self.k8s_namespace}/{self.graph_deployment_name}"

    def problem(self) -> str | None:
        """Return the reason why the request cannot be processed; None if it can."""
        for name in ("caller_namespace", "graph_deployment_name", "k8s_namespace"):
            if not 0 < len(getattr(self, name)) <= MAX_NAME:
                return f"{name}: must have 1 to {MAX_NAME} characters"
        if len(self.target_replicas) > MAX_TARGETS:
            return f"target_replicas: {len(self.target_replicas)} targets, at most {MAX_TARGETS} are allowed"
        roles = [one.sub_component_type for one in self.target_replicas]
        if len(set(roles)) < len(roles):
            return "target_replicas: a role is given more than once"
        for one in self.target_replicas:
            if one.desired_replicas < 0:
                return f"target_replicas: desired_replicas {one.desired_replicas} of {one.sub_component_type}: must be 0 or more"
        return None


class ScaleResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of a global planner."""

    status: ScaleResult
    message: str = ""
    current_replicas: dict[str, int] = msgspec.field(default_factory=dict)
