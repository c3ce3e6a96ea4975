"""Limits after the pipeline: power budgets only reduce, and a rollout holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.core.budget import Pair, PairCost
from dynamo.planner.core.limits import PowerBudget, Targets, fit_power, rollout_hold
from dynamo.planner.core.reasons import LimitReason
from dynamo.protocols.planner import RolloutPhase

COUNTS = st.integers(0, 9)
TARGETS = st.builds(Targets, st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
WATTS = st.sampled_from([100, 400, 700])
BUDGETS = st.builds(PowerBudget, st.integers(0, 6000), st.builds(PairCost, WATTS, WATTS, st.just(1), st.just(1)))


@given(st.builds(Pair, COUNTS, COUNTS), TARGETS, BUDGETS)
def test_power_budget_never_raises_a_target_and_names_each_reduction(
    current: Pair, proposed: Targets, power: PowerBudget
) -> None:
    found, reason = fit_power(current, proposed, power)
    for before, after in zip(proposed, found, strict=True):
        assert (before is None) == (after is None)
        assert before is None or after is None or after <= before
    assert found == proposed or reason is not None


@given(st.builds(Pair, COUNTS, COUNTS), TARGETS, BUDGETS)
def test_power_budget_is_not_exceeded_by_growth(current: Pair, proposed: Targets, power: PowerBudget) -> None:
    found, _ = fit_power(current, proposed, power)
    if any(to is not None and to > now for now, to in zip(current, found, strict=True)):
        assert power.total(current, found) <= power.limit


def test_power_budget_below_the_minimum_allows_no_growth() -> None:
    power = PowerBudget(100, PairCost(700, 700, 1, 1))
    found, reason = fit_power(Pair(2, 2), Targets(3, 2), power)
    assert (found, reason) == (Targets(2, 2), LimitReason.POWER_BUDGET_BELOW_MINIMUM)


def test_opposing_change_over_the_power_limit_only_shrinks_first() -> None:
    power = PowerBudget(500, PairCost(100, 100, 1, 1))
    found, reason = fit_power(Pair(1, 4), Targets(4, 1), power)
    assert (found, reason) == (Targets(1, 1), LimitReason.POWER_REBALANCE_STAGED)


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        (RolloutPhase.NONE, None),
        (RolloutPhase.PENDING, LimitReason.ROLLOUT_IN_PROGRESS),
        (RolloutPhase.IN_PROGRESS, LimitReason.ROLLOUT_IN_PROGRESS),
        (RolloutPhase.COMPLETED, None),
        (RolloutPhase.FAILED, LimitReason.ROLLOUT_FAILED),
    ],
)
def test_rollout_holds_until_it_is_complete(phase: RolloutPhase, reason: LimitReason | None) -> None:
    assert rollout_hold(phase) is reason
