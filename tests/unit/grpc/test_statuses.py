"""Which gRPC status a failure becomes."""

import pytest

from dynamo.core.errors import (
    Cancelled,
    Disconnected,
    DynamoException,
    InvalidArgument,
    NotFound,
    NotReady,
    Overloaded,
    ResponseTimeout,
    Unknown,
)
from dynamo.grpc.statuses import RequestRefused, shown, status_of
from dynamo.serving.errors import ErrorAnswer


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidArgument("x"), "INVALID_ARGUMENT"),
        (NotFound("x"), "NOT_FOUND"),
        (NotReady("x"), "UNAVAILABLE"),
        (Disconnected("x"), "UNAVAILABLE"),
        (Overloaded("x"), "RESOURCE_EXHAUSTED"),
        (ResponseTimeout("x"), "DEADLINE_EXCEEDED"),
        (Cancelled("x"), "CANCELLED"),
        (Unknown("secret"), "INTERNAL"),
        (RequestRefused(ErrorAnswer(401, "x")), "UNAUTHENTICATED"),
        (RequestRefused(ErrorAnswer(429, "x")), "RESOURCE_EXHAUSTED"),
    ],
)
def test_each_error_has_a_grpc_status(error: DynamoException, status: str) -> None:
    name, reported = status_of(error)
    assert name == status
    assert "secret" not in reported


def test_overload_is_resource_exhausted_regardless_of_its_http_status() -> None:
    assert status_of(RequestRefused(ErrorAnswer(503, "x", label="overload")))[0] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidArgument("text", is_public=False), "INVALID_ARGUMENT"), (Unknown("text"), "INTERNAL")],
)
def test_tensor_model_failure_returns_its_message(error: DynamoException, status: str) -> None:
    assert status_of(error)[1] != "text"
    assert status_of(shown(error)) == (status, "text")
