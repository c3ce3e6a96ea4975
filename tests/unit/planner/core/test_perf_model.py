"""Performance models: latencies of an engine now, and its capacity."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.perf_model import (
    CapacityQuery,
    EngineModel,
    MovingAverage,
    candidates,
    limits_of,
    uncached_fraction,
)
from dynamo.planner.core.regression import StepLoad
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import EngineCapabilities

LIMITS = EngineCapabilities(max_num_batched_tokens=1000, max_num_seqs=8, max_kv_tokens=10_000)


@dataclass
class PerToken:
    """Steps of one millisecond per prefill token and per decode request."""

    is_ready: bool = True

    def add(self, step: ForwardPassMetrics) -> None:
        """Ignore the sample."""

    def seconds(self, load: StepLoad) -> float:
        return 0.001 * (load.prefill_tokens + load.decode_requests)


def step(scheduled: ScheduledRequests | None = None, queued: QueuedRequests | None = None) -> ForwardPassMetrics:
    return ForwardPassMetrics(
        FORWARD_PASS_VERSION, "1", 0, 1, 0.1, scheduled or ScheduledRequests(), queued or QueuedRequests()
    )


def engine(role: EngineRole, capabilities: EngineCapabilities | None = LIMITS) -> EngineModel:
    return EngineModel(role, PerToken(), 64, capabilities)


def test_ttft_is_the_time_of_the_queue_and_one_typical_prompt() -> None:
    model = engine(EngineRole.PREFILL)
    model.observe({("1", 0): step(ScheduledRequests(num_prefill_requests=2, sum_prefill_tokens=400))})
    queued = step(queued=QueuedRequests(num_prefill_requests=3, sum_prefill_tokens=1500))
    assert model.ttft_s(queued) == pytest.approx(1.7)
    assert model.ttft_s(queued, kv_hit_rate=0.5) == pytest.approx(0.85)
    assert model.ttft_s(queued, queue_scale=2.0) == pytest.approx(3.2)


def test_itl_is_the_step_time_with_queued_requests_and_one_more() -> None:
    model = engine(EngineRole.DECODE)
    model.observe({("1", 0): step(ScheduledRequests(num_decode_requests=1, sum_decode_kv_tokens=100))})
    now = step(ScheduledRequests(num_decode_requests=3), QueuedRequests(num_decode_requests=1))
    assert model.itl_s(now) == pytest.approx(0.005)
    assert model.itl_s(now, decode_scale=1.5) == pytest.approx(0.007)


def test_latency_of_another_role_is_unknown() -> None:
    assert engine(EngineRole.PREFILL).itl_s(step()) is None
    assert engine(EngineRole.DECODE).ttft_s(step()) is None


def test_prefill_capacity_prefers_a_slower_batch_that_meets_the_objective() -> None:
    found = engine(EngineRole.PREFILL).capacity(CapacityQuery(isl=100, osl=1, ttft_s=0.25))
    assert found is not None
    assert found.is_eligible
    assert found.ttft_s == pytest.approx(0.1)


def test_capacity_that_meets_no_objective_is_returned_as_ineligible() -> None:
    found = engine(EngineRole.PREFILL).capacity(CapacityQuery(isl=100, osl=1, ttft_s=0.01))
    assert found is not None
    assert not found.is_eligible


def test_decode_capacity_is_limited_by_the_kv_cache() -> None:
    assert engine(EngineRole.DECODE).capacity(CapacityQuery(isl=20_000, osl=10)) is None
    found = engine(EngineRole.DECODE).capacity(CapacityQuery(isl=4_000, osl=10))
    assert found is not None
    assert found.itl_s == pytest.approx(0.001)


@pytest.mark.parametrize("isl", [0.0, -1.0, math.nan, 1e12])
def test_capacity_of_unusable_traffic_is_unknown(isl: float) -> None:
    for role in EngineRole:
        assert engine(role).capacity(CapacityQuery(isl=isl, osl=10)) is None


def test_capacity_without_capabilities_is_unknown_and_without_limits_uses_defaults() -> None:
    assert engine(EngineRole.DECODE, None).capacity(CapacityQuery(isl=10, osl=10)) is None
    assert limits_of(EngineCapabilities(max_num_seqs=0)) is None
    assert limits_of(EngineCapabilities()) is not None


@given(st.floats(allow_nan=True))
def test_uncached_fraction_leaves_at_least_one_token_in_twenty(rate: float) -> None:
    assert 0.05 <= uncached_fraction(rate) + 1e-12 <= 1.0 + 1e-9


@given(st.integers(1, 100_000))
def test_capacity_candidates_rise_from_one_to_the_largest_batch(batch: int) -> None:
    found = candidates(batch)
    assert (found[0], found[-1]) == (1, batch)
    assert found == sorted(set(found))
    assert len(found) <= 128


@given(st.lists(st.floats(0, 1e9), max_size=50), st.integers(1, 10))
def test_moving_average_is_within_its_window(values: list[float], size: int) -> None:
    average = MovingAverage(size)
    for value in values:
        average.add(value)
    assert 0 <= average.value <= max([0.0, *values]) * (1 + 1e-9)
