"""Scaling state: observations of one deployment, and the bounds within which it is scaled.

The owner calls `observe_workers` and `observe_steps` at each tick, then `throughput_scaling.propose_throughput` and
`load_scaling.propose_load` where they are due. Nothing here reads a clock or acts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode, PlannerConfig, ScalingPolicy
from dynamo.planner.core.budget import GpuBand, Pair, PairCost, fit_directional
from dynamo.planner.core.perf_model import EngineModel, StepModel, accepted
from dynamo.planner.core.regression import StepRegression
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    RolloutPhase,
    ScalingDecision,
    WorkerCounts,
)

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapabilities:
    """Capacity of one worker of each role; None: the role does not exist or is unknown."""

    prefill: EngineCapabilities | None = None
    decode: EngineCapabilities | None = None

    @property
    def both(self) -> tuple[EngineCapabilities | None, EngineCapabilities | None]:
        """Prefill and decode."""
        return self.prefill, self.decode


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Workers of one role."""

    ready: int | None = None
    expected: int | None = None
    is_scaling: bool = False
    pending: int = 0
    """Workers that are still starting, where that is the only reason for ready and expected to differ."""

    @property
    def is_in_progress(self) -> bool:
        """Return whether the number of workers is changing for other reasons than a start."""
        if self.pending > 0:
            return False
        return self.is_scaling or (self.expected is not None and self.expected != self.ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Predicted traffic of the next interval."""

    num_req: float
    isl: float
    osl: float
    kv_hit_rate: float | None = None
    accept_length: float | None = None


@dataclass(slots=True)
class ScalingState:
    """Observations and lower bounds of one deployment."""

    config: PlannerConfig
    capabilities: WorkerCapabilities
    lower_bounds: dict[str, int] = field(init=False)
    models: dict[EngineRole, EngineModel] = field(init=False)
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    rollout: RolloutPhase = RolloutPhase.NONE
    _counts: dict[str, RoleCount] = field(init=False)

    def __post_init__(self) -> None:
        self.lower_bounds = {PREFILL: 1, DECODE: 1}
        self._counts = {PREFILL: RoleCount(), DECODE: RoleCount()}
        self.models = {role: self._model(role) for role in self._roles()}

    def _roles(self) -> list[EngineRole]:
        if self.config.mode is Mode.AGG:
            return [EngineRole.AGGREGATED]
        roles = [EngineRole.PREFILL] if self.config.mode.scales_prefill else []
        return [*roles, EngineRole.DECODE] if self.config.mode.scales_decode else roles

    def _model(self, role: EngineRole) -> EngineModel:
        config = self.config
        steps: StepModel = StepRegression(
            role,
            config.max_num_fpm_samples,
            config.fpm_sample_bucket_size,
            config.load_min_observations,
            is_bounded=config.scaling_policy is ScalingPolicy.FORECAST,
        )
        return EngineModel(role, steps, config.max_num_fpm_samples, self._capabilities(role))

    def _capabilities(self, role: EngineRole) -> EngineCapabilities | None:
        return self.capabilities.prefill if role is EngineRole.PREFILL else self.capabilities.decode

    def update_capabilities(self, capabilities: WorkerCapabilities) -> None:
        """Set the workers' capacities, for example after a rollout."""
        self.capabilities = capabilities
        for role, model in self.models.items():
            model.capabilities = self._capabilities(role)

    def observe_workers(self, counts: WorkerCounts) -> None:
        """Set the numbers of workers; a number that is unknown keeps its last value."""
        self.rollout = counts.rollout
        self._counts = {
            PREFILL: _updated(
                self._counts[PREFILL],
                counts.ready_num_prefill,
                counts.expected_num_prefill,
                counts.pending_num_prefill,
                is_scaling=counts.prefill_scaling_in_progress,
            ),
            DECODE: _updated(
                self._counts[DECODE],
                counts.ready_num_decode,
                counts.expected_num_decode,
                counts.pending_num_decode,
                is_scaling=counts.decode_scaling_in_progress,
            ),
        }

    @property
    def counts(self) -> dict[str, RoleCount]:
        """The last observed numbers of workers by role."""
        return dict(self._counts)

    @counts.setter
    def counts(self, counts: Mapping[str, RoleCount]) -> None:
        self._counts = dict(counts)

    def note_traffic(self, traffic: Traffic) -> None:
        """Keep the cached share and the accepted tokens of the traffic, where they are known, for load scaling."""
        self.kv_hit_rate = self.kv_hit_rate if traffic.kv_hit_rate is None else traffic.kv_hit_rate
        self.accept_length = self.accept_length if traffic.accept_length is None else traffic.accept_length

    def set_lower_bound(self, component: str, workers: int) -> None:
        """Set the workers of a role below which load scaling does not go."""
        self.lower_bounds[component] = workers

    def set_lower_bounds(self, workers: Pair) -> None:
        """Set the lower bounds of both roles."""
        self.lower_bounds = {PREFILL: workers.prefill, DECODE: workers.decode}

    def observe_steps(self, observed: FpmObservations) -> None:
        """Learn from the latest forward passes."""
        for role, model in self.models.items():
            model.observe(observed.prefill if role is EngineRole.PREFILL else observed.decode)
            if role is EngineRole.AGGREGATED and self.config.scaling_policy is ScalingPolicy.FORECAST:
                model.learn(observed.prompts)

    def ready(self, component: str) -> int:
        """Return the number of ready workers of a role; 0 if unknown."""
        return self._counts[component].ready or 0

    def pending(self, component: str) -> int:
        """Return the number of workers of a role that are starting."""
        return self._counts[component].pending

    def count(self, component: str) -> RoleCount:
        """Return the last observed numbers of workers of a role."""
        return self._counts[component]

    @property
    def is_starting(self) -> bool:
        """Return whether workers of any role are starting: only reductions are decided until they are ready."""
        return any(count.pending > 0 for count in self._counts.values())

    def floor(self, component: str) -> int:
        """Return the configured minimum of a role."""
        return self.config.prefill_floor if component == PREFILL else self.config.decode_floor

    @property
    def band(self) -> GpuBand:
        """The GPU budget."""
        return GpuBand(self.config.min_gpu_budget, self.config.max_gpu_budget)

    def gpus(self, component: str) -> int:
        """Return the GPUs of one replica; 0 if unknown, which disables budgets."""
        found = self.capabilities.prefill if component == PREFILL else self.capabilities.decode
        return (found.gpus_per_replica if found else None) or 0

    def cost(self) -> PairCost:
        """Return GPUs and minimums of both roles."""
        return PairCost(self.gpus(PREFILL), self.gpus(DECODE), self.floor(PREFILL), self.floor(DECODE))

    def current(self) -> Pair:
        """Return the ready workers of both roles."""
        return Pair(self.ready(PREFILL), self.ready(DECODE))

    def accepted_tokens(self, accept_length: float | None) -> float:
        """Return the tokens per decode step, at most one more than the engines speculate."""
        capabilities = self.capabilities.decode
        speculative = (capabilities.speculative_nextn if capabilities else None) or self.config.speculative_nextn
        return min(accepted(accept_length), 1.0 + speculative)

    def below_ceiling(self, wanted: Pair) -> Pair:
        """Return the pair between the present one and the wanted one that is closest to it below the upper bound."""
        ceiling = GpuBand(-1, self.band.max_gpus)
        if not ceiling.is_active or not self.cost().is_known:
            return wanted
        return fit_directional(self.current(), wanted, self.cost(), ceiling)

    def startup_reductions(self, prefill: int | None, decode: int | None) -> ScalingDecision | None:
        """Return the reductions to these targets that keep the lower GPU bound, while workers start; None: no reduction.

        A role that is not reduced keeps its ready and starting workers.
        """
        counts = (self._counts[PREFILL], self._counts[DECODE])
        reduced = [
            None if target is None else startup_reduction(target, count.ready or 0, count.pending)
            for target, count in zip((prefill, decode), counts, strict=True)
        ]
        if reduced == [None, None]:
            return None
        if self.cost().is_known:
            kept = [
                (count.ready or 0) + (count.pending if target is None else 0)
                for target, count in zip(reduced, counts, strict=True)
            ]
            proposed = [now if target is None else target for now, target in zip(kept, reduced, strict=True)]
            fitted = fit_directional(Pair(*kept), Pair(*proposed), self.cost(), GpuBand(self.band.min_gpus, -1))
            reduced = [None if target is None else fit for target, fit in zip(reduced, fitted, strict=True)]
        return ScalingDecision(num_prefill=reduced[0], num_decode=reduced[1])


def startup_reduction(target: int, ready: int, pending: int) -> int | None:
    """Return the target if it cancels starts or removes workers; None if it would add any."""
    return target if target < ready or (pending > 0 and target == ready) else None


def _updated(old: RoleCount, ready: int | None, expected: int | None, pending: int, *, is_scaling: bool) -> RoleCount:
    return RoleCount(old.ready if ready is None else ready, expected, is_scaling, pending)


def decision_of(component: str, replicas: int) -> ScalingDecision:
    """Return the decision that sets the workers of one role."""
    if component == PREFILL:
        return ScalingDecision(num_prefill=replicas)
    return ScalingDecision(num_decode=replicas)
