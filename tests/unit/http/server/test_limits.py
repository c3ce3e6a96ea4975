"""Limits of the HTTP service, and their sources."""

import resource

import pytest

from dynamo.core.errors import ConfigError
from dynamo.http.server.limits import HttpLimits


def test_http_limits_are_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "DYN_HTTP_MAX_CONNECTIONS": "7",
        "DYN_HTTP_MAX_REQUESTS_PER_CONNECTION": "8",
        "DYN_HTTP_HEADER_LIMIT_KB": "9",
        "DYN_HTTP_MAX_HEADERS": "10",
        "DYN_HTTP_BODY_LIMIT_MB": "11",
        "DYN_HTTP_BODIES_LIMIT_MB": "100",
        "DYN_HTTP_REQUEST_ARRIVAL_TIMEOUT_SECS": "12",
        "DYN_HTTP_KEEP_ALIVE_TIMEOUT_SECS": "13",
        "DYN_HTTP_UNSENT_LIMIT_KB": "64",
        "DYN_HTTP_SLOW_READER_TIMEOUT_SECS": "15",
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "0.5",
        "DYN_HTTP_REQUEST_TIMEOUT_SECS": "600",
        "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "1500",
        "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": "250",
    }.items():
        monkeypatch.setenv(variable, value)
    assert HttpLimits.from_environment() == HttpLimits(
        7, 8, 9 << 10, 10, 11 << 20, 100 << 20, 12.0, 13.0, 64 << 10, 15.0, 0.5, 600.0, 1.5, 0.25
    )


@pytest.mark.parametrize("value", ["-1", "many", "nan", "inf"])
def test_http_limit_error_names_an_invalid_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DYN_HTTP_SLOW_READER_TIMEOUT_SECS", value)
    with pytest.raises(ConfigError, match="DYN_HTTP_SLOW_READER_TIMEOUT_SECS"):
        HttpLimits.from_environment()


def test_connection_limit_leaves_file_descriptors_for_other_uses() -> None:
    assert HttpLimits(connections=5).connections_max() == 5
    assert 0 < HttpLimits().connections_max() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
