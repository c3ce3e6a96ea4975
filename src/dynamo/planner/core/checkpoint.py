"""Checkpoints: the state of a planner as plain data, from which a restarted planner goes on.

A restored planner makes the same decisions as any other one that was restored from the same checkpoint. ARIMA models are not part
of it: a restored predictor selects its model again from the saved history. Times are those of the ticks' clock.
"""

from collections.abc import Mapping

import msgspec

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.perf_model import EngineModelState
from dynamo.planner.core.predictors import PredictorState
from dynamo.planner.core.scaling import RoleCount, ScalingState
from dynamo.planner.plugins.types import OverrideResult
from dynamo.protocols.planner import RolloutPhase, ScalingDecision


class PluginCheckpoint(msgspec.Struct, kw_only=True):
    """State of one plugin: its circuit breaker, its last call and its last override."""

    failures: int = 0
    opened_at_s: float | None = None
    called_at_s: float | None = None
    override: OverrideResult | None = None
    is_final: bool = False


class ScalingCheckpoint(msgspec.Struct, kw_only=True):
    """Observations, lower bounds and performance models."""

    lower_bounds: dict[str, int]
    counts: dict[str, RoleCount]
    models: dict[EngineRole, EngineModelState]
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    rollout: RolloutPhase = RolloutPhase.NONE

    @classmethod
    def of(cls, state: ScalingState) -> "ScalingCheckpoint":
        """Return the checkpoint of a state."""
        return cls(
            lower_bounds=dict(state.lower_bounds),
            counts=state.counts,
            models={role: model.state() for role, model in state.models.items()},
            kv_hit_rate=state.kv_hit_rate,
            accept_length=state.accept_length,
            rollout=state.rollout,
        )

    def apply(self, state: ScalingState) -> None:
        """Set a state to this one; models of roles that it does not have are left out."""
        state.lower_bounds = dict(self.lower_bounds)
        state.counts = self.counts
        state.kv_hit_rate, state.accept_length, state.rollout = self.kv_hit_rate, self.accept_length, self.rollout
        for role, model in self.models.items():
            if role in state.models:
                state.models[role].restore(model)


class PlannerCheckpoint(msgspec.Struct, kw_only=True):
    """State of a planner between two ticks."""

    ticks: int
    last_load_s: float
    last_throughput_s: float
    scaling: ScalingCheckpoint
    predictors: Mapping[str, PredictorState] = {}
    plugins: dict[str, PluginCheckpoint] = {}
    last_action: ScalingDecision | None = None
    """The last numbers that were decided, which may not be reached yet."""
    last_action_s: float | None = None
