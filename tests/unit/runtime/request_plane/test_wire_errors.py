"""Errors on the wire: ours are restored unchanged, and upstream's are understood."""

import asyncio
import inspect

import pytest

from dynamo.core import errors
from dynamo.core.errors import DynamoException, HttpError, InvalidArgument
from dynamo.runtime.request_plane.wire_errors import from_wire, refused, to_wire

LOCAL = {  # Messages that other implementations receive.
    errors.ConfigError: InvalidArgument,
    errors.CannotResume: errors.WorkerUnavailable,
    errors.InstanceTimeout: errors.WorkerUnavailable,
    errors.NoMatchingWorker: errors.WorkerUnavailable,
    errors.NotReady: errors.WorkerUnavailable,
    errors.RouterQueueLimitExceeded: errors.Overloaded,
    errors.StartupError: InvalidArgument,
    errors.StorageError: errors.Unknown,
    errors.SelectionServiceError: errors.Unknown,
}

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, DynamoException) and kind not in {DynamoException, HttpError, *LOCAL}
]


@pytest.mark.parametrize("kind", KINDS)
def test_wire_errors_round_trip_every_class(kind: type[DynamoException]) -> None:
    error = from_wire(to_wire(kind("why")))
    assert type(error) is kind
    assert str(error) == "why"


@pytest.mark.parametrize("kind", LOCAL)
def test_wire_error_of_a_local_class_is_sent_as_its_parent(kind: type[DynamoException]) -> None:
    assert type(from_wire(to_wire(kind("x")))) is LOCAL[kind]


def test_wire_error_keeps_the_name_of_the_wrong_parameter() -> None:
    error = from_wire(to_wire(InvalidArgument("too long", param="messages")))
    assert isinstance(error, InvalidArgument)
    assert error.param == "messages"
    assert "param" not in to_wire(InvalidArgument("x"))


@pytest.mark.parametrize("code", [200, 400, 401, 404, 408, 409, 413, 418, 429, 499, 500, 501, 502, 503, 504, 529])
def test_wire_error_keeps_a_chosen_http_status(code: int) -> None:
    error = from_wire(to_wire(HttpError(code, "teapot")))
    assert isinstance(error, HttpError)
    assert (error.code, error.message) == (code, "teapot")


@pytest.mark.parametrize("message", ['{"message": "m"}', '{"message": "m", "code": 1000}', "{", '{"code": 5, "x": 1}'])
def test_wire_error_message_that_resembles_a_status_remains_a_message(message: str) -> None:
    error = from_wire({"error_type": "ResourceExhausted", "message": message})
    assert type(error) is errors.Overloaded
    assert str(error) == message


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("x"), errors.Unknown),
        (UnicodeError("x"), errors.Unknown),
        (TypeError("x"), errors.Unknown),
        (ConnectionResetError("x"), errors.Disconnected),
        (TimeoutError("x"), errors.ConnectionTimeout),
        (asyncio.CancelledError("x"), errors.Cancelled),
        (KeyError("x"), errors.Unknown),
        (OSError("x"), errors.Unknown),
        (MemoryError("x"), errors.Unknown),
    ],
)
def test_wire_errors_map_builtin_exceptions_to_error_classes(
    raised: BaseException, kind: type[DynamoException]
) -> None:
    assert type(from_wire(to_wire(raised))) is kind


def test_wire_error_hides_engine_messages_about_invalid_requests_from_clients() -> None:
    blamed = from_wire(to_wire(refused(UnicodeError("secret"))))
    assert isinstance(blamed, InvalidArgument)
    assert (str(blamed), blamed.is_public) == ("ValueError: secret", False)
    meant = from_wire(to_wire(InvalidArgument("told")))
    assert isinstance(meant, InvalidArgument)
    assert meant.is_public


def test_wire_error_of_a_bug_is_unknown_and_names_its_class() -> None:
    error = from_wire(to_wire(RuntimeError("boom")))
    assert type(error) is errors.Unknown
    assert str(error) == "RuntimeError: boom"


# Bodies that a released 1.6.1 worker sent.
@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (
            {
                "error_type": {"Backend": "InvalidArgument"},
                "class": "InvalidRequest",
                "reason": "backend.invalid_argument",
                "message": "m",
            },
            InvalidArgument,
        ),
        (
            {"error_type": "WorkerUnavailable", "reason": "backend.worker_unavailable", "message": "m"},
            errors.WorkerUnavailable,
        ),
        ({"error_type": {"Backend": "EngineShutdown"}, "message": "m"}, errors.EngineShutdown),
        ({"error_type": "ResourceExhausted", "class": "RateLimited", "message": "m"}, errors.Overloaded),
        ({"error_type": {"Backend": "NewInTheNextRelease"}, "message": "m"}, errors.Unknown),
        ({"error_type": 5, "diagnostic": "m"}, errors.Unknown),
        ({"error_type": "InvalidArgument", "reason": "request.invalid", "message": "m"}, InvalidArgument),
        ("m", errors.Unknown),
    ],
)
def test_wire_errors_of_released_dynamo_are_understood(wire: object, kind: type[DynamoException]) -> None:
    error = from_wire(wire)
    assert type(error) is kind
    assert str(error) == "m"


def test_wire_errors_are_readable_by_released_dynamo() -> None:
    wire = to_wire(InvalidArgument("bad thing"))
    assert wire == {
        "error_type": {"Backend": "InvalidArgument"},
        "class": "InvalidRequest",
        "reason": "backend.invalid_argument",
        "message": "bad thing",
        "diagnostic": "bad thing",
        "public": {"type": "message", "message": "bad thing"},
    }


def test_wire_error_message_is_truncated() -> None:
    assert len(to_wire(errors.Unknown("x" * 100_000))["message"]) == 8192


class StatusError(Exception):
    """Error of an HTTP client, as a handler may raise it."""

    def __init__(self, name: str, status: object, message: object = "no such media") -> None:
        super().__init__("text")
        setattr(self, name, status)
        self.message = message


@pytest.mark.parametrize("name", ["status", "code"])
def test_wire_error_of_an_exception_with_status_and_message_keeps_the_status(name: str) -> None:
    error = from_wire(to_wire(StatusError(name, 415)))
    assert isinstance(error, HttpError)
    assert (error.code, error.message) == (415, "no such media")


@pytest.mark.parametrize(
    "error", [StatusError("status", 200), StatusError("status", "415"), StatusError("code", 415, None)]
)
def test_wire_error_of_an_exception_with_other_attributes_is_unknown(error: StatusError) -> None:
    assert type(from_wire(to_wire(error))) is errors.Unknown
