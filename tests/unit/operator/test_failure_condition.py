"""Condition of objects that cannot be reconciled, and statuses without the fields that a definition does not have."""

from typing import Any

import pytest

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import GRAPHS
from dynamo.operator.failure_condition import (
    MAX_MESSAGE,
    outdated_message,
    undeclared_field,
    with_failure,
    without_failure,
    without_field,
)

FIRST, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
READY = {"type": "Ready", "status": "True"}
SCHEMA_ERROR = (
    "failed to create typed patch object (space/chat; nvidia.com/v1beta1, Kind=DynamoGraphDeployment): "
    ".status.placement: field not declared in schema"
)


def test_failure_condition_preserves_other_conditions_and_its_time() -> None:
    value: dict[str, Any] = {"metadata": {"generation": 2}, "status": {"state": "pending", "conditions": [READY]}}
    status = with_failure(value, "ReconcileFailed", "403 Forbidden: no", FIRST)
    assert status["state"] == "pending"
    assert status["conditions"][0] == READY
    assert status["conditions"][1] == {
        "type": "Reconciled", "status": "False", "reason": "ReconcileFailed", "message": "403 Forbidden: no",
        "observedGeneration": 2, "lastTransitionTime": FIRST,
    }  # fmt: skip
    again = with_failure({**value, "status": status}, "ReconcileFailed", "x" * 2 * MAX_MESSAGE, LATER)
    assert [one["type"] for one in again["conditions"]] == ["Ready", "Reconciled"]
    assert (again["conditions"][1]["lastTransitionTime"], len(again["conditions"][1]["message"])) == (
        FIRST,
        MAX_MESSAGE,
    )
    assert without_failure(again) == value["status"]
    assert without_failure({}) == {}


def test_undeclared_field_is_read_from_the_server_error() -> None:
    assert undeclared_field(KubeRefused(500, "", SCHEMA_ERROR)) == ".status.placement"
    assert undeclared_field(KubeRefused(500, "InternalError", "etcdserver: timeout")) is None


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (".status.a", {"b": {"c": [{"d": 1}], "e": 2}}),
        (".status.b.e", {"a": 1, "b": {"c": [{"d": 1}]}}),
        ('.status.b.c[name="x"].d', {"a": 1, "b": {"e": 2}}),
        (".status.z", None),
        (".status", None),
    ],
)
def test_undeclared_field_or_its_list_is_removed(path: str, rest: Any) -> None:
    assert without_field({"a": 1, "b": {"c": [{"d": 1}], "e": 2}}, path) == rest


def test_outdated_definition_message_names_fields_and_remedy() -> None:
    assert outdated_message(GRAPHS, [".status.a", ".status.b"]) == (
        "the resource definition of DynamoGraphDeployment does not have .status.a, .status.b: "
        "install the resource definitions of the operator's version (deploy/crds)"
    )
