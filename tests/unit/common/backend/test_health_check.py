"""Requests of health checks."""

import pytest

from dynamo.common.backend import health_check


def test_health_check_payload_of_the_environment_replaces_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_HEALTH_CHECK_PAYLOAD", raising=False)
    payload = health_check.build_health_check_payload(7, extras={"stop_conditions": {"max_tokens": 2}})
    assert payload["token_ids"] == [7]
    assert payload["stop_conditions"] == {"max_tokens": 2}
    assert health_check.is_probe(payload)
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", '{"prompt": "x"}')
    assert health_check.build_raw_health_check_payload({"a": 1}) == {"prompt": "x", "_HEALTH_CHECK": True}


def test_invalid_health_check_flag_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert health_check.parse_health_check_payload_cli("[1]") is None
    assert "--health-check-payload [1]: must be a JSON object" in caplog.text
