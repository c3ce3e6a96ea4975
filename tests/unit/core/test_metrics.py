"""Metrics: light types, standard text."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynamo.core.metrics import Histogram, MetricsRegistry, format_number, log_buckets


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def test_metrics_text_is_readable_by_prometheus() -> None:
    registry = MetricsRegistry()
    requests = registry.counter("d_requests_total", "Requests\nby \\model", ["model", "status"])
    requests.labels(model='a"b\\c\nd', status="ok").inc()
    requests.labels(model="m", status="ok").inc(2)
    registry.gauge("d_inflight", "Now").labels().set(1.5)
    times = registry.histogram("d_seconds", "Times", ["model"], [0.0, 0.1, 1.0]).labels(model="m")
    for value in (0.0, 0.1, 0.5, 7.0):
        times.observe(value)
    samples = parse(registry.render())
    assert samples["d_requests_total"] == {
        (("model", 'a"b\\c\nd'), ("status", "ok")): 1.0,
        (("model", "m"), ("status", "ok")): 2.0,
    }
    assert samples["d_inflight"] == {(): 1.5}
    buckets = {dict(labels)["le"]: value for labels, value in samples["d_seconds_bucket"].items()}
    assert buckets == {"0": 1, "0.1": 2, "1": 3, "+Inf": 4}
    assert samples["d_seconds_count"] == {(("model", "m"),): 4}
    assert samples["d_seconds_sum"] == {(("model", "m"),): 7.6}


def test_metrics_histogram_includes_what_its_sources_record_when_it_is_rendered() -> None:
    registry = MetricsRegistry()
    times = registry.histogram("d_seconds", "Times", (), [1.0]).labels()
    late = [0.5, 2.0]

    def record() -> None:
        while late:
            times.observe(late.pop())

    times.add_source(record)
    assert parse(registry.render())["d_seconds_sum"] == {(): 2.5}
    late.append(4.0)
    times.remove_source(record)
    assert parse(registry.render())["d_seconds_sum"] == {(): 2.5}


def test_metrics_family_without_labels_is_exposed_before_its_first_sample() -> None:
    registry = MetricsRegistry()
    registry.counter("plain_total", "p")
    registry.counter("labelled_total", "l", ["model"])
    assert parse(registry.render()) == {"plain_total": {(): 0.0}}


def test_metrics_callback_gauge_is_read_when_rendered() -> None:
    registry = MetricsRegistry()
    size = [3]
    registry.gauge("g", "g").labels().follow(lambda: size[0])
    size[0] = 4
    assert parse(registry.render())["g"] == {(): 4.0}


def test_metrics_labels_return_the_same_child_and_removed_children_vanish() -> None:
    registry = MetricsRegistry()
    family = registry.gauge("g", "g", ["model", "rank"])
    child = family.labels(rank="0", model="a")
    assert family.labels(model="a", rank="0") is child
    family.labels(model="a", rank="1").inc()
    family.labels(model="b", rank="0").dec()
    family.remove(model="a")
    assert parse(registry.render())["g"] == {(("model", "b"), ("rank", "0")): -1.0}


def test_metrics_child_may_have_constant_labels() -> None:
    registry = MetricsRegistry()
    family = registry.counter("c_total", "h", ["a"])
    family.labels(a="1").inc()
    child = family.labels_and([("model", 'm"'), ("x", "y")], a="1")
    child.inc(2)
    assert family.labels_and([("model", 'm"'), ("x", "y")], a="1") is child
    assert family.labels_and([], a="1") is family.labels(a="1")
    registry.counter("bare_total", "h").labels_and([("x", "y")]).inc()
    lines = registry.render().splitlines()
    assert 'c_total{a="1"} 1' in lines
    assert 'c_total{a="1",model="m\\"",x="y"} 2' in lines
    assert 'bare_total{x="y"} 1' in lines
    family.remove(a="1")
    assert not [line for line in registry.render().splitlines() if line.startswith("c_total")]
    for wrong in ("a", "", "1x", "with-dash"):
        with pytest.raises(ValueError, match="additional label"):
            family.labels_and([(wrong, "v")], a="1")


def test_metrics_wrong_label_is_an_error() -> None:
    family = MetricsRegistry().counter("c", "c", ["model"])
    with pytest.raises(ValueError, match="missing"):
        family.labels()
    with pytest.raises(ValueError, match="has labels"):
        family.labels(model="m", other="x")


def test_metrics_name_cannot_be_registered_with_another_type() -> None:
    registry = MetricsRegistry()
    family = registry.counter("c", "c", ["a"])
    assert registry.counter("c", "c", ["a"]) is family
    with pytest.raises(ValueError, match="already a counter"):
        registry.gauge("c", "c", ["a"])
    with pytest.raises(ValueError, match="must grow"):
        registry.histogram("h", "h", (), [1.0, 1.0])


def test_metrics_family_limits_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.core.metrics.SERIES_MAX", 2)
    family = MetricsRegistry().counter("c", "c", ["who"])
    for who in "abcd":
        family.labels(who=who).inc()
    assert sum(piece.startswith("c{") for piece in family.pieces()) == 2


def test_metrics_render_appends_text_of_other_sources() -> None:
    registry = MetricsRegistry()
    registry.counter("ours_total", "o")
    registry.add_text(lambda: "theirs_total 5")
    assert parse(registry.render())["theirs_total"] == {(): 5.0}


@given(values=st.lists(st.floats(-5, 200), max_size=50), many=st.integers(0, 5))
def test_histogram_counts_every_value_in_exactly_one_bucket(values: list[float], many: int) -> None:
    histogram = Histogram([0.0, 1.0, 10.0, 100.0])
    for value in values:
        histogram.observe(value)
    histogram.observe_many(3.0, many)
    everything = values + [3.0] * many
    edges = [-math.inf, 0.0, 1.0, 10.0, 100.0, math.inf]
    expected = [sum(low < value <= high for value in everything) for low, high in itertools.pairwise(edges)]
    assert histogram.counts == expected
    assert histogram.count == len(everything)
    assert histogram.sum == pytest.approx(sum(everything))


@pytest.mark.parametrize(
    ("low", "high", "count"),
    [(1, 512, 10), (50, 128000, 12), (50, 32000, 10), (0.001, 480, 18), (0.001, 80, 20), (0.001, 10, 14)],
)
def test_histogram_buckets_are_zero_and_log_spaced_to_two_digits(low: float, high: float, count: int) -> None:
    buckets = log_buckets(low, high, count)
    assert buckets[0] == 0.0
    assert buckets[1] == low
    assert buckets[-1] == pytest.approx(high, rel=0.05)
    assert len(buckets) == count
    assert all(value == float(f"{value:.1e}") for value in buckets)
    assert list(buckets) == sorted(set(buckets))


@pytest.mark.parametrize("arguments", [(0, 1, 5), (2, 1, 5), (1, 2, 2)])
def test_histogram_refuses_unsorted_or_empty_buckets(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="0 < min < max"):
        log_buckets(*arguments)


def test_metrics_numbers_have_the_prometheus_format() -> None:
    assert [format_number(value) for value in (1, 2.0, 0.25, 1e20, math.inf, -math.inf, math.nan)] == [
        "1", "2", "0.25", "1e+20", "+Inf", "-Inf", "NaN",
    ]  # fmt: skip
