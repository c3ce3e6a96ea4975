"""Status of a request during a pass: conditions, phases and the copy of the recorded facts."""

from tests.unit.operator.reconcile.requests.request_cluster import request_object

from dynamo.operator.reconcile.requests.draft import SUCCEEDED, VALIDATION, StatusDraft
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest

THEN, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def request() -> DynamoGraphDeploymentRequest:
    conditions = [{"type": SUCCEEDED, "status": "False", "reason": "Pending", "lastTransitionTime": THEN}]
    status = {"phase": "Pending", "conditions": conditions, "observedGeneration": 1}
    return decode(DynamoGraphDeploymentRequest, {**request_object(), "status": status})


def test_draft_changes_do_not_modify_the_request() -> None:
    value = request()
    draft = StatusDraft.of(value, NOW)
    draft.enter("Deployed")
    assert value.status is not None and value.status.conditions is not None
    assert (value.status.phase, value.status.conditions[0].status) == ("Pending", "False")


def test_condition_transition_time_changes_only_with_its_status() -> None:
    draft = StatusDraft.of(request(), NOW)
    draft.enter("Profiling")
    known = draft.condition(SUCCEEDED)
    assert known is not None and (known.reason, known.last_transition_time) == ("Profiling", THEN)
    draft.enter("Ready")
    known = draft.condition(SUCCEEDED)
    assert known is not None and (known.status, known.last_transition_time) == ("True", NOW)


def test_failure_sets_a_phase_a_condition_and_an_event() -> None:
    draft = StatusDraft.of(request(), NOW)
    draft.fail(VALIDATION, "ValidationFailed", "why", event="ValidationFailed")
    plan = draft.plan()
    assert plan.status is not None and plan.status["phase"] == "Failed"
    assert [(one["type"], one["reason"]) for one in plan.status["conditions"]] == [
        (SUCCEEDED, "ValidationFailed"),
        (VALIDATION, "ValidationFailed"),
    ]
    assert [(one.type, one.reason, one.message) for one in plan.events] == [("Warning", "ValidationFailed", "why")]
