"""Authentication, rate limits and CORS of a request, evaluated on its headers."""

import os
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.server.cors import Cors
from dynamo.http.server.gate import OPEN, Gate, KeyMetrics, Keys

KEY = [(b"authorization", b"Bearer sk-secret-1")]


class GateHarness:
    """A gate and its metrics."""

    def __init__(self, keys: Keys | None = None, cors: Cors | None = None) -> None:
        self.registry = MetricsRegistry()
        self.gate = Gate({b"/health"}, KeyMetrics(self.registry, "p"), cors=cors, keys=keys, now=lambda: 0.0)


def write_keys(path: Path, key: str, more: str = "") -> None:
    path.write_text(f'[[keys]]\nname = "team"\nkey = "{key}"\n{more}')


def test_gate_without_keys_and_origins_is_open() -> None:
    assert GateHarness().gate.judge(b"POST", b"/v1/x", []) is OPEN


def test_health_probes_require_no_key() -> None:
    gate = GateHarness(Keys(["sk-secret-1"], None)).gate
    assert gate.judge(b"GET", b"/health", []).refusal is None
    reported = gate.judge(b"GET", b"/healthy", []).refusal
    assert reported is not None and reported.status == 401


def test_key_usage_metrics_have_the_key_name(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", "sk-secret-1", "requests_per_minute = 1\n")
    requested = GateHarness(Keys(["sk-other-key"], str(tmp_path / "keys")))
    account = requested.gate.judge(b"POST", b"/v1/x", KEY).account
    assert account is not None and account.name == "team"
    account.spend(7)
    account.close()
    account.close()
    requested.gate.judge(b"POST", b"/v1/x", KEY)
    requested.gate.judge(b"POST", b"/v1/x", [])
    requested.gate.judge(b"POST", b"/v1/x", [(b"x-api-key", b"wrong-key")])
    text = requested.registry.render()
    assert 'p_api_key_requests_total{key="team"} 1' in text
    assert 'p_api_key_tokens_total{key="team"} 7' in text
    assert 'p_api_key_refusals_total{key="team",reason="requests_per_minute"} 1' in text
    assert 'p_api_key_refusals_total{key="",reason="no_key"} 1' in text
    assert 'p_api_key_refusals_total{key="",reason="wrong_key"} 1' in text
    assert "sk-secret" not in text and "sk-other" not in text


def test_changed_keys_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, "sk-secret-1")
    keys = Keys([], str(path))
    write_keys(path, "sk-secret-22")
    keys.refresh()
    assert keys.ring.find(KEY) is None
    assert keys.ring.find([(b"x-api-key", b"sk-secret-22")]) is not None


def test_broken_keys_file_keeps_the_previous_keys_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    write_keys(path, "sk-secret-1")
    keys = Keys([], str(path))
    path.write_text("[[keys")
    keys.refresh()
    keys.refresh()
    assert keys.ring.find(KEY) is not None
    assert len(caplog.records) == 1 and "failed to reload API keys" in caplog.text


def test_missing_keys_file_keeps_the_previous_keys_until_it_exists_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, "sk-secret-1")
    keys = Keys([], str(path))
    os.unlink(path)
    keys.refresh()
    assert keys.ring.find(KEY) is not None
    write_keys(path, "sk-secret-22")
    keys.refresh()
    assert keys.ring.find(KEY) is None


def test_keys_file_missing_at_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-keys-file"):
        Keys([], str(tmp_path / "none"))
    assert Keys.of([], None) is None


def test_refusal_carries_the_cors_headers() -> None:
    gate = GateHarness(Keys(["sk-secret-1"], None), Cors.of(["https://a.example"])).gate
    passage = gate.judge(b"POST", b"/v1/x", [(b"origin", b"https://a.example")])
    assert passage.refusal is not None and passage.refusal.status == 401
    assert (b"access-control-allow-origin", b"https://a.example") in passage.headers


def test_cors_preflight_requires_no_key() -> None:
    gate = GateHarness(Keys(["sk-secret-1"], None), Cors.of(["https://a.example"])).gate
    question = [(b"origin", b"https://a.example"), (b"access-control-request-method", b"POST")]
    assert gate.judge(b"OPTIONS", b"/v1/x", question).is_preflight


def test_keys_file_without_keys_is_refused_at_start_and_refuses_requests_after_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("keys = []\n")
    with pytest.raises(ConfigError, match=r"--api-keys-file .*: expected at least one key"):
        Keys.of([], str(path))
    write_keys(path, "sk-secret-1")
    keys = Keys([], str(path))
    path.write_text("keys = []\n")
    keys.refresh()
    refusal = GateHarness(keys).gate.judge(b"POST", b"/v1/x", KEY).refusal
    assert refusal is not None and refusal.status == 401


def test_former_key_names_resolve_only_for_keys_of_the_file(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", "sk-secret-1")
    keys = Keys(["sk-secret-2"], str(tmp_path / "keys"), ["sk-secret-3"])
    assert keys.owner_of_name("team") == keys.ring.owner_of("team")
    assert [keys.owner_of_name(name) for name in ("key-1", "admin-1", "unknown")] == [None, None, None]
