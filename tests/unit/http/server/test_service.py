"""Shutdown messages of the service."""

import json
from typing import Any, cast

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from dynamo.core.errors import ConfigError
from dynamo.http.server.service import crashed, not_served, tls_context

REQUEST = Request({"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b"", "server": None})


def test_unknown_path_error_names_the_path() -> None:
    answer = not_served(REQUEST, HTTPException(404))
    assert answer.status_code == 404
    assert json.loads(bytes(answer.body))["message"] == "Route not found: GET /x"


def test_unexpected_error_is_logged_but_not_returned(caplog: pytest.LogCaptureFixture) -> None:
    answer = crashed(REQUEST, ValueError("secret"))
    assert answer.status_code == 500 and b"secret" not in bytes(answer.body)
    assert "secret" in caplog.text


def test_client_disconnect_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    assert crashed(REQUEST, ClientDisconnect()).status_code == 499
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, None, "ca.pem"), "--tls-client-ca-cert-path requires"),
        (("cert.pem", None, None), "must be given together"),
        (("none.pem", "none.pem", None), "none.pem"),
    ],
)
def test_incomplete_tls_configuration_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tls_context(*given)


def test_tls_is_disabled_without_certificates() -> None:
    assert tls_context(None, None, cast(Any, None)) is None
