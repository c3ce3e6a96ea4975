"""Report: its numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.replay.comparison import side_by_side
from dynamo.replay.report import Objectives, RequestRow, statistics
from dynamo.replay.timeline import Timeline


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_statistics_equal_those_of_numpy(values: list[float]) -> None:
    found = statistics(values)
    expected = {"mean": np.mean(values), "std": np.std(values)}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6)
    for name, part in (("median", 50), ("p75", 75), ("p90", 90), ("p99", 99)):
        least, most = (np.percentile(values, part, method=method) for method in ("lower", "higher"))
        assert found[name] in (least, most)


def test_percentile_is_the_value_of_the_nearest_rank() -> None:
    found = statistics([float(value) for value in range(100)])
    assert (found["median"], found["p90"], found["p99"]) == (50, 89, 98)


def test_statistics_without_values_are_none() -> None:
    assert set(statistics([None]).values()) == {None}


def test_goodput_requires_all_objectives() -> None:
    row = RequestRow("r", "s", 0, 0.0, 10, 10, 0, 0, 0.0, 100.0, 5.0, 20.0, 300.0, 0)
    assert Objectives(100, 20, 300).are_met(row)
    assert not Objectives(99, 20, 300).are_met(row)
    assert not Objectives(None, 19, None).are_met(row)
    assert not Objectives(None, None, 299).are_met(row)


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 9)), max_size=20))
def test_timeline_preserves_the_total_time(spans: list[tuple[float, float]]) -> None:
    timeline = Timeline(100.0)
    now, area = 0.0, 0.0
    for length, level in spans:
        timeline.hold(0, level, 0, 0, now, now + length)
        now, area = now + length, area + length * level
    assert sum(timeline.level("running", 0)) * 100.0 == pytest.approx(area, abs=1e-6)


def test_runs_are_compared_with_relative_differences() -> None:
    base = {"mean_ttft_ms": 100.0, "output_throughput_tok_s": 50.0}
    text = side_by_side({"one": base, "two": {"mean_ttft_ms": 50.0, "output_throughput_tok_s": 60.0}})
    assert "50.00 (-50.0 %)" in text
    assert "60.00 (+20.0 %)" in text
