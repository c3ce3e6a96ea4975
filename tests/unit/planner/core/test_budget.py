"""GPU budgets: the upper bound is never exceeded, and a proposal is never reversed."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.core.budget import (
    GpuBand,
    Pair,
    PairCost,
    clamp_pair,
    clamp_single,
    fit_directional,
    guard_pair,
    guard_single,
)
from dynamo.planner.core.reasons import LoadReason

COUNTS = st.integers(0, 12)
GPUS = st.integers(1, 4)
PAIRS = st.builds(Pair, COUNTS, COUNTS)
COSTS = st.builds(PairCost, GPUS, GPUS, st.integers(0, 2), st.integers(0, 2))
BANDS = st.builds(GpuBand, st.sampled_from([-1, 0, 4]), st.sampled_from([-1, 16, 32]))


@given(PAIRS, COSTS, BANDS)
def test_clamped_pair_never_exceeds_the_budget(pair: Pair, cost: PairCost, band: GpuBand) -> None:
    assert not band.exceeds(cost.of(clamp_pair(pair, cost, band)))


@given(PAIRS, PAIRS, COSTS, BANDS)
def test_guarded_pair_keeps_the_direction_of_each_role(
    current: Pair, proposed: Pair, cost: PairCost, band: GpuBand
) -> None:
    found, reason = guard_pair(current, proposed, cost, band)
    if reason is LoadReason.GPU_BUDGET_RECONCILE:
        return
    for now, target, one in zip(current, proposed, found, strict=True):
        assert min(now, target) <= one <= max(now, target)
    assert not band.exceeds(cost.of(found))


@given(COUNTS, COUNTS, GPUS, BANDS)
def test_guarded_single_pool_never_exceeds_the_budget(now: int, proposed: int, gpus: int, band: GpuBand) -> None:
    found, _ = guard_single(now, proposed, gpus, band, 0)
    assert not band.exceeds(found * gpus)


@given(PAIRS, PAIRS, COSTS, BANDS)
def test_rebalance_moves_both_roles_or_neither(current: Pair, proposed: Pair, cost: PairCost, band: GpuBand) -> None:
    if (proposed.prefill - current.prefill) * (proposed.decode - current.decode) >= 0:
        return
    found = fit_directional(current, proposed, cost, band)
    assert (found.prefill == current.prefill) == (found.decode == current.decode)


def test_budget_below_the_minimum_replicas_is_infeasible() -> None:
    assert clamp_pair(Pair(3, 3), PairCost(4, 4, 1, 1), GpuBand(-1, 7)) == Pair(0, 0)
    assert clamp_single(3, 4, GpuBand(-1, 3), 1) == 0


def test_pair_over_the_budget_is_scaled_in_proportion() -> None:
    assert clamp_pair(Pair(6, 12), PairCost(1, 1, 1, 1), GpuBand(-1, 9)) == Pair(3, 6)


def test_growth_at_the_full_budget_is_held() -> None:
    found = guard_pair(Pair(2, 2), Pair(3, 2), PairCost(1, 1, 1, 1), GpuBand(-1, 4))
    assert found == (Pair(2, 2), LoadReason.GPU_BUDGET_GUARD_HOLD)


def test_allocation_over_the_budget_is_reduced_to_the_budget() -> None:
    found = guard_single(8, 9, 1, GpuBand(-1, 4), 1)
    assert found == (4, LoadReason.GPU_BUDGET_RECONCILE)


def test_negative_bounds_and_unknown_costs_are_no_budget() -> None:
    assert clamp_pair(Pair(90, 90), PairCost(1, 1, 1, 1), GpuBand(-1, -1)) == Pair(90, 90)
    assert clamp_pair(Pair(90, 90), PairCost(0, 1, 1, 1), GpuBand(-1, 4)) == Pair(90, 90)


def test_budget_below_the_minimum_replicas_holds_the_present_ones() -> None:
    reason = LoadReason.GPU_BUDGET_BELOW_MINIMUM
    assert guard_pair(Pair(3, 3), Pair(4, 3), PairCost(4, 4, 1, 1), GpuBand(-1, 7)) == (Pair(3, 3), reason)
    assert guard_single(3, 2, 4, GpuBand(-1, 3), 1) == (3, reason)
