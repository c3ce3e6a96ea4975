"""Load scaling: signals, floors, lower bounds, starting workers."""

import pytest
from tests.unit.planner.core.scaling_states import ENGINE, SLA, disaggregated, state, steps

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.load_scaling import propose_load
from dynamo.planner.core.reasons import LoadReason
from dynamo.planner.core.scaling import ScalingState, WorkerCapabilities
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import FpmObservations, RankKey, ScalingDecision, WorkerCounts


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
    found = propose_load(state({}), FpmObservations(decode=steps(2, kv=kv)))
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
    found = propose_load(made, FpmObservations(decode=observed))
    assert (found.decision, found.reason) == (None, reason)


def test_latency_objective_removes_a_worker_only_if_the_others_stay_within_it() -> None:
    for itl_ms, expected in ((80.0, LoadReason.SCALE_DOWN), (32.0, LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION)):
        made = state(SLA | {"enable_load_scaling": True, "itl_ms": itl_ms})
        for kv in (1000, 20_000, 40_000):
            made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
        found = propose_load(made, FpmObservations(decode=steps(2, kv=10_000)))
        assert found.reason is expected
        assert found.estimated_itl_ms is not None


def test_load_scaling_does_not_remove_workers_below_the_throughput_bound() -> None:
    made = state(SLA | {"enable_load_scaling": True, "itl_ms": 500.0})
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    made.lower_bounds["decode"] = 2
    found = propose_load(made, FpmObservations(decode=steps(2)))
    assert (found.decision, found.reason) == (None, LoadReason.NO_CHANGE)


def test_aggregated_engines_need_both_phases_to_remove_a_worker() -> None:
    made = ScalingState(
        parse(SLA | {"mode": "agg", "enable_load_scaling": True, "ttft_ms": 100.0}),
        WorkerCapabilities(decode=ENGINE),
    )
    made.observe_workers(WorkerCounts(ready_num_decode=2, expected_num_decode=2))
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    assert propose_load(made, FpmObservations(decode=steps(2))).reason is LoadReason.SCALE_DOWN
    assert propose_load(made, FpmObservations(decode=steps(2, queued=20_000))).decision != ScalingDecision(num_decode=1)


def test_growth_is_dropped_while_workers_start() -> None:
    found = propose_load(state({}, pending=1), FpmObservations(decode=steps(2, kv=200_000)))
    assert found.decision is None


def test_removal_while_workers_start_cancels_them() -> None:
    found = propose_load(state({"min_endpoint": 2}, pending=1), FpmObservations(decode=steps(2, kv=1000)))
    assert found.decision == ScalingDecision(num_decode=2)


def test_reduction_while_workers_start_keeps_the_lower_gpu_bound() -> None:
    for minimum, expected in ((-1, 1), (4, 2)):
        made = disaggregated({"min_gpu_budget": minimum, "max_gpu_budget": 16}, (2, 0), (2, 1))
        observed = FpmObservations(prefill=steps(2, kv=0, queued=1000), decode=steps(2, kv=1000))
        assert propose_load(made, observed).decision == ScalingDecision(num_decode=expected)


def test_growth_of_both_roles_above_the_gpu_budget_is_held() -> None:
    made = disaggregated({"max_gpu_budget": 4}, (2, 0), (2, 0))
    observed = FpmObservations(prefill=steps(2, queued=9000), decode=steps(2, kv=200_000))
    found = propose_load(made, observed)
    assert (found.decision, found.reason) == (None, LoadReason.GPU_BUDGET_GUARD_HOLD)
