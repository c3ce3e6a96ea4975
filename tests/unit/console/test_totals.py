"""Totals of a frontend: read from its metrics, summed over processes, and percentiles of their differences."""

import pytest

from dynamo.console.totals import Buckets, ModelTotals, merged, totals_of
from dynamo.core.metrics import MetricsRegistry
from dynamo.serving.metrics import FrontendMetrics


def test_totals_have_the_numbers_of_each_model() -> None:
    metrics = FrontendMetrics(MetricsRegistry())
    series = metrics.model("m")
    series.output_tokens_total.inc(30)
    series.inflight.set(2)
    series.queued.set(1)
    series.ttft.observe(0.1)
    series.input_tokens.observe(12)
    metrics.count_end("chat_completions", "m", "stream", "")
    metrics.count_end("chat_completions", "m", "stream", "overload")
    metrics.count_end("chat_completions", "", "unary", "not_found")
    found = totals_of(metrics)
    assert (found["m"].succeeded, found["m"].failed, found["unknown_model"].failed) == (1, 1, 1)
    assert (found["m"].output_tokens, found["m"].input_tokens, found["m"].in_flight, found["m"].queued) == (
        30,
        12,
        2,
        1,
    )
    assert sum(found["m"].ttft.counts) == 1


def test_totals_of_processes_are_summed_by_model() -> None:
    one = {"a": ModelTotals(succeeded=1, itl=Buckets([1.0], [1, 0], 0.5))}
    other = {"a": ModelTotals(succeeded=2, itl=Buckets([1.0], [2, 3], 9.0)), "b": ModelTotals(failed=4)}
    found = merged([one, other])
    assert (found["a"].succeeded, found["a"].itl.counts, found["a"].itl.sum, found["b"].failed) == (3, [3, 3], 9.5, 4)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 10, 0, 0], 0.5, 1.5),
        ([0, 10, 0, 0], 1.0, 2.0),
        ([0, 5, 5, 0], 0.75, 3.0),
        ([0, 0, 0, 4], 0.99, 4.0),
        ([0, 0, 0, 0], 0.5, None),
    ],
)
def test_quantile_is_linear_within_a_bucket(counts: list[float], share: float, expected: float | None) -> None:
    assert Buckets([1.0, 2.0, 4.0], counts).quantile(share) == expected


def test_observations_since_a_restart_are_not_negative() -> None:
    assert Buckets([1.0], [1, 0], 0.5).since(Buckets([1.0], [5, 2], 9.0)).counts == [0, 0]
