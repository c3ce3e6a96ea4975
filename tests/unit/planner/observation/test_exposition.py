"""Prometheus text: which samples are read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.observation.exposition import SeriesKey, samples_of


def test_samples_of_the_named_metrics_are_read_with_sorted_labels() -> None:
    text = '# TYPE a counter\na{z="1",model="m"} 2\nb 3\na_other 4\n'
    assert samples_of(text, {"a"}) == {SeriesKey("a", (("model", "m"), ("z", "1"))): 2.0}


@pytest.mark.parametrize("line", ["a NaN", "a +Inf", "a x", "a", "a{", "# a 1", ""])
def test_lines_without_a_finite_sample_are_skipped(line: str) -> None:
    assert samples_of(f"{line}\na 5\n", {"a"}) == {SeriesKey("a", ()): 5.0}


def test_timestamp_after_the_value_is_ignored() -> None:
    assert samples_of("a 5 1700000000000", {"a"}) == {SeriesKey("a", ()): 5.0}


def test_absent_label_is_none() -> None:
    assert SeriesKey("a", (("model", "m"),)).label("model") == "m"
    assert SeriesKey("a", ()).label("model") is None


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_label_value_of_the_own_registry_is_read_back(value: str) -> None:
    registry = MetricsRegistry()
    registry.gauge("a", "help", ("model",)).labels(model=value).set(1)
    assert samples_of(registry.render(), {"a"}) == {SeriesKey("a", (("model", value),)): 1.0}


@given(st.text())
def test_arbitrary_text_never_raises(text: str) -> None:
    samples_of(text, {"a"})
    samples_of("a{" + text, {"a"})
