"""Bugs that are introduced into the planner, one at a time: the simulation has to detect each."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.core.demand import DemandForecast
from dynamo.planner.core.engine import PlannerCore, TickDecision
from dynamo.planner.core.pipeline import PipelineOutcome
from dynamo.planner.service import PlannerService
from dynamo.protocols.planner import ScalingDecision

OBSERVER = "dynamo.planner.observation.observer"


def invalid_values_are_used() -> AbstractContextManager[object]:
    """Pass traffic that is not finite on."""
    return patch(f"{OBSERVER}.is_valid_traffic", lambda traffic: True)


def invalid_steps_are_used() -> AbstractContextManager[object]:
    """Pass forward passes that are not finite on."""
    return patch(f"{OBSERVER}.is_valid_step", lambda step: True)


def demand_is_forgotten() -> AbstractContextManager[object]:
    """Plan for no demand."""
    return patch.object(DemandForecast, "quantile", lambda self, part: 0.0)


def budget_is_ignored() -> AbstractContextManager[object]:
    """Request twice the number that was decided."""
    decided = PlannerCore._decided

    def doubled(self: PlannerCore, now_s: float, outcome: PipelineOutcome) -> TickDecision:
        found = decided(self, now_s, outcome)
        if found.scale_to is None:
            return found
        return replace(found, scale_to=ScalingDecision(num_decode=2 * (found.scale_to.num_decode or 0)))

    return patch.object(PlannerCore, "_decided", doubled)


def failures_have_no_cause() -> AbstractContextManager[object]:
    """Report each scale request as failed, without a cause."""

    async def act(self: PlannerService, decision: object, observation: object) -> ScaleOutcome:
        return ScaleOutcome(ScaleStatus.FAILED, "")

    return patch.object(PlannerService, "_act", act)


MUTANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    one.__name__: one
    for one in (
        invalid_values_are_used,
        invalid_steps_are_used,
        demand_is_forgotten,
        budget_is_ignored,
        failures_have_no_cause,
    )
}
