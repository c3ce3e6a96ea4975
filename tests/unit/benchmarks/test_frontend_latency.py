"""Evaluation of ticks and windows in the latency benchmark."""

from dataclasses import replace

import pytest
from benchmarks.frontend_latency import LatencyConfig, Pace, beat_gaps_s, markdown, next_interval
from benchmarks.metronome import Beat

from dynamo.core.errors import ConfigError

HALF = Pace(
    interval_ms=40.0,
    busy=0.5,
    offered_per_s=25_000.0,
    tokens_per_s=24_900.0,
    itl_p50_ms=40.0,
    itl_p99_ms=44.0,
    beat_p99_ms=41.0,
    noise=0.0,
)


def test_added_latency_is_relative_to_the_engine_interval():
    assert HALF.added_p99_ms == pytest.approx(3.0)


def test_gaps_of_each_phase_are_measured_separately():
    beats = [Beat(0.0, 0.0, 0, 3), Beat(0.5, 0.5, 1, 9), Beat(1.0, 1.0, 0, 2), Beat(2.0, 2.25, 0, 1)]
    assert beat_gaps_s(beats, 0.0, 3.0) == [1.0, 1.0, 1.25]
    assert beat_gaps_s(beats, 2.0, 3.0) == [1.25]


def test_half_core_load_is_found_by_the_token_interval():
    assert HALF.is_half
    assert next_interval(replace(HALF, busy=0.75)) == pytest.approx(60.0)
    assert not replace(HALF, busy=0.75).is_half


def test_run_below_the_requested_rate_is_not_at_half_load():
    late = replace(HALF, tokens_per_s=12_000.0)
    assert not late.is_half
    assert next_interval(late) > HALF.interval_ms


def test_latency_tables_end_with_the_ratio():
    first = {"ours": {"p50": 1.0, "p90": 2.0, "p99": 3.0}, "theirs": {"p50": 4.0, "p90": 4.0, "p99": 4.0}}
    slow = replace(HALF, itl_p99_ms=47.0, tokens_per_s=12_450.0)
    text = markdown(first, {"ours": [HALF], "theirs": [slow, slow]}, 1000)
    assert "| **ours/theirs** | **0.25** | **0.50** | **0.75** |" in text
    assert "| **ours/theirs** |  | **2.00** |  |  |  |  | **0.50** |" in text


def test_streams_must_cover_every_phase():
    with pytest.raises(ConfigError):
        LatencyConfig(streams=1)
