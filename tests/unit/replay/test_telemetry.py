"""Samples of a simulated cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.replay.api import TelemetryOptions, run_synthetic_trace_replay
from dynamo.replay.report import ReplayReport

FIXED = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 20.0, "decode_ms": 5.0}}}


def replayed(options: TelemetryOptions | None = None, **settings: Any) -> ReplayReport:
    options = options or TelemetryOptions(sample_interval_ms=30.0)
    given: dict[str, Any] = {"extra_engine_args": FIXED, "arrival_interval_ms": 25.0, **settings}
    return run_synthetic_trace_replay(256, 11, 4, telemetry_options=options, **given)


def samples(**settings: Any) -> list[dict[str, Any]]:
    telemetry = replayed(**settings).telemetry
    assert telemetry is not None
    return telemetry.samples


def test_samples_follow_each_interval_between_the_start_and_the_end() -> None:
    found = samples()
    assert [one["kind"] for one in found] == ["baseline", *["periodic"] * (len(found) - 2), "final"]
    assert [one["sampled_at_ms"] for one in found[:3]] == [0.0, 30.0, 60.0]
    assert [one["interval_start_ms"] for one in found[1:]] == [one["sampled_at_ms"] for one in found[:-1]]
    assert [one["sample_ordinal"] for one in found] == list(range(len(found)))


def test_traffic_of_all_samples_is_that_of_the_run() -> None:
    traffic = [one["traffic"] for one in samples()]
    assert sum(one["arriving_requests"] for one in traffic) == 4
    assert sum(one["completed_requests"] for one in traffic) == 4
    ended = next(one for one in traffic if one["completed_requests"])
    assert (ended["avg_isl"], ended["avg_osl"]) == (256, 11)
    assert ended["avg_ttft_ms"] >= 20.0
    assert ended["avg_itl_ms"] >= 5.0


def test_ranks_and_workers_are_of_their_pool() -> None:
    (last,) = samples(num_workers=2)[-1:]
    assert last["active_decode_ids"] == [one["worker_id"] for one in last["decode_scheduler_metrics"]] == [0, 1]
    assert last["prefill_scheduler_metrics"] == last["active_prefill_ids"] == []
    idle = last["decode_scheduler_metrics"][0]
    assert (idle["running_requests"], idle["waiting_requests"], idle["active_blocks"]) == (0, 0, 0)
    assert idle["physical_cache_usage"] == idle["inactive_blocks"] / idle["total_blocks"] > 0
    split = samples(extra_engine_args=None, prefill_engine_args=FIXED, decode_engine_args=FIXED)
    assert len(split[1]["prefill_scheduler_metrics"]) == len(split[1]["decode_scheduler_metrics"]) == 1
    assert sum(one["prefill_interval_metrics"]["cache_total_tokens"] for one in split) == 4 * 256


def test_samples_do_not_change_the_run() -> None:
    without = run_synthetic_trace_replay(256, 11, 4, extra_engine_args=FIXED, arrival_interval_ms=25.0)
    assert replayed().summary == without.summary


def test_samples_are_passed_to_a_function_and_a_file(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    file = tmp_path / "samples.jsonl"
    report = replayed(TelemetryOptions(30.0, callback=seen.append, jsonl_path=file))
    assert report.telemetry is None
    assert [json.loads(line) for line in file.read_text().splitlines()] == seen
    assert len(seen) > 3


def test_telemetry_of_a_run_with_a_planner_has_a_final_sample() -> None:
    config = {"mode": "agg", "environment": "virtual", "enable_load_scaling": True}
    assert samples(planner_config=config)[-1]["kind"] == "final"


def test_telemetry_interval_is_validated() -> None:
    with pytest.raises(InvalidArgument, match="telemetry_sample_interval_ms 0"):
        replayed(TelemetryOptions(0.0))
