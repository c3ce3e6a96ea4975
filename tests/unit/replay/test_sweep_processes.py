"""Child processes of a sweep exchange JSON lines with their parent."""

import io
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay import sweep_processes
from dynamo.replay.config import ReplayConfig
from dynamo.replay.sweep_processes import SweepFailed, run_in_processes, serve

CONFIG = ReplayConfig(input_tokens=10, output_tokens=2, request_count=1, request_rate=1.0)


class FakeChild:
    """Child process that answers every line with one line."""

    def __init__(self, answer: bytes) -> None:
        self.stdin = io.BytesIO()
        self.stdout = io.BytesIO(answer * 10)

    def kill(self) -> None:
        """Do nothing: no process runs."""

    def wait(self, timeout: float) -> None:
        """Do nothing: no process runs."""


def run_with(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> list[dict[str, Any]]:
    monkeypatch.setattr(sweep_processes, "_start", lambda: FakeChild(answer))
    return list(run_in_processes([(CONFIG, {"num_workers": count}) for count in (1, 2, 3)], 2))


def test_sweep_processes_return_a_result_for_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, b'{"row":{"workers":1}}\n') == [{"workers": 1}] * 3


def test_sweep_processes_raise_config_error_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="num_workers 0"):
        run_with(monkeypatch, b'{"config_error":"num_workers 0: expected 1 or more"}\n')


def test_sweep_processes_report_a_child_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SweepFailed, match="num_workers"):
        run_with(monkeypatch, b"")


def test_sweep_child_returns_a_result_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    tasks = b"".join(msgspec.json.encode((CONFIG, {"num_workers": count})) + b"\n" for count in (1, 0))
    streams = SimpleNamespace(
        stdin=SimpleNamespace(buffer=io.BytesIO(tasks)), stdout=SimpleNamespace(buffer=written), flags=None
    )
    monkeypatch.setattr(sweep_processes, "sys", streams)

    def run(task: tuple[ReplayConfig, dict[str, Any]]) -> dict[str, Any]:
        config, knobs = task
        assert config == CONFIG
        if not knobs["num_workers"]:
            raise ConfigError("none")
        return knobs

    serve(run)
    assert [json.loads(line) for line in written.getvalue().splitlines()] == [
        {"row": {"num_workers": 1}},
        {"config_error": "none"},
    ]
