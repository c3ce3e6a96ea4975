"""Status of a request while one pass plans it: phase, conditions and events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dynamo.operator.reconcile.conditions import with_condition
from dynamo.operator.reconcile.plan import EventNote, ObjectPatch, Plan
from dynamo.protocols.kubernetes.common import Condition, KubeObject, encode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest, RequestPhase, RequestStatus

VALIDATION, PROFILING, SPEC_GENERATED = "Validation", "Profiling", "SpecGenerated"
DEPLOYMENT_READY, SUCCEEDED = "DeploymentReady", "Succeeded"
OUTCOMES: dict[RequestPhase, tuple[bool, str, str]] = {
    "Pending": (False, "Pending", "DGDR is pending"),
    "Profiling": (False, "Profiling", "Profiling is in progress"),
    "Ready": (True, "SpecGenerated", "Profiling complete, spec available"),
    "Deploying": (False, "Deploying", "Deployment is in progress"),
    "Deployed": (True, "Deployed", "Deployment is healthy"),
    "Failed": (False, "Failed", "DGDR has failed"),
}
"""Condition `Succeeded` of each phase: whether it is true, reason and message."""
FAILURES = {
    VALIDATION: "Validation",
    PROFILING: "Profiling",
    SPEC_GENERATED: "Spec generation",
    DEPLOYMENT_READY: "Deployment",
}
"""What has failed when a condition is false."""


@dataclass(slots=True)
class StatusDraft:
    """Next status of a request."""

    status: RequestStatus
    generation: int
    now: str
    events: list[EventNote] = field(default_factory=list)

    @classmethod
    def of(cls, request: DynamoGraphDeploymentRequest, now: str) -> "StatusDraft":
        """Return a copy of a request's status."""
        known = request.status or RequestStatus()
        status = msgspec.structs.replace(
            known, conditions=[msgspec.structs.replace(one) for one in known.conditions or ()]
        )
        return cls(status, request.metadata.generation, now)

    def condition(self, kind: str) -> Condition | None:
        """Return a condition."""
        return next((one for one in self.status.conditions or () if one.type == kind), None)

    def set(self, kind: str, is_true: bool, reason: str, message: str) -> None:
        """Set a condition."""
        changed = Condition(
            type=kind,
            status="True" if is_true else "False",
            reason=reason,
            message=message,
            observed_generation=self.status.observed_generation or self.generation,
        )
        self.status.conditions = with_condition(self.status.conditions, changed, self.now)

    def note(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Add an event."""
        self.events.append(EventNote(kind, reason, message))

    def enter(self, phase: RequestPhase) -> None:
        """Change the phase, and the condition `Succeeded` with it."""
        self.status.phase = phase
        self.set(SUCCEEDED, *OUTCOMES[phase])

    def fail(self, kind: str, reason: str, message: str, *, event: str) -> None:
        """Enter the phase `Failed` for a reason that a condition gives, and the condition `Succeeded` too."""
        self.enter("Failed")
        self.set(kind, False, reason, message)
        self.set(SUCCEEDED, False, reason, f"{FAILURES[kind]} failed: {message}")
        self.note("Warning", event, message)

    def plan(
        self,
        create: Sequence[KubeObject] = (),
        *,
        apply: Sequence[KubeObject] = (),
        patch: Sequence[ObjectPatch] = (),
        if_rejected: Callable[[str], Plan] | None = None,
        annotations: dict[str, str | None] | None = None,
        requeue_s: float | None = None,
    ) -> Plan:
        """Return the plan with this status; the objects of `create` outlive the request."""
        return Plan(
            create_unowned=create,
            apply=apply,
            patch=patch,
            if_rejected=if_rejected,
            status=encode(self.status),
            annotations=annotations or {},
            events=tuple(self.events),
            requeue_s=requeue_s,
        )
