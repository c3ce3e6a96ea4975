"""Forecast scaling of a deployment: one forecast per role, and one proposal for the pipeline."""

from dataclasses import dataclass, field

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.budget import clamp_single
from dynamo.planner.core.forecast import ForecastEstimate, RoleForecast
from dynamo.planner.core.load_scaling import LoadProposal
from dynamo.planner.core.reasons import LoadReason
from dynamo.planner.core.scaling import DECODE, PREFILL, ScalingState
from dynamo.protocols.planner import FpmObservations, ScalingDecision, TrafficObservation


@dataclass(frozen=True, slots=True)
class ForecastTick:
    """Estimates of one tick; None: the role is not scaled."""

    prefill: ForecastEstimate | None = None
    decode: ForecastEstimate | None = None


@dataclass(slots=True)
class ForecastScaling:
    """Forecasts of the scaled roles. One owner."""

    config: PlannerConfig
    state: ScalingState
    last: ForecastTick | None = None
    _roles: dict[str, RoleForecast] = field(init=False)

    def __post_init__(self) -> None:
        self._roles = {
            PREFILL if role is EngineRole.PREFILL else DECODE: RoleForecast(role, self.config, model)
            for role, model in self.state.models.items()
        }

    def propose(self, now_s: float, traffic: TrafficObservation | None, observed: FpmObservations) -> LoadProposal:
        """Return the replicas of all scaled roles, within the upper GPU bound."""
        found: dict[str, ForecastEstimate] = {}
        for component, role in self._roles.items():
            steps = observed.prefill if component == PREFILL else observed.decode
            counts = self.state.ready(component), self.state.pending(component)
            found[component] = role.propose(now_s, counts, traffic, [steps[key] for key in sorted(steps)])
        self.last = ForecastTick(found.get(PREFILL), found.get(DECODE))
        targets = {component: self._target(component, one) for component, one in found.items()}
        reasons = [one.reason for one in found.values()]
        overall = LoadReason.SCALE_UP if LoadReason.SCALE_UP in reasons else reasons[-1]
        latencies = {component: one.latency_ms for component, one in found.items()}
        return LoadProposal(
            decision=None
            if all(target is None for target in targets.values())
            else ScalingDecision(num_prefill=targets.get(PREFILL), num_decode=targets.get(DECODE)),
            reason=overall,
            reason_prefill=found[PREFILL].reason if PREFILL in found else LoadReason.UNSET,
            reason_decode=found[DECODE].reason if DECODE in found else LoadReason.UNSET,
            estimated_ttft_ms=latencies.get(PREFILL),
            estimated_itl_ms=latencies.get(DECODE),
        )

    def _target(self, component: str, estimate: ForecastEstimate) -> int | None:
        """Return the replicas of a role within the budget; None if the expected ones already are that number."""
        if estimate.target is None:
            return None
        state, gpus = self.state, self.state.gpus(component)
        target = max(estimate.target, state.floor(component))
        if gpus and state.band.is_active:
            target = clamp_single(target, gpus, state.band, state.floor(component))
        return None if target == state.ready(component) + state.pending(component) else target
