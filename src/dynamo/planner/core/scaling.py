"""Scaling state: the built-in load (reactive) and throughput (predictive) scaling of one deployment.

The owner calls `observe_workers` and `observe_steps` at each tick, then `propose_throughput` and `propose_load` where they are
due. Nothing here reads a clock or acts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode, OptimizationTarget, PlannerConfig, ScalingPolicy
from dynamo.planner.core.budget import GpuBand, Pair, PairCost, clamp_single, fit_directional, guard_pair, guard_single
from dynamo.planner.core.load_signals import (
    Signal,
    decode_threshold_signal,
    itl_signal,
    merge_aggregated,
    prefill_threshold_signal,
    ttft_signal,
)
from dynamo.planner.core.perf_model import CapacityQuery, EngineCapacity, EngineModel, StepModel, accepted
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.core.regression import StepRegression
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    RankKey,
    RolloutPhase,
    ScalingDecision,
    WorkerCounts,
)

PREFILL, DECODE = "prefill", "decode"
UNOBSERVED = (LoadReason.NO_FPM_DATA, LoadReason.SCALING_IN_PROGRESS, LoadReason.WORKER_COUNT_MISMATCH)
"""Reasons for which the load of a role is not judged; in a disaggregated deployment one role's reason holds for both."""
Steps = Mapping[RankKey, ForwardPassMetrics]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProposal:
    """Result of load scaling."""

    decision: ScalingDecision | None = None
    reason: LoadReason = LoadReason.UNSET
    reason_prefill: LoadReason = LoadReason.UNSET
    reason_decode: LoadReason = LoadReason.UNSET
    estimated_ttft_ms: float | None = None
    estimated_itl_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputProposal:
    """Result of throughput scaling; rates are requests per second of one engine."""

    decision: ScalingDecision | None = None
    reason: ThroughputReason = ThroughputReason.UNSET
    reason_prefill: ThroughputReason = ThroughputReason.UNSET
    reason_decode: ThroughputReason = ThroughputReason.UNSET
    engine_rps_prefill: float | None = None
    engine_rps_decode: float | None = None
    is_objective_met: bool = True
    """False if no batch size meets the objectives; the fastest one was used."""


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

    # Throughput

    def propose_throughput(self, traffic: Traffic | None, duration_s: float) -> ThroughputProposal:
        """Return the workers for the predicted traffic, or set lower bounds if load scaling decides."""
        if traffic is None:
            return ThroughputProposal(reason=ThroughputReason.PREDICT_FAILED)
        self.kv_hit_rate = self.kv_hit_rate if traffic.kv_hit_rate is None else traffic.kv_hit_rate
        self.accept_length = self.accept_length if traffic.accept_length is None else traffic.accept_length
        if not duration_s > 0:
            return ThroughputProposal(reason=ThroughputReason.NO_TRAFFIC_DATA)
        demand_rps = traffic.num_req / duration_s
        capacity = {role: self._capacity(role, model, traffic) for role, model in self.models.items()}
        rates = {role: found.rps if found and found.rps > 0 else None for role, found in capacity.items()}
        prefill_rps = rates.get(EngineRole.PREFILL, rates.get(EngineRole.AGGREGATED))
        decode_rps = rates.get(EngineRole.DECODE, rates.get(EngineRole.AGGREGATED))
        is_met = all(found is None or found.is_eligible for found in capacity.values())
        if self.config.mode is Mode.DISAGG:
            decision, reasons = self._throughput_pair(demand_rps, prefill_rps, decode_rps)
        else:
            component = PREFILL if self.config.mode is Mode.PREFILL else DECODE
            rate = prefill_rps if component == PREFILL else decode_rps
            decision, reason = self._throughput_single(demand_rps, rate, component)
            reasons = (reason, ThroughputReason.UNSET, ThroughputReason.UNSET)
        return ThroughputProposal(
            decision=decision,
            reason=reasons[0],
            reason_prefill=reasons[1],
            reason_decode=reasons[2],
            engine_rps_prefill=prefill_rps,
            engine_rps_decode=decode_rps,
            is_objective_met=is_met,
        )

    def _capacity(self, role: EngineRole, model: EngineModel, traffic: Traffic) -> EngineCapacity | None:
        """Return an engine's capacity; that of an aggregated engine requires its reported token limit."""
        limit = model.capabilities.max_num_batched_tokens if model.capabilities else None
        if not model.is_ready or (role is EngineRole.AGGREGATED and not limit):
            return None
        return model.capacity(self._query(role, traffic))

    def _query(self, role: EngineRole, traffic: Traffic) -> CapacityQuery:
        config = self.config
        return CapacityQuery(
            isl=traffic.isl,
            osl=traffic.osl,
            ttft_s=None if role is EngineRole.DECODE else config.ttft_ms / 1000,
            itl_s=None if role is EngineRole.PREFILL else config.itl_ms / 1000,
            kv_hit_rate=traffic.kv_hit_rate,
            accept_length=self._accepted(traffic.accept_length),
        )

    def _accepted(self, accept_length: float | None) -> float:
        """Return the tokens per decode step, at most one more than the engines speculate."""
        capabilities = self.capabilities.decode
        speculative = (capabilities.speculative_nextn if capabilities else None) or self.config.speculative_nextn
        return min(accepted(accept_length), 1.0 + speculative)

    def _replicas(self, demand_rps: float, rate: float, component: str) -> int:
        """Return the workers for a demand, at most `max_throughput_scaling_replicas` from the current number."""
        limit, now = self.config.max_throughput_scaling_replicas, self.ready(component)
        wanted = max(math.ceil(demand_rps / rate), self.floor(component))
        return max(min(max(wanted, now - limit), now + limit), self.floor(component))

    def _throughput_single(
        self, demand_rps: float, rate: float | None, component: str
    ) -> tuple[ScalingDecision | None, ThroughputReason]:
        now, floor = self.ready(component), self.floor(component)
        if rate is None:
            if self.config.enable_load_scaling:
                self.lower_bounds[component] = max(now, floor)
                return None, ThroughputReason.MODEL_NOT_READY
            held, _ = guard_single(now, max(now, floor), self.gpus(component), self.band, floor)
            return (None if held == now else _decision(component, held)), ThroughputReason.MODEL_NOT_READY
        wanted = self._replicas(demand_rps, rate, component)
        ceiling = GpuBand(-1, self.band.max_gpus)
        fitted = clamp_single(wanted, self.gpus(component), ceiling, floor)
        if self.config.enable_load_scaling:
            self.lower_bounds[component] = fitted
            return None, ThroughputReason.SET_LOWER_BOUND
        target, guard = guard_single(now, fitted, self.gpus(component), self.band, floor)
        pending = self._counts[component].pending
        if pending and guard is not LoadReason.GPU_BUDGET_RECONCILE:
            reduced = startup_reduction(target, now, pending)
            if reduced is None:
                return None, ThroughputReason.UNSET
            return _decision(component, reduced), ThroughputReason.SCALE
        if target == now:
            return None, ThroughputReason(guard.value) if guard else ThroughputReason.NO_CHANGE
        return _decision(component, target), ThroughputReason.SCALE

    def _throughput_pair(
        self, demand_rps: float, prefill_rps: float | None, decode_rps: float | None
    ) -> tuple[ScalingDecision | None, tuple[ThroughputReason, ThroughputReason, ThroughputReason]]:
        now, cost = self.current(), self.cost()
        if prefill_rps is None or decode_rps is None:
            return self._hold_pair(prefill_rps, decode_rps)
        wanted = Pair(self._replicas(demand_rps, prefill_rps, PREFILL), self._replicas(demand_rps, decode_rps, DECODE))
        fitted = self._below_ceiling(wanted)
        if self.config.enable_load_scaling:
            self.lower_bounds = {PREFILL: fitted.prefill, DECODE: fitted.decode}
            is_held = fitted == now != wanted
            return None, _thrice(
                ThroughputReason.GPU_BUDGET_GUARD_HOLD if is_held else ThroughputReason.SET_LOWER_BOUND
            )
        target, guard = guard_pair(now, fitted, cost, self.band)
        if self.is_starting:
            decision = self._startup_reductions(wanted.prefill, wanted.decode)
            reason = ThroughputReason.UNSET if decision is None else ThroughputReason.SCALE
            return decision, (reason, ThroughputReason.UNSET, ThroughputReason.UNSET)
        if target == now:
            return None, _thrice(ThroughputReason(guard.value) if guard else ThroughputReason.NO_CHANGE)
        return ScalingDecision(num_prefill=target.prefill, num_decode=target.decode), _thrice(ThroughputReason.SCALE)

    def _hold_pair(
        self, prefill_rps: float | None, decode_rps: float | None
    ) -> tuple[ScalingDecision | None, tuple[ThroughputReason, ThroughputReason, ThroughputReason]]:
        """Hold both roles where one has no model: scaling only the other moves the bottleneck."""
        not_ready, partner = ThroughputReason.MODEL_NOT_READY, ThroughputReason.PARTNER_NOT_READY
        reasons = (
            not_ready,
            not_ready if prefill_rps is None else partner,
            not_ready if decode_rps is None else partner,
        )
        now = self.current()
        held = Pair(max(now.prefill, self.floor(PREFILL)), max(now.decode, self.floor(DECODE)))
        if self.config.enable_load_scaling:
            self.lower_bounds = {PREFILL: held.prefill, DECODE: held.decode}
            return None, reasons
        return (None if held == now else ScalingDecision(num_prefill=held.prefill, num_decode=held.decode)), reasons

    # Load

    def propose_load(self, observed: FpmObservations, traffic: Traffic | None = None) -> LoadProposal:
        """Return the workers for the load of the engines."""
        hit_rate = traffic.kv_hit_rate if traffic and traffic.kv_hit_rate is not None else self.kv_hit_rate
        accept = traffic.accept_length if traffic and traffic.accept_length is not None else self.accept_length
        if self.config.mode is Mode.DISAGG:
            return self._load_pair(observed, hit_rate, accept)
        component = PREFILL if self.config.mode is Mode.PREFILL else DECODE
        steps = observed.prefill if component == PREFILL else observed.decode
        signal, ttft, itl = self._signal(component, steps, hit_rate, accept)
        if signal.reason in UNOBSERVED:
            return LoadProposal(reason=signal.reason)
        decision, reason = self._load_single(component, signal)
        return LoadProposal(decision=decision, reason=reason, estimated_ttft_ms=ttft, estimated_itl_ms=itl)

    def _signal(
        self, component: str, steps: Steps, hit_rate: float | None, accept: float | None
    ) -> tuple[Signal, float | None, float | None]:
        """Return the signal of one role, and its estimated latencies in milliseconds."""
        count = self._counts[component]
        if count.is_in_progress and not self.is_starting:
            return Signal(None, LoadReason.SCALING_IN_PROGRESS), None, None
        if not steps:
            return Signal(None, LoadReason.NO_FPM_DATA), None, None
        if not is_complete(steps, count.ready or 0):
            return Signal(None, LoadReason.WORKER_COUNT_MISMATCH), None, None
        ordered = [steps[key] for key in sorted(steps)]
        if self.config.optimization_target is OptimizationTarget.SLA:
            return self._latency_signal(component, ordered, hit_rate, accept)
        return self._threshold_signal(component, ordered), None, None

    def _threshold_signal(self, component: str, steps: list[ForwardPassMetrics]) -> Signal:
        workers, config = self.ready(component), self.config
        if component == PREFILL:
            return prefill_threshold_signal(steps, workers, config, self.capabilities.prefill)
        is_aggregated = config.mode is Mode.AGG
        signal = decode_threshold_signal(
            steps, workers, config, self.capabilities.decode, with_queued_prefill=is_aggregated
        )
        is_last = is_aggregated and workers <= 1 and not self.is_starting and signal.reason is LoadReason.SCALE_DOWN
        return Signal(workers, LoadReason.NO_CHANGE) if is_last else signal

    def _latency_signal(
        self, component: str, steps: list[ForwardPassMetrics], hit_rate: float | None, accept: float | None
    ) -> tuple[Signal, float | None, float | None]:
        workers, config = self.ready(component), self.config
        if component == PREFILL:
            model = self.models[EngineRole.PREFILL]
            signal = ttft_signal(steps, workers, model, config, kv_hit_rate=hit_rate, with_decode=False)
            return signal, signal.estimate_ms, None
        is_aggregated = config.mode is Mode.AGG
        model = self.models[EngineRole.AGGREGATED if is_aggregated else EngineRole.DECODE]
        decode = itl_signal(
            steps, workers, model, config, accept_length=self._accepted(accept), with_queued_prefill=is_aggregated
        )
        if not is_aggregated:
            return decode, None, decode.estimate_ms
        prefill = ttft_signal(steps, workers, model, config, kv_hit_rate=hit_rate, with_decode=True)
        return merge_aggregated(prefill, decode, workers), prefill.estimate_ms, decode.estimate_ms

    def _bounded(self, component: str, target: int) -> tuple[int, bool]:
        """Return the target above all floors, and whether the throughput bound prevented a removal."""
        now, floored = self.ready(component), max(target, self.floor(component))
        if not self.config.enable_throughput_scaling:
            return floored, False
        bounded = max(floored, self.lower_bounds[component])
        return bounded, floored < now <= bounded

    def _load_single(self, component: str, signal: Signal) -> tuple[ScalingDecision | None, LoadReason]:
        now, pending = self.ready(component), self._counts[component].pending
        wanted = now if signal.target is None else signal.target
        is_sla = self.config.optimization_target is OptimizationTarget.SLA
        if self.config.mode is Mode.AGG and not signal.is_change and (signal.target is None or not is_sla):
            return None, signal.reason
        bounded, is_capped = self._bounded(component, wanted)
        found, guard = guard_single(now, bounded, self.gpus(component), self.band, self.floor(component))
        if pending and signal.is_change:
            reduced = startup_reduction(found, now, pending)
            if reduced is not None:
                capped = LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT if is_capped else LoadReason.SCALE_DOWN
                return _decision(component, reduced), guard or capped
            is_dropped = signal.reason is LoadReason.SCALE_UP
            return None, guard or (LoadReason.UNSET if is_dropped else LoadReason.SCALE_UP)
        if guard is not None:
            is_held = found == now or (pending > 0 and found > now)
            return (None if is_held else _decision(component, found)), guard
        if found == now or pending:
            if pending and found > now:
                return None, LoadReason.SCALE_UP
            if is_capped and self.config.mode is Mode.AGG:
                return None, LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT
            return None, LoadReason.NO_CHANGE if signal.is_change else signal.reason
        return _decision(component, found), LoadReason.SCALE_UP if found > now else LoadReason.SCALE_DOWN

    def _load_pair(self, observed: FpmObservations, hit_rate: float | None, accept: float | None) -> LoadProposal:
        prefill, ttft, _ = self._signal(PREFILL, observed.prefill, hit_rate, accept)
        decode, _, itl = self._signal(DECODE, observed.decode, hit_rate, accept)
        for reason in UNOBSERVED:
            is_local = reason is LoadReason.NO_FPM_DATA and (self.is_starting or prefill.reason is not decode.reason)
            if reason in (prefill.reason, decode.reason) and not is_local:
                return LoadProposal(reason=reason, reason_prefill=reason, reason_decode=reason)
        if self.is_starting:
            decision, reason = self._startup_load(prefill, decode)
            return LoadProposal(decision=decision, reason=reason, estimated_ttft_ms=ttft, estimated_itl_ms=itl)
        now = self.current()
        wanted = Pair(
            now.prefill if prefill.target is None else prefill.target,
            now.decode if decode.target is None else decode.target,
        )
        bounded_prefill, capped_prefill = self._bounded(PREFILL, wanted.prefill)
        bounded_decode, capped_decode = self._bounded(DECODE, wanted.decode)
        bounded = Pair(bounded_prefill, bounded_decode)
        fitted = self._below_ceiling(bounded) if self.config.enable_throughput_scaling else bounded
        target, guard = guard_pair(now, fitted, self.cost(), self.band)
        if guard is None and fitted == now != bounded:
            guard = LoadReason.GPU_BUDGET_GUARD_HOLD
        if target == now:
            roles = (
                _held_reason(prefill, is_capped=capped_prefill),
                _held_reason(decode, is_capped=capped_decode),
            )
            overall = guard or _overall_held(roles)
        else:
            roles = (
                _moved(now.prefill, target.prefill, is_capped=capped_prefill),
                _moved(now.decode, target.decode, is_capped=capped_decode),
            )
            overall = guard or (LoadReason.SCALE_UP if LoadReason.SCALE_UP in roles else LoadReason.SCALE_DOWN)
        return LoadProposal(
            decision=ScalingDecision(num_prefill=target.prefill, num_decode=target.decode) if target != now else None,
            reason=overall,
            reason_prefill=roles[0],
            reason_decode=roles[1],
            estimated_ttft_ms=ttft,
            estimated_itl_ms=itl,
        )

    def _below_ceiling(self, wanted: Pair) -> Pair:
        """Return the pair between the present one and the wanted one that is closest to it below the upper bound."""
        ceiling = GpuBand(-1, self.band.max_gpus)
        if not ceiling.is_active or not self.cost().is_known:
            return wanted
        return fit_directional(self.current(), wanted, self.cost(), ceiling)

    def _startup_load(self, prefill: Signal, decode: Signal) -> tuple[ScalingDecision | None, LoadReason]:
        """Return the reductions of the roles whose load allows one, while workers start."""
        signals = (prefill, decode)
        lower = [
            self._bounded(component, signal.target)[0]
            if signal.reason is LoadReason.SCALE_DOWN and signal.target is not None
            else None
            for component, signal in zip((PREFILL, DECODE), signals, strict=True)
        ]
        decision = self._startup_reductions(*lower)
        if decision is not None:
            return decision, LoadReason.SCALE_DOWN
        reasons = [_held_reason(signal, is_capped=False) for signal in signals if not signal.is_change]
        return None, _overall_held(reasons) if reasons else LoadReason.UNSET

    def _startup_reductions(self, prefill: int | None, decode: int | None) -> ScalingDecision | None:
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


def is_complete(steps: Steps, ready: int) -> bool:
    """Return whether there is a step of each rank of each ready worker, and of no other worker."""
    ranks: dict[str, set[int]] = {}
    for worker, rank in steps:
        ranks.setdefault(worker, set()).add(rank)
    first = next(iter(ranks.values()))
    return len(ranks) == ready and all(one == first for one in ranks.values())


def _updated(old: RoleCount, ready: int | None, expected: int | None, pending: int, *, is_scaling: bool) -> RoleCount:
    return RoleCount(old.ready if ready is None else ready, expected, is_scaling, pending)


def _decision(component: str, replicas: int) -> ScalingDecision:
    if component == PREFILL:
        return ScalingDecision(num_prefill=replicas)
    return ScalingDecision(num_decode=replicas)


def _thrice(reason: ThroughputReason) -> tuple[ThroughputReason, ThroughputReason, ThroughputReason]:
    return reason, reason, reason


def _held_reason(signal: Signal, *, is_capped: bool) -> LoadReason:
    """Return the reason of a role that does not change in a deployment that does not change."""
    if is_capped:
        return LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT
    is_unjudged = signal.is_change or signal.reason is LoadReason.NO_FPM_DATA
    return LoadReason.NO_CHANGE if is_unjudged else signal.reason


def _overall_held(reasons: Sequence[LoadReason]) -> LoadReason:
    for reason in (
        LoadReason.INSUFFICIENT_DATA,
        LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION,
        LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT,
        LoadReason.NO_CHANGE,
    ):
        if reason in reasons:
            return reason
    return reasons[0]


def _moved(now: int, target: int, *, is_capped: bool) -> LoadReason:
    if target == now:
        return LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT if is_capped else LoadReason.NO_CHANGE
    return LoadReason.SCALE_UP if target > now else LoadReason.SCALE_DOWN
