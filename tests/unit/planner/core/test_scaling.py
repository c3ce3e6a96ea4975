"""Load and throughput scaling: signals, floors, lower bounds, starting workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.core.scaling import ScalingState, Traffic, WorkerCapabilities, startup_reduction
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import EngineCapabilities, FpmObservations, RankKey, ScalingDecision, WorkerCounts

ENGINE = EngineCapabilities(
    num_gpu=1, max_num_batched_tokens=2048, max_num_seqs=64, context_length=4096, max_kv_tokens=100_000
)
SLA = {"optimization_target": "sla", "load_predictor": "constant", "load_min_observations": 1, "max_gpu_budget": -1}
TRAFFIC = Traffic(num_req=600.0, isl=1000.0, osl=100.0)


def steps(
    workers: int, *, kv: int = 1000, queued: int = 0, seconds: float | None = None
) -> dict[RankKey, ForwardPassMetrics]:
    """Return steps of workers whose time is 10 ms and one microsecond per KV token."""
    scheduled = ScheduledRequests(
        num_prefill_requests=1, sum_prefill_tokens=500, num_decode_requests=2, sum_decode_kv_tokens=kv
    )
    waiting = QueuedRequests(num_prefill_requests=bool(queued), sum_prefill_tokens=queued)
    took = 0.01 + kv * 1e-6 if seconds is None else seconds
    return {
        (str(one), 0): ForwardPassMetrics(FORWARD_PASS_VERSION, str(one), 0, 1, took, scheduled, waiting)
        for one in range(workers)
    }


def state(raw: dict[str, object], ready: int = 2, expected: int | None = None, pending: int = 0) -> ScalingState:
    made = ScalingState(parse({"mode": "decode", **raw}), WorkerCapabilities(prefill=ENGINE, decode=ENGINE))
    made.observe_workers(
        WorkerCounts(
            ready_num_decode=ready,
            expected_num_decode=ready + pending if expected is None else expected,
            pending_num_decode=pending,
        )
    )
    return made


@pytest.mark.parametrize(
    ("kv", "expected", "reason"),
    [
        (100_001, ScalingDecision(num_decode=3), LoadReason.SCALE_UP),
        (80_000, None, LoadReason.NO_CHANGE),
        (55_000, None, LoadReason.NO_CHANGE),
        (10_000, ScalingDecision(num_decode=1), LoadReason.SCALE_DOWN),
    ],
)
def test_throughput_target_scales_by_the_use_of_the_kv_cache(
    kv: int, expected: ScalingDecision | None, reason: LoadReason
) -> None:
    found = state({}).propose_load(FpmObservations(decode=steps(2, kv=kv)))
    assert (found.decision, found.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("made", "observed", "reason"),
    [
        (state({}), {}, LoadReason.NO_FPM_DATA),
        (state({}, expected=3), steps(2), LoadReason.SCALING_IN_PROGRESS),
        (state({}, ready=3), steps(2), LoadReason.WORKER_COUNT_MISMATCH),
        (state(SLA | {"enable_load_scaling": True}), steps(2), LoadReason.INSUFFICIENT_DATA),
    ],
)
def test_load_scaling_holds_and_names_the_reason_if_the_load_is_unknown(
    made: ScalingState, observed: dict[RankKey, ForwardPassMetrics], reason: LoadReason
) -> None:
    found = made.propose_load(FpmObservations(decode=observed))
    assert (found.decision, found.reason) == (None, reason)


def test_latency_objective_removes_a_worker_only_if_the_others_stay_within_it() -> None:
    for itl_ms, expected in ((80.0, LoadReason.SCALE_DOWN), (32.0, LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION)):
        made = state(SLA | {"enable_load_scaling": True, "itl_ms": itl_ms})
        for kv in (1000, 20_000, 40_000):
            made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
        found = made.propose_load(FpmObservations(decode=steps(2, kv=10_000)))
        assert found.reason is expected
        assert found.estimated_itl_ms is not None


def test_load_scaling_does_not_remove_workers_below_the_throughput_bound() -> None:
    made = state(SLA | {"enable_load_scaling": True, "itl_ms": 500.0})
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    made.lower_bounds["decode"] = 2
    found = made.propose_load(FpmObservations(decode=steps(2)))
    assert (found.decision, found.reason) == (None, LoadReason.NO_CHANGE)


def test_throughput_scaling_without_a_model_holds() -> None:
    found = state(SLA).propose_throughput(TRAFFIC, 60.0)
    assert (found.decision, found.reason) == (None, ThroughputReason.MODEL_NOT_READY)


@pytest.mark.parametrize(("limit", "expected"), [(2, 4), (100, 8)])
def test_throughput_scaling_changes_at_most_the_configured_number_of_replicas(limit: int, expected: int) -> None:
    made = state(SLA | {"max_throughput_scaling_replicas": limit, "itl_ms": 500.0})
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    rate = made.propose_throughput(TRAFFIC, 60.0).engine_rps_decode
    assert rate is not None
    found = made.propose_throughput(Traffic(num_req=rate * 60 * 7.5, isl=1000.0, osl=100.0), 60.0)
    assert found.decision == ScalingDecision(num_decode=expected)


def test_throughput_scaling_sets_lower_bounds_if_load_scaling_decides() -> None:
    made = state(SLA | {"enable_load_scaling": True})
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    found = made.propose_throughput(Traffic(num_req=6000.0, isl=1000.0, osl=100.0), 60.0)
    assert (found.decision, found.reason) == (None, ThroughputReason.SET_LOWER_BOUND)
    assert made.lower_bounds["decode"] > 2


def test_aggregated_engines_need_both_phases_to_remove_a_worker() -> None:
    made = ScalingState(
        parse(SLA | {"mode": "agg", "enable_load_scaling": True, "ttft_ms": 100.0}),
        WorkerCapabilities(decode=ENGINE),
    )
    made.observe_workers(WorkerCounts(ready_num_decode=2, expected_num_decode=2))
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    assert made.propose_load(FpmObservations(decode=steps(2))).reason is LoadReason.SCALE_DOWN
    assert made.propose_load(FpmObservations(decode=steps(2, queued=20_000))).decision != ScalingDecision(num_decode=1)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_starting_workers_are_only_ever_cancelled(target: int, ready: int, pending: int) -> None:
    found = startup_reduction(target, ready, pending)
    assert found is None or found <= ready
    if target > ready:
        assert found is None


def test_growth_is_dropped_while_workers_start() -> None:
    found = state({}, pending=1).propose_load(FpmObservations(decode=steps(2, kv=200_000)))
    assert found.decision is None


def test_removal_while_workers_start_cancels_them() -> None:
    found = state({"min_endpoint": 2}, pending=1).propose_load(FpmObservations(decode=steps(2, kv=1000)))
    assert found.decision == ScalingDecision(num_decode=2)


def disaggregated(raw: dict[str, object], prefill: tuple[int, int], decode: tuple[int, int]) -> ScalingState:
    """Return the state of a deployment with these ready and starting workers of each role."""
    made = ScalingState(parse({"mode": "disagg", **raw}), WorkerCapabilities(prefill=ENGINE, decode=ENGINE))
    made.observe_workers(
        WorkerCounts(
            ready_num_prefill=prefill[0],
            expected_num_prefill=sum(prefill),
            pending_num_prefill=prefill[1],
            ready_num_decode=decode[0],
            expected_num_decode=sum(decode),
            pending_num_decode=decode[1],
        )
    )
    return made


def test_reduction_while_workers_start_keeps_the_lower_gpu_bound() -> None:
    for minimum, expected in ((-1, 1), (4, 2)):
        made = disaggregated({"min_gpu_budget": minimum, "max_gpu_budget": 16}, (2, 0), (2, 1))
        observed = FpmObservations(prefill=steps(2, kv=0, queued=1000), decode=steps(2, kv=1000))
        assert made.propose_load(observed).decision == ScalingDecision(num_decode=expected)


def test_growth_of_both_roles_above_the_gpu_budget_is_held() -> None:
    made = disaggregated({"max_gpu_budget": 4}, (2, 0), (2, 0))
    observed = FpmObservations(prefill=steps(2, queued=9000), decode=steps(2, kv=200_000))
    found = made.propose_load(observed)
    assert (found.decision, found.reason) == (None, LoadReason.GPU_BUDGET_GUARD_HOLD)
