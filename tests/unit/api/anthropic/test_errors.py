"""Errors in Anthropic's form."""

import json

import pytest

from dynamo.api.anthropic.errors import error_body
from dynamo.serving.errors import ErrorAnswer


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
        (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (499, "invalid_request_error"),
        (500, "api_error"), (503, "api_error"), (504, "timeout_error"), (529, "overloaded_error"),
    ],
)  # fmt: skip
def test_error_status_has_an_anthropic_error_type(status: int, kind: str) -> None:
    body = json.loads(error_body(ErrorAnswer(status, "why")))
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_overload_has_its_error_type_for_every_status() -> None:
    assert json.loads(error_body(ErrorAnswer(503, "busy", code="overloaded")))["error"]["type"] == "overloaded_error"
