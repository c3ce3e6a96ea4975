"""Which status an exception becomes, and the contents of its body."""

import json

import pytest

from dynamo.core import errors
from dynamo.serving.errors import answer_to, overload_status


@pytest.mark.parametrize(
    ("error", "status", "label"),
    [
        (errors.InvalidArgument("no"), 400, "validation"),
        (errors.NotFound("no"), 404, "not_found"),
        (errors.HttpError(429, "slow down"), 429, "validation"),
        (errors.HttpError(503, "gone"), 503, "internal"),
        (errors.HttpError(200, "odd"), 500, "internal"),
        (errors.Cancelled(), 499, "cancelled"),
        (errors.Overloaded(), 529, "overload"),
        (errors.CannotResume("with a seed"), 503, "unavailable"),
        (errors.WorkerOverloaded(), 529, "overload"),
        (errors.ConnectionTimeout(), 504, "response_timeout"),
        (errors.ResponseTimeout(), 504, "response_timeout"),
        (errors.CannotConnect(), 503, "unavailable"),
        (errors.StreamIncomplete(), 503, "unavailable"),
        (errors.EngineShutdown(), 503, "unavailable"),
        (errors.NotReady("warming up"), 503, "unavailable"),
        (errors.NoMatchingWorker("no eligible worker: lacks fast"), 500, "internal"),
        (errors.Unknown("secret"), 500, "internal"),
        (RuntimeError("secret"), 500, "internal"),
    ],
)
def test_error_response_has_a_status_and_label_for_each_error_class(
    error: BaseException, status: int, label: str
) -> None:
    reported = answer_to(error)
    assert (reported.status, reported.label) == (status, label)


def test_error_response_hides_engine_messages_except_invalid_arguments() -> None:
    assert "secret" not in answer_to(errors.Unknown("secret")).message
    assert "secret" not in answer_to(errors.HttpError(500, "secret")).message
    assert answer_to(errors.InvalidArgument("max_tokens must be positive", param="max_tokens")).message.startswith(
        "max_"
    )


def test_error_body_has_openai_and_upstream_fields() -> None:
    body = json.loads(answer_to(errors.InvalidArgument("bad", param="top_p")).body())
    assert body["error"] == {"message": "bad", "type": "invalid_request_error", "param": "top_p", "code": 400}
    assert (body["message"], body["type"], body["code"]) == ("bad", "Bad Request", 400)


def test_error_body_of_a_worker_failure_contains_its_backend_status() -> None:
    for error in (errors.Unknown("secret"), errors.HttpError(500, "secret")):
        assert json.loads(answer_to(error).flat_body()) == {
            "message": "Internal server error",
            "type": "Internal Server Error",
            "code": 500,
            "details": {"backend_status": 500},
        }
    assert "details" not in json.loads(answer_to(RuntimeError("of the frontend")).body())


@pytest.mark.parametrize(("text", "status"), [("503", 503), ("999", 999), ("99", 529), ("1000", 529), ("many", 529)])
def test_overload_status_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch, text: str, status: int) -> None:
    monkeypatch.setenv("DYN_HTTP_OVERLOAD_STATUS_CODE", text)
    overload_status.cache_clear()
    try:
        reported = answer_to(errors.Overloaded())
    finally:
        overload_status.cache_clear()
    assert reported.status == status
    assert reported.retry_after_s is not None


def test_error_event_is_one_server_sent_event() -> None:
    event = answer_to(errors.StreamIncomplete()).event()
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["code"] == "unavailable"
