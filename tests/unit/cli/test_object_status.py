"""State of requests, models and checkpoints: phase, next step, and whether to wait any longer."""

from typing import Any

import pytest

from dynamo.cli.object_status import HEAD, report_of, target_of
from dynamo.core.errors import ConfigError
from dynamo.k8s.kinds import CHECKPOINTS, GRAPH_REQUESTS, GRAPHS, MODELS, ObjectKind

Object = dict[str, Any]


def condition(kind: str, status: str, reason: str, message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026"}


def named(status: Object, **spec: Any) -> Object:
    return {"metadata": {"name": "chat"}, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("chat", (None, "chat")),
        ("dgdr/chat", (GRAPH_REQUESTS, "chat")),
        ("DynamoGraphDeployment/chat", (GRAPHS, "chat")),
        ("dynamomodels/m", (MODELS, "m")),
    ],
)
def test_target_is_a_name_with_an_optional_kind(text: str, found: tuple[ObjectKind | None, str]) -> None:
    assert target_of(text) == found


def test_unknown_kind_error_lists_the_known_kinds() -> None:
    with pytest.raises(ConfigError, match=r"pod/x: 'pod' must be one of dgd .*dckpt"):
        target_of("pod/x")


@pytest.mark.parametrize(
    ("status", "title", "next_step", "is_ready", "is_final"),
    [
        ({}, "not reported", "check that it runs", False, False),
        (
            {"phase": "Profiling", "profilingPhase": "SweepingDecode", "profilingJobName": "profile-chat"},
            "Profiling (SweepingDecode)",
            "job profile-chat ends; its output: dynamo deploy logs dgdr/chat",
            False,
            False,
        ),
        (
            {
                "phase": "Profiling",
                "conditions": [condition("Profiling", "False", "ImagePullFailed", "pod p: image i cannot be pulled")],
            },
            "Profiling",
            "make the image available: pod p: image i cannot be pulled",
            False,
            False,
        ),
        ({"phase": "Ready"}, "Ready", "apply the graph", True, True),
        (
            {"phase": "Deploying", "dgdName": "d", "deploymentInfo": {"replicas": 3, "availableReplicas": 1}},
            "Deploying, 1/3 replicas of d available",
            "graph d becomes ready: dynamo deploy status dgd/d",
            False,
            False,
        ),
        (
            {
                "phase": "Failed",
                "conditions": [
                    condition("Validation", "False", "ValidationFailed", "spec.image is missing"),
                    condition("Succeeded", "False", "Failed", "DGDR has failed"),
                ],
            },
            "Failed",
            "correct the cause (spec.image is missing)",
            False,
            True,
        ),
    ],
)
def test_request_report_shows_its_phase_and_the_next_step(
    status: Object, title: str, next_step: str, is_ready: bool, is_final: bool
) -> None:
    report = report_of(GRAPH_REQUESTS, named(status), [])
    assert report.title == f"DynamoGraphDeploymentRequest/chat: {title}"
    assert next_step in report.notes[-1]
    assert (report.is_ready, report.is_final) == (is_ready, is_final)


def test_conditions_are_a_table_and_the_last_event_is_that_of_the_object() -> None:
    def event(kind: str, message: str, at: str) -> Object:
        return {
            "involvedObject": {"kind": kind, "name": "chat"},
            "reason": "R",
            "message": message,
            "lastTimestamp": at,
        }

    kind = GRAPH_REQUESTS.kind
    events = [event(kind, "old", "2026-01-01"), event(kind, "new", "2026-01-02"), event("Job", "other", "2026-01-03")]
    status = {"phase": "Deployed", "conditions": [condition("Validation", "True", "ValidationSucceeded", "a\nb")]}
    report = report_of(GRAPH_REQUESTS, named(status), events)
    assert report.rows == [HEAD, ("Validation", "True", "ValidationSucceeded", "2026", "a b")]
    assert (report.notes, report.is_ready) == (["last event: R: new"], True)


@pytest.mark.parametrize(
    ("status", "title", "next_step", "is_ready"),
    [
        ({}, "not reported", "check that it runs", False),
        ({"totalEndpoints": 0}, "no endpoints", "modelRef.name 'base' gets ready pods", False),
        (
            {
                "totalEndpoints": 2,
                "readyEndpoints": 1,
                "endpoints": [{"podName": "p", "ready": True}, {"podName": "q", "ready": False}],
            },
            "1/2 endpoints ready",
            "these pods serve the model: q",
            False,
        ),
        ({"totalEndpoints": 1, "readyEndpoints": 1}, "1/1 endpoints ready", "", True),
    ],
)
def test_model_report_shows_its_endpoints(status: Object, title: str, next_step: str, is_ready: bool) -> None:
    report = report_of(MODELS, named(status, baseModelName="base"), [])
    assert (report.title, report.is_ready) == (f"DynamoModel/chat: {title}", is_ready)
    assert next_step in " ".join(report.notes)


@pytest.mark.parametrize(
    ("phase", "next_step", "is_ready", "is_final"),
    [
        ("Pending", "job j starts", False, False),
        ("Creating", "dynamo deploy logs dckpt/chat", False, False),
        ("Ready", "", True, True),
        ("Failed", "correct the cause (m)", False, True),
    ],
)
def test_checkpoint_report_shows_its_job(phase: str, next_step: str, is_ready: bool, is_final: bool) -> None:
    report = report_of(CHECKPOINTS, named({"phase": phase, "jobName": "j", "message": "m"}), [])
    assert next_step in " ".join(report.notes)
    assert (report.is_ready, report.is_final) == (is_ready, is_final)
