"""Regression of step times: fit, bounded samples, rejected fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.regression import SECONDS_MIN, StepLoad, StepRegression
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests


def step(seconds: float, prefill_tokens: int = 0, decodes: int = 0, kv: int = 0) -> ForwardPassMetrics:
    scheduled = ScheduledRequests(
        num_prefill_requests=1 if prefill_tokens else 0,
        sum_prefill_tokens=prefill_tokens,
        num_decode_requests=decodes,
        sum_decode_kv_tokens=kv,
    )
    return ForwardPassMetrics(FORWARD_PASS_VERSION, "1", 0, 1, seconds, scheduled, QueuedRequests())


def model(role: EngineRole, samples_max: int = 64, buckets: int = 16, samples_min: int = 5) -> StepRegression:
    return StepRegression(role, samples_max, buckets, samples_min)


def test_step_regression_recovers_the_slopes_of_aggregated_steps() -> None:
    regression = model(EngineRole.AGGREGATED)
    regression.add_all(step(0.01 + 1e-5 * p + 1e-7 * kv, p, 1, kv) for p in range(0, 500, 100) for kv in (0, 900, 5000))
    assert regression.seconds(StepLoad(1, 1000, 1, 10_000)) == pytest.approx(0.01 + 1e-2 + 1e-3)


def test_step_regression_is_unknown_before_enough_samples() -> None:
    regression = model(EngineRole.PREFILL)
    regression.add_all(step(0.1 * size, size) for size in range(1, 5))
    assert not regression.is_ready
    assert regression.seconds(StepLoad(1, 3)) is None


def test_step_regression_does_not_learn_from_idle_heartbeats() -> None:
    regression = model(EngineRole.PREFILL)
    regression.add(step(0.0, 100))
    assert regression.size == 0


def test_step_regression_rejects_a_negative_slope() -> None:
    regression = model(EngineRole.PREFILL)
    regression.add_all(step(1 - 0.1 * size, size) for size in range(6))
    assert regression.seconds(StepLoad(1, 3)) is None


def test_step_regression_ignores_a_negative_slope_of_the_number_of_decode_requests() -> None:
    regression = model(EngineRole.DECODE)
    regression.add_all(step(1 - 1e-3 * n + 1e-3 * kv, 0, n, kv) for n in range(1, 9) for kv in (100, 500, 900))
    assert regression.seconds(StepLoad(0, 0, 5, 500)) == pytest.approx(1.5)


def test_step_regression_predicts_at_least_a_microsecond() -> None:
    regression = model(EngineRole.PREFILL)
    regression.add_all(step(0.001 * size, size) for size in range(10, 20))
    assert regression.seconds(StepLoad(0, 0)) == SECONDS_MIN


def test_step_regression_keeps_rare_sizes_during_a_long_steady_phase() -> None:
    regression = model(EngineRole.PREFILL, samples_max=10)
    regression.add_all([step(0.5, 4000), step(0.26, 2000), *(step(0.02, 100) for _ in range(500))])
    assert regression.size == 10
    assert regression.seconds(StepLoad(1, 4000)) == pytest.approx(0.5, rel=0.05)


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 10_000), st.integers(0, 200), st.integers(0, 10**6)), max_size=60
    ),
    st.sampled_from(list(EngineRole)),
    st.sampled_from([1, 4, 16]),
)
def test_step_regression_is_bounded_and_never_negative(
    rows: list[tuple[float, int, int, int]], role: EngineRole, buckets: int
) -> None:
    regression = model(role, samples_max=8, buckets=buckets)
    for seconds, prefill, decodes, kv in rows:
        regression.add(step(seconds, prefill, decodes, kv))
        assert regression.size <= 8
    predicted = regression.seconds(StepLoad(1, 50, 5, 500))
    assert predicted is None or predicted >= SECONDS_MIN


def test_step_regression_does_not_split_the_effect_of_nearly_collinear_features() -> None:
    regression = model(EngineRole.DECODE, samples_min=1)
    regression.add_all([step(0.0117, 0, 1, 2362), step(0.0113), step(0.0167, 0, 8, 18_992)])
    assert regression.seconds(StepLoad(0, 0, 16, 37_984)) == pytest.approx(0.0221, rel=1e-2)


def test_bounded_regression_sets_a_negative_slope_to_zero_where_another_rejects_the_fit() -> None:
    steps = [step(0.05 + 1e-5 * p - 1e-6 * kv, p, 1, kv) for p in (0, 400, 900) for kv in (0, 900, 5000)]
    rejecting, bounded = model(EngineRole.AGGREGATED), StepRegression(EngineRole.AGGREGATED, 64, 16, 5, is_bounded=True)
    for regression in (rejecting, bounded):
        regression.add_all(steps)
    assert rejecting.seconds(StepLoad(1, 100)) is None
    few, many = (bounded.seconds(StepLoad(1, 500, 1, kv)) for kv in (0, 5000))
    assert few is not None
    assert few == many
    more = bounded.seconds(StepLoad(1, 1500))
    assert more is not None
    assert more - few == pytest.approx(1e-2)


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.integers(0, 5000), st.integers(0, 50_000)), min_size=5, max_size=30))
def test_bounded_regression_is_never_rejected(found: list[tuple[float, int, int]]) -> None:
    regression = StepRegression(EngineRole.AGGREGATED, 64, 16, 5, is_bounded=True)
    regression.add_all(step(seconds, tokens, 1, kv) for seconds, tokens, kv in found)
    small, large = regression.seconds(StepLoad(1, 10, 1, 10)), regression.seconds(StepLoad(1, 10_000, 1, 10_000))
    assert small is not None
    assert large is not None
    assert large >= small
