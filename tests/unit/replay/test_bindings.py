"""Replay under the names of upstream's bindings."""

from pathlib import Path

import pytest

from dynamo._core import run_mocker_synthetic_trace_replay, run_mocker_trace_replay
from dynamo.core.errors import InvalidArgument


def test_synthetic_load_is_simulated() -> None:
    report = run_mocker_synthetic_trace_replay(
        128, 4, 3, replay_concurrency=1, num_workers=2, extra_engine_args={"block_size": 64}
    )
    assert report.summary["completed_requests"] == 3
    assert (report.per_request, report.telemetry, report.lifecycle_operations) == (None, None, [])


def test_trace_is_simulated_and_its_rows_written(tmp_path: Path) -> None:
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 2, "hash_ids": [1]}\n')
    run_mocker_trace_replay([trace], num_workers=1, report_jsonl_path=rows)
    assert len(rows.read_text().splitlines()) == 1


def test_unsupported_argument_of_the_upstream_simulator_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="scaling_policy"):
        run_mocker_synthetic_trace_replay(1, 1, 1, replay_concurrency=1, scaling_policy=object())
    with pytest.raises(InvalidArgument, match="online"):
        run_mocker_synthetic_trace_replay(1, 1, 1, replay_mode="online")


def test_responses_are_truncated_and_prompts_rejected_at_the_model_length() -> None:
    engine = {"engine": {"max_model_len": 8, "timing_model": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 3.0}}}
    fits = run_mocker_synthetic_trace_replay(
        3, 10, 1, replay_concurrency=1, capture_per_request=True, extra_engine_args=engine
    )
    assert fits.per_request is not None
    assert (fits.per_request[0]["output_length"], fits.per_request[0]["terminal_status"]) == (5, "completed")
    assert (fits.summary["mean_ttft_ms"], fits.summary["median_tpot_ms"]) == (2.0, 3.0)
    too_long = run_mocker_synthetic_trace_replay(
        8, 10, 2, replay_concurrency=1, capture_per_request=True, extra_engine_args=engine, turns_per_session=2
    )
    assert too_long.per_request is not None
    assert {row["terminal_status"] for row in too_long.per_request} == {"rejected"}
    assert too_long.coverage["rejected"] == too_long.summary["num_requests"]
