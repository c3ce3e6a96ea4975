"""Many processes' metrics as one."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.server.metrics_merge import merge


def registry(count: int, gauge: float, observed: list[float]) -> str:
    metrics = MetricsRegistry()
    metrics.counter("p_total", "Help \\ of\nit", ["model"]).labels(model='a "b"} 1').inc(count)
    metrics.gauge("p_active", "Active").labels().set(gauge)
    metrics.gauge("p_model_ready", "Ready", ["model"]).labels(model="m").set(gauge)
    child = metrics.histogram("p_seconds", "Seconds", (), (0.0, 1.0, 10.0)).labels()
    for value in observed:
        child.observe(value)
    return metrics.render()


def test_counts_are_added_and_what_is_the_same_everywhere_is_not() -> None:
    text = merge([registry(1, 2, [0.5]), registry(3, 1, [5, 50])])
    assert 'p_total{model="a \\"b\\"} 1"} 4' in text
    assert "p_active 3" in text
    assert 'p_model_ready{model="m"} 2' in text
    assert 'p_seconds_bucket{le="1"} 1' in text
    assert 'p_seconds_bucket{le="+Inf"} 3' in text
    assert "p_seconds_sum 55.5" in text


def test_one_process_is_what_it_says() -> None:
    text = registry(7, 1, [0.1])
    assert merge([text]) == text


def test_a_series_that_only_one_has_is_kept() -> None:
    more = MetricsRegistry()
    more.counter("p_total", "Help", ["model"]).labels(model="z").inc()
    more.counter("q_total", "Other").labels().inc(2)
    text = merge([registry(1, 1, []), more.render()])
    assert 'p_total{model="z"} 1' in text and "q_total 2" in text


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.floats(0, 20), max_size=5)), min_size=1, max_size=4))
def test_the_sum_is_an_exposition_whose_buckets_grow(parts: list[tuple[int, list[float]]]) -> None:
    text = merge([registry(count, 1, observed) for count, observed in parts])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["p"].samples[0].value == sum(count for count, _ in parts)
    buckets = [one.value for one in families["p_seconds"].samples if one.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == sum(len(observed) for _, observed in parts)
