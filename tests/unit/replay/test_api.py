"""Replay as functions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dynamo.replay
from dynamo.core.errors import InvalidArgument
from dynamo.replay import api
from dynamo.replay.api import TelemetryOptions, run_synthetic_trace_replay, run_trace_replay
from dynamo.replay.report import ReplayReport


def test_synthetic_load_returns_a_report() -> None:
    report = run_synthetic_trace_replay(128, 4, 3, replay_concurrency=1, capture_per_request=True)
    assert report.summary["completed_requests"] == 3
    assert report.per_request is not None
    assert len(report.per_request) == 3
    assert report.planner is None
    assert "telemetry" not in report.to_dict()


def test_single_trace_file_equals_a_list_of_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 2, "hash_ids": [1]}\n')
    assert run_trace_replay(trace).summary == run_trace_replay([trace]).summary


def test_samples_are_in_the_report() -> None:
    options = TelemetryOptions(sample_interval_ms=2.0)
    report = run_synthetic_trace_replay(128, 4, 3, replay_concurrency=1, telemetry_options=options)
    assert report.telemetry is not None
    assert report.telemetry.sample_interval_ms == 2.0
    assert report.to_dict()["telemetry"]["samples"]


def test_telemetry_samples_require_a_receiver() -> None:
    with pytest.raises(ValueError, match="at least one sink"):
        run_synthetic_trace_replay(1, 1, 1, telemetry_options=TelemetryOptions(capture_in_memory=False))
    assert TelemetryOptions(jsonl_path="samples").settings()["capture_telemetry"] is False
    assert TelemetryOptions(jsonl_path="samples", capture_in_memory=True).settings()["capture_telemetry"] is True


def test_planner_configuration_is_passed_to_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    planned = {"metadata": {"policy": "load"}, "ticks": [{}], "total_ticks": 1}

    def simulate(*_: Any, **settings: Any) -> Any:
        seen.update(settings)
        return SimpleNamespace(summary={}, per_request=None, coverage={}, telemetry=None, planner=planned)

    monkeypatch.setattr(api, "_run_mocker_synthetic_trace_replay", simulate)
    report = run_synthetic_trace_replay(1, 1, 1, planner_config={"mode": "agg"})
    assert seen == {"planner_config": {"mode": "agg"}}
    assert report.to_dict()["planner"]["total_ticks"] == 1


def test_performance_models_outside_the_planner_configuration_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="performance_model_metadata"):
        run_synthetic_trace_replay(1, 1, 1, performance_model_metadata={})
    with pytest.raises(InvalidArgument, match="benchmark_granularity 0"):
        run_synthetic_trace_replay(1, 1, 1, benchmark_granularity=0)


def test_replay_package_exports_upstream_names() -> None:
    assert dynamo.replay.ReplayReport is ReplayReport
    assert dynamo.replay.run_trace_replay is run_trace_replay
