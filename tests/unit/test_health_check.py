"""Payloads of health checks that the environment may replace."""

from pathlib import Path

import pytest

from dynamo.health_check import HEALTH_CHECK_KEY, HealthCheckPayload, load_health_check_from_env
from dynamo.runtime.canary import MARKER

VARIABLE = "DYN_HEALTH_CHECK_PAYLOAD"


class Payload(HealthCheckPayload):
    """One of an engine."""

    def __init__(self) -> None:
        self.default_payload = {"token_ids": [1]}
        super().__init__()


def test_health_check_key_equals_the_canary_marker() -> None:
    assert HEALTH_CHECK_KEY == MARKER


def test_health_check_payload_of_the_environment_overrides_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Payload().to_dict() == {"token_ids": [1]}
    monkeypatch.setenv(VARIABLE, '{"token_ids": [2]}')
    assert Payload().to_dict() == {"token_ids": [2]}
    (tmp_path / "payload.json").write_text('{"token_ids": [3]}')
    monkeypatch.setenv(VARIABLE, f"@{tmp_path / 'payload.json'}")
    assert Payload().to_dict() == {"token_ids": [3]}


@pytest.mark.parametrize("text", ["{", "[1]", "@nowhere.json"])
def test_invalid_health_check_payload_is_logged_and_ignored(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert load_health_check_from_env() is None
    assert VARIABLE in caplog.text
    assert Payload().to_dict() == {"token_ids": [1]}


def test_health_check_payload_without_a_default_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="HealthCheckPayload"):
        HealthCheckPayload()
