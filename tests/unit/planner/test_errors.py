"""Exceptions of the planner: both import paths, messages and attributes."""

import pytest

from dynamo.planner import errors
from dynamo.planner.utils import exceptions


def test_error_classes_are_equal_on_both_import_paths() -> None:
    assert exceptions.__all__ == errors.__all__
    assert all(getattr(exceptions, name) is getattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.DynamoGraphDeploymentNotReadyError("g"), "DynamoGraphDeployment is not ready (name: 'g')"),
        (errors.DuplicateSubComponentError("decode", ["b", "a"]), "found multiple: a, b"),
        (errors.DeploymentValidationError(["a", "b"]), "Service verification failed: a; b"),
        (errors.RolloutFailedError("g", "r"), "DGD 'g' rollingUpdate.phase is Failed: r."),
        (errors.EmptyTargetReplicasError(), "target_replicas cannot be empty"),
    ],
)
def test_planner_error_messages_name_their_cause(error: errors.PlannerError, message: str) -> None:
    assert message in str(error)


def test_component_errors_have_a_common_base() -> None:
    missing, invalid = errors.PowerAnnotationMissingError("c"), errors.PowerAnnotationInvalidError("c", "x")
    assert isinstance(missing, errors.ComponentError)
    assert (invalid.component_name, invalid.value) == ("c", "x")
