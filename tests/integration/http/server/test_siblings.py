"""Communication between processes that share a port."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.server.siblings import Siblings, merge


async def write_metrics(question: str) -> str:
    return "# TYPE p_total counter\np_total 2\n"


async def echo(question: str) -> str:
    return f"heard {question}"


@pytest.fixture
async def others(tmp_path: Path) -> AsyncIterator[list[Siblings]]:
    found = [Siblings(str(tmp_path), index) for index in range(3)]
    for one in found:
        one.answer("metrics", write_metrics)
        one.answer("say", echo)
        await one.start()
    yield found
    for one in found:
        await one.close()


async def test_one_scrape_includes_all_processes(others: list[Siblings]) -> None:
    assert "p_total 5" in await others[0].metrics("# TYPE p_total counter\np_total 1\n")


async def test_query_reaches_all_other_processes(others: list[Siblings]) -> None:
    assert await others[1].query("say it again") == ["heard it again", "heard it again"]


async def test_ended_process_is_left_out_and_its_slot_reused(others: list[Siblings], tmp_path: Path) -> None:
    await others[2].close()
    (tmp_path / "2.sock").touch()
    assert await others[0].query("say x") == ["heard x"]
    await others[2].start()
    assert await others[0].query("say x") == ["heard x", "heard x"]


async def test_malformed_query_gets_no_response(others: list[Siblings]) -> None:
    assert await others[0].query("nonsense") == ["", ""]


def registry(count: int, gauge: float, observed: list[float]) -> str:
    metrics = MetricsRegistry()
    metrics.counter("p_total", "Help \\ of\nit", ["model"]).labels(model='a "b"} 1').inc(count)
    metrics.gauge("p_active", "Active").labels().set(gauge)
    metrics.gauge("p_model_ready", "Ready", ["model"]).labels(model="m").set(gauge)
    child = metrics.histogram("p_seconds", "Seconds", (), (0.0, 1.0, 10.0)).labels()
    for value in observed:
        child.observe(value)
    return metrics.render()


def test_counters_are_added_and_shared_gauges_are_not() -> None:
    text = merge([registry(1, 2, [0.5]), registry(3, 1, [5, 50])])
    assert 'p_total{model="a \\"b\\"} 1"} 4' in text
    assert "p_active 3" in text
    assert 'p_model_ready{model="m"} 2' in text
    assert 'p_seconds_bucket{le="1"} 1' in text
    assert 'p_seconds_bucket{le="+Inf"} 3' in text
    assert "p_seconds_sum 55.5" in text


def test_metrics_of_one_process_are_unchanged() -> None:
    text = registry(7, 1, [0.1])
    assert merge([text]) == text


def test_series_of_one_process_is_kept() -> None:
    more = MetricsRegistry()
    more.counter("p_total", "Help", ["model"]).labels(model="z").inc()
    more.counter("q_total", "Other").labels().inc(2)
    text = merge([registry(1, 1, []), more.render()])
    assert 'p_total{model="z"} 1' in text and "q_total 2" in text


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.floats(0, 20), max_size=5)), min_size=1, max_size=4))
def test_merged_histograms_have_cumulative_buckets(parts: list[tuple[int, list[float]]]) -> None:
    text = merge([registry(count, 1, observed) for count, observed in parts])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["p"].samples[0].value == sum(count for count, _ in parts)
    buckets = [one.value for one in families["p_seconds"].samples if one.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == sum(len(observed) for _, observed in parts)
