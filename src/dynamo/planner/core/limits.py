"""Limits after the pipeline: the power budget and holds during a rollout.

Power is a ceiling only: it reduces a proposal and never raises one, and it has precedence over the lower GPU bound.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dynamo.planner.core.budget import GpuBand, Pair, PairCost, fit_directional
from dynamo.planner.core.reasons import LimitReason
from dynamo.protocols.planner import RolloutPhase


class Targets(NamedTuple):
    """Numbers of replicas to set; None: the role is not changed."""

    prefill: int | None
    decode: int | None


@dataclass(frozen=True, slots=True)
class PowerBudget:
    """Limit of the watts of all replicas; the costs are watts of one replica of each role."""

    limit: int
    cost: PairCost

    @property
    def is_feasible(self) -> bool:
        """Return whether the minimum replicas are within the limit."""
        return self.cost.minimum <= self.limit

    def peak(self, current: Pair, targets: Targets) -> int:
        """Return the watts while both roles move to their targets at the same time."""
        return self.cost.of(Pair(*(max(now, to or 0) for now, to in zip(current, targets, strict=True))))

    def total(self, current: Pair, targets: Targets) -> int:
        """Return the watts after the change."""
        return self.cost.of(Pair(*(now if to is None else to for now, to in zip(current, targets, strict=True))))


def fit_power(current: Pair, proposed: Targets, power: PowerBudget) -> tuple[Targets, LimitReason | None]:
    """Return the proposal within the power budget, and the reason if it was reduced.

    A role that is not proposed is charged with its present replicas. If one role grows and the other shrinks, and both
    at once would exceed the limit, the growth waits for a later tick.
    """
    cost, limit = power.cost, power.limit
    can_change = Targets(proposed.prefill if cost.prefill > 0 else None, proposed.decode if cost.decode > 0 else None)
    if None not in can_change:
        staged = _staged(current, proposed, power)
        if staged is not None:
            return staged, LimitReason.POWER_REBALANCE_STAGED
    if power.total(current, proposed) <= limit:
        return proposed, None
    if can_change.prefill is not None and can_change.decode is not None:
        return _fit_both(current, Pair(can_change.prefill, can_change.decode), power)
    if can_change.prefill is not None:
        left = limit - (current.decode if proposed.decode is None else proposed.decode) * cost.decode
        fitted, reason = _fit_one(current.prefill, can_change.prefill, cost.prefill, left, cost.prefill_min)
        return Targets(fitted, proposed.decode), reason
    if can_change.decode is not None:
        left = limit - (current.prefill if proposed.prefill is None else proposed.prefill) * cost.prefill
        fitted, reason = _fit_one(current.decode, can_change.decode, cost.decode, left, cost.decode_min)
        return Targets(proposed.prefill, fitted), reason
    return proposed, None


def _fit_both(current: Pair, proposed: Pair, power: PowerBudget) -> tuple[Targets, LimitReason]:
    cost, limit = power.cost, power.limit
    if cost.of(current) <= limit:
        fitted = fit_directional(current, proposed, cost, GpuBand(-1, limit))
        return Targets(*fitted), LimitReason.POWER_BUDGET_CLAMPED
    if not power.is_feasible:
        return held(current, Targets(*proposed)), LimitReason.POWER_BUDGET_BELOW_MINIMUM
    most = (limit - cost.decode_min * cost.decode) // cost.prefill
    share = math.floor(proposed.prefill * (limit / cost.of(proposed)))
    prefill = min(proposed.prefill, max(cost.prefill_min, min(most, share)))
    decode = min(proposed.decode, max(cost.decode_min, (limit - prefill * cost.prefill) // cost.decode))
    shrunk = Targets(prefill, decode)
    staged = _staged(current, shrunk, power)
    if staged is not None:
        return staged, LimitReason.POWER_REBALANCE_STAGED
    return shrunk, LimitReason.POWER_BUDGET_CLAMPED


def _fit_one(current: int, proposed: int, watts: int, left: int, minimum: int) -> tuple[int, LimitReason | None]:
    """Return the replicas of one role in the watts that the other one leaves."""
    if left < minimum * watts:
        fitted = min(proposed, current)
        return fitted, LimitReason.POWER_BUDGET_SCALE_UP_SUPPRESSED if fitted != proposed else None
    fitted = max(minimum, min(proposed, left // watts))
    return fitted, LimitReason.POWER_BUDGET_CLAMPED if fitted != proposed else None


def _staged(current: Pair, targets: Targets, power: PowerBudget) -> Targets | None:
    """Return only the reductions of an opposing change that would exceed the limit on the way; None if it would not."""
    changes = [(to or 0) - now for now, to in zip(current, targets, strict=True)]
    if changes[0] * changes[1] >= 0 or power.peak(current, targets) <= power.limit:
        return None
    return held(current, targets)


def held(current: Pair, targets: Targets) -> Targets:
    """Return the targets without growth."""
    return Targets(*(None if to is None else min(to, now) for now, to in zip(current, targets, strict=True)))


def rollout_hold(phase: RolloutPhase) -> LimitReason | None:
    """Return the reason why a rollout prevents scaling; None if it does not.

    During a rollout the numbers of old and new workers are not those that a decision would set, and a change of the
    deployment restarts it. A failed one leaves workers of two versions, which an operator has to resolve.
    """
    if phase in (RolloutPhase.PENDING, RolloutPhase.IN_PROGRESS):
        return LimitReason.ROLLOUT_IN_PROGRESS
    return LimitReason.ROLLOUT_FAILED if phase is RolloutPhase.FAILED else None
