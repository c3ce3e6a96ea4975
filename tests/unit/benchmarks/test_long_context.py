"""Assignment of tokens to ticks, and their delays."""

import pytest
from benchmarks.long_context import Arrival, Delays, delays_s, markdown
from benchmarks.metronome import Beat

BEATS = [Beat(at, at, 0, 1) for at in (1.0, 1.02, 1.04, 1.06)]


def test_token_delay_is_measured_from_its_engine_beat():
    seen = delays_s(BEATS, [Arrival(1.021, 1), Arrival(1.045, 1), Arrival(1.061, 1)])
    assert [at for at, _ in seen] == [1.02, 1.04, 1.06]
    assert [late for _, late in seen] == pytest.approx([0.001, 0.005, 0.001])


def test_tokens_read_together_have_separate_delays():
    seen = delays_s(BEATS, [Arrival(1.001, 1), Arrival(1.05, 2)])
    assert [late for _, late in seen] == pytest.approx([0.001, 0.03, 0.01])


def test_no_arrivals_have_no_delays():
    assert delays_s(BEATS, []) == []


def test_added_delay_is_the_difference_to_the_run_alone():
    def delays(alone, loaded):
        return Delays({"p50": 0.5, "p99": alone}, {"p50": 0.6, "p99": loaded, "max": 9.0}, 10, {"p50": 40.0})

    found = {"ours": delays(1.0, 3.0), "theirs": delays(1.0, 5.0)}
    assert found["ours"].added_p99_ms == 2.0
    text = markdown(found, 32_000)
    assert "| ours | 0.50 / 1.00 | 0.60 / 3.00 | 9.00 | 2.00 | 10 | 40.0 |" in text
    assert "| **ours/theirs** |  |  |  | **0.50** |  | **1.00** |" in text
