"""Planner core: one tick from observations to a decision that carries every stage's proposal, its reasons and its clamps.

The built-in predictor and the two built-in proposals take part in the pipeline as plugins. `turn` yields the calls of the other
plugins, for a shell that makes them; `tick` is for plugins in this process, or none.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode, PlannerConfig, ScalingPolicy
from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.budget import Pair, PairCost, guard_pair, guard_single
from dynamo.planner.core.checkpoint import PlannerCheckpoint, ScalingCheckpoint
from dynamo.planner.core.forecast_scaling import ForecastScaling, ForecastTick
from dynamo.planner.core.limits import PowerBudget, Targets, fit_power, held, rollout_hold
from dynamo.planner.core.load_scaling import LoadProposal, propose_load
from dynamo.planner.core.pipeline import (
    Finished,
    PipelineOutcome,
    PluginCall,
    PluginPipeline,
    PluginReply,
    PluginSpec,
    StageRecord,
    Turn,
    drive,
    resume,
)
from dynamo.planner.core.predictors import LoadPredictor, make_predictor
from dynamo.planner.core.reasons import ExecuteAction, LimitReason, LoadReason, ThroughputReason
from dynamo.planner.core.scaling import DECODE, PREFILL, ScalingState, Traffic, WorkerCapabilities
from dynamo.planner.core.throughput_scaling import ThroughputProposal, propose_throughput
from dynamo.planner.plugins.types import (
    AcceptResult,
    ComponentTarget,
    FpmData,
    ObservationData,
    OverrideResult,
    PipelineContext,
    PredictionData,
    PredictStageResponse,
    ProposeStageResponse,
    StageResponse,
    TrafficMetrics,
    WorkerState,
)
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import (
    FpmObservations,
    RankKey,
    ScalingDecision,
    ScheduledTick,
    TickInput,
    TrafficObservation,
    WorkerCounts,
)

LOAD_PREDICT, THROUGHPUT_PROPOSE, LOAD_PROPOSE = (
    "builtin_load_predict",
    "builtin_throughput_propose",
    "builtin_load_propose",
)
BUILTINS = (
    PluginSpec(plugin_id=LOAD_PREDICT, stage=PluginStage.PREDICT, priority=0),
    PluginSpec(plugin_id=LOAD_PROPOSE, stage=PluginStage.PROPOSE, priority=10),
    PluginSpec(plugin_id=THROUGHPUT_PROPOSE, stage=PluginStage.PROPOSE, priority=20),
)
TIME_TOLERANCE_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TickDecision:
    """Everything that a tick decided, and why."""

    now_s: float
    action: ExecuteAction
    scale_to: ScalingDecision | None
    """Numbers to set; None: no change."""
    load: LoadProposal
    throughput: ThroughputProposal
    predictions: PredictionData | None
    stages: tuple[StageRecord, ...]
    lower_bounds: dict[str, int]
    clamped: tuple[str, ...] = ()
    """Changes after the pipeline, in words: minimum, budget, rollout."""
    limits: tuple[LimitReason, ...] = ()
    """Limits that reduced or held the result of the pipeline."""
    rejected_by: str = ""
    reject_reason: str = ""
    forecast: ForecastTick | None = None
    """Estimates of forecast scaling; None with another policy, or where it was not due."""


DecisionTurn = Generator[list[PluginCall], list[PluginReply], TickDecision]


class PlannerCore:
    """State of one planner: predictors, performance models, pipeline and schedule. One owner."""

    def __init__(
        self, config: PlannerConfig, capabilities: WorkerCapabilities, plugins: Sequence[PluginSpec] = ()
    ) -> None:
        self.config = config
        self.state = ScalingState(config, capabilities)
        self.pipeline = PluginPipeline((*BUILTINS, *plugins))
        self._predictors: dict[str, LoadPredictor] = (
            {name: make_predictor(config) for name in ("num_req", "isl", "osl", "kv_hit_rate")}
            if config.enable_throughput_scaling
            else {}
        )
        self._last_load_s = self._last_throughput_s = 0.0
        self._ticks = 0
        self._last_action: ScalingDecision | None = None
        self._last_action_s: float | None = None
        is_forecast = config.scaling_policy is ScalingPolicy.FORECAST
        self._forecast = ForecastScaling(config, self.state) if is_forecast else None
        self._load, self._throughput = LoadProposal(), ThroughputProposal()

    # Start

    def warm_up(self, observed: Sequence[TrafficObservation]) -> None:
        """Feed the traffic of a trace to the predictors, before the first tick."""
        for one in observed:
            self._observe_traffic(one)
        for predictor in self._predictors.values():
            predictor.skip_idle()

    def bootstrap(self, steps: Mapping[EngineRole, Sequence[ForwardPassMetrics]]) -> None:
        """Feed steps measured before the deployment to the performance models."""
        for role, measured in steps.items():
            if role in self.state.models:
                self.state.models[role].learn(measured)

    def checkpoint(self) -> PlannerCheckpoint:
        """Return the state, from which `restore` goes on after a restart."""
        return PlannerCheckpoint(
            ticks=self._ticks,
            last_load_s=self._last_load_s,
            last_throughput_s=self._last_throughput_s,
            scaling=ScalingCheckpoint.of(self.state),
            predictors={name: predictor.state() for name, predictor in self._predictors.items()},
            plugins=self.pipeline.checkpoint(),
            last_action=self._last_action,
            last_action_s=self._last_action_s,
        )

    def restore(self, saved: PlannerCheckpoint) -> None:
        """Set the state to that of a checkpoint of a planner with the same configuration."""
        self._ticks = saved.ticks
        self._last_load_s, self._last_throughput_s = saved.last_load_s, saved.last_throughput_s
        saved.scaling.apply(self.state)
        for name, state in saved.predictors.items():
            if name in self._predictors:
                self._predictors[name].restore(state)
        self.pipeline.restore(saved.plugins)
        self._last_action, self._last_action_s = saved.last_action, saved.last_action_s
        if self._forecast is not None:  # Its history is not saved: it is measured again.
            self._forecast = ForecastScaling(self.config, self.state)

    def set_limits(self, config: PlannerConfig) -> None:
        """Use a configuration that differs in the minimum workers and GPU budgets only."""
        self.config = self.state.config = config
        if self._forecast is not None:  # Its history is measured again, as after `restore`.
            self._forecast = ForecastScaling(config, self.state)

    def first_tick(self, start_s: float) -> ScheduledTick:
        """Return the first tick of a planner that starts at a time."""
        self._last_load_s = self._last_throughput_s = start_s
        return self._scheduled(start_s + self.config.scheduling.scale_interval_seconds)

    def next_tick(self, done: ScheduledTick, now_s: float) -> ScheduledTick:
        """Return the tick after one that is done; ticks that are already over are left out."""
        interval = self.config.scheduling.scale_interval_seconds
        if now_s < done.at_s - interval:  # The clock was set back: do not wait until it has passed the last tick again.
            return self._scheduled(now_s + interval)
        missed = max(0, math.floor((now_s - done.at_s) / interval))
        return self._scheduled(done.at_s + interval * (1 + missed))

    def _scheduled(self, at_s: float) -> ScheduledTick:
        config = self.config
        runs_load = config.enable_load_scaling and self._is_due(
            at_s, self._last_load_s, config.load_adjustment_interval_seconds
        )
        runs_throughput = config.enable_throughput_scaling and self._is_due(
            at_s, self._last_throughput_s, config.throughput_adjustment_interval_seconds
        )
        needs_traffic = runs_throughput or (runs_load and self._forecast is not None)
        window_s = (
            config.load_adjustment_interval_seconds
            if self._forecast is not None
            else (config.throughput_adjustment_interval_seconds)
        )
        return ScheduledTick(
            at_s=at_s,
            run_load_scaling=runs_load,
            run_throughput_scaling=runs_throughput,
            need_traffic_metrics=needs_traffic,
            use_full_traffic_metrics=needs_traffic,
            traffic_metrics_duration_s=float(window_s) if needs_traffic else 0.0,
            need_worker_states=True,
            need_worker_fpm=True,
        )

    @staticmethod
    def _is_due(at_s: float, last_s: float, interval_s: float) -> bool:
        return at_s < last_s or at_s - last_s >= interval_s - TIME_TOLERANCE_S

    # Tick

    def tick(
        self, scheduled: ScheduledTick, seen: TickInput, call: Callable[[PluginCall], StageResponse] | None = None
    ) -> TickDecision:
        """Run a tick whose plugins are called in this process. Raise `LookupError` for a plugin without `call`."""

        def refuse(one: PluginCall) -> StageResponse:
            raise LookupError(f"plugin {one.spec.plugin_id} is not in this process")

        return drive(self.turn(scheduled, seen), call or refuse)

    def turn(self, scheduled: ScheduledTick, seen: TickInput) -> DecisionTurn:
        """Run a tick; yields the calls of plugins that are not built in."""
        self._ticks += 1
        self._load = LoadProposal(reason=LoadReason.UNSET if self.config.enable_load_scaling else LoadReason.DISABLED)
        is_predictive = self.config.enable_throughput_scaling
        self._throughput = ThroughputProposal(
            reason=ThroughputReason.UNSET if is_predictive else ThroughputReason.DISABLED
        )
        if seen.worker_counts is not None:
            self.state.observe_workers(seen.worker_counts)
        if seen.fpm_observations is not None:
            self.state.observe_steps(seen.fpm_observations)
        context = PipelineContext(request_id=f"tick-{self._ticks}", observations=self._observations(seen))
        turn = self.pipeline.run(context, self._baseline(), seen.now_s)
        outcome = yield from self._with_builtins(turn, scheduled, seen)
        if scheduled.run_load_scaling:
            self._last_load_s = scheduled.at_s
        if scheduled.run_throughput_scaling:
            self._last_throughput_s = scheduled.at_s
        return self._decided(seen.now_s, outcome)

    def _observations(self, seen: TickInput) -> ObservationData:
        """Return the observations in the plugins' form; the steps are encoded only for plugins that are not built in."""
        steps = seen.fpm_observations if len(self.pipeline.plugins) > len(BUILTINS) else None
        return ObservationData(
            traffic=None if seen.traffic is None else _traffic(seen.traffic),
            fpm=None
            if steps is None
            else FpmData(prefill_engines=_encoded(steps.prefill), decode_engines=_encoded(steps.decode)),
            workers=None if seen.worker_counts is None else _workers(seen.worker_counts),
        )

    def _with_builtins(
        self, turn: Turn, scheduled: ScheduledTick, seen: TickInput
    ) -> Generator[list[PluginCall], list[PluginReply], PipelineOutcome]:
        """Answer the calls of the built-in plugins, and pass the others on."""
        replies: list[PluginReply] | None = None
        while not isinstance(calls := resume(turn, replies), Finished):
            external = [one for one in calls if one.spec not in BUILTINS]
            received = iter((yield external) if external else ())
            replies = [
                PluginReply(self._builtin(one, scheduled, seen)) if one.spec in BUILTINS else next(received)
                for one in calls
            ]
        return calls.result

    def _builtin(self, one: PluginCall, scheduled: ScheduledTick, seen: TickInput) -> StageResponse:
        if one.spec.plugin_id == LOAD_PREDICT:
            return self._predict(scheduled, seen)
        traffic = _predicted(one.request.context)
        decision: ScalingDecision | None = None
        if one.spec.plugin_id == THROUGHPUT_PROPOSE and scheduled.run_throughput_scaling:
            if seen.traffic is None:
                self._throughput = ThroughputProposal(reason=ThroughputReason.NO_TRAFFIC_DATA)
            else:
                self._throughput = propose_throughput(self.state, traffic, seen.traffic.duration_s)
            decision = self._throughput.decision
        if one.spec.plugin_id == LOAD_PROPOSE and scheduled.run_load_scaling:
            observed = seen.fpm_observations or FpmObservations()
            if self._forecast is not None:
                self._load = self._forecast.propose(seen.now_s, seen.traffic, observed)
            else:
                self._load = propose_load(self.state, observed, traffic)
            decision = self._load.decision
        if decision is None:
            return ProposeStageResponse(accept=AcceptResult())
        return ProposeStageResponse(override=OverrideResult(targets=_targets(decision)))

    def _predict(self, scheduled: ScheduledTick, seen: TickInput) -> PredictStageResponse:
        if not scheduled.run_throughput_scaling or seen.traffic is None:
            return PredictStageResponse()
        self._observe_traffic(seen.traffic)
        values = {name: predictor.predict() for name, predictor in self._predictors.items()}
        return PredictStageResponse(
            predictions=PredictionData(
                predicted_num_req=values["num_req"],
                predicted_isl=values["isl"],
                predicted_osl=values["osl"],
                predicted_kv_hit_rate=None if seen.traffic.kv_hit_rate is None else min(1.0, values["kv_hit_rate"]),
                predicted_accept_length=seen.traffic.accept_length,
                source=LOAD_PREDICT,
            )
        )

    def _observe_traffic(self, traffic: TrafficObservation) -> None:
        for name, predictor in self._predictors.items():
            value = getattr(traffic, name)
            if value is not None:
                predictor.add(value)

    def _baseline(self) -> dict[str, int]:
        mode = self.config.mode
        roles = [PREFILL] if mode.scales_prefill else []
        roles += [DECODE] if mode.scales_decode else []
        return {role: self.state.ready(role) for role in roles}

    # Decision

    def _decided(self, now_s: float, outcome: PipelineOutcome) -> TickDecision:
        scale_to: ScalingDecision | None = None
        clamped: tuple[str, ...] = ()
        limits: tuple[LimitReason, ...] = ()
        hold = rollout_hold(self.state.rollout)
        if hold is not None:
            limits = (hold,)
        elif outcome.proposal is not None:
            wanted = {one.sub_component_type: one.replicas for one in outcome.proposal.targets}
            scale_to, clamped, limits = self._constrained(wanted)
        if scale_to is not None:
            self._last_action, self._last_action_s = scale_to, now_s
        return TickDecision(
            now_s=now_s,
            action=outcome.action,
            scale_to=scale_to,
            load=self._load,
            throughput=self._throughput,
            predictions=outcome.context.predictions,
            stages=outcome.stages,
            lower_bounds=dict(self.state.lower_bounds),
            clamped=clamped,
            limits=limits,
            rejected_by=outcome.rejected_by,
            reject_reason=outcome.reject_reason,
            forecast=None if self._forecast is None else self._forecast.last,
        )

    def _constrained(
        self, wanted: Mapping[str, int | None]
    ) -> tuple[ScalingDecision | None, tuple[str, ...], tuple[LimitReason, ...]]:
        """Return the numbers within minimum and budgets, which no plugin can exceed, what was changed, and why."""
        now = self.state.current()
        floored, clamped = self._above_minimum(wanted)
        if self.config.mode is Mode.DISAGG:
            fitted, guard = guard_pair(now, floored, self.state.cost(), self.state.band)
        else:
            fitted, guard = self._guarded_single(floored)
        if guard is not None or fitted != floored:
            clamped.append(f"GPU budget: {floored.prefill}/{floored.decode} became {fitted.prefill}/{fitted.decode}")
        limits = [LimitReason(guard.value)] if guard is LoadReason.GPU_BUDGET_BELOW_MINIMUM else []
        mode = self.config.mode
        targets = Targets(
            fitted.prefill if mode.scales_prefill else None, fitted.decode if mode.scales_decode else None
        )
        powered, reason = self._within_power(targets)
        if reason is not None:
            limits.append(reason)
            clamped.append(f"power budget: {fitted.prefill}/{fitted.decode} became {powered.prefill}/{powered.decode}")
        decision = ScalingDecision(
            num_prefill=powered.prefill if self._is_wanted(PREFILL, powered.prefill) else None,
            num_decode=powered.decode if self._is_wanted(DECODE, powered.decode) else None,
        )
        return (None if decision == ScalingDecision() else decision), tuple(clamped), tuple(limits)

    def _above_minimum(self, wanted: Mapping[str, int | None]) -> tuple[Pair, list[str]]:
        """Return the wanted numbers, at least the minimum; a role without one keeps its workers."""
        clamped, floored = [], []
        for role, ready in zip((PREFILL, DECODE), self.state.current(), strict=True):
            target = wanted.get(role)
            floored.append(ready if target is None else max(target, self.state.floor(role)))
            if target is not None and floored[-1] != target:
                clamped.append(f"{role}: {target} raised to the minimum {floored[-1]}")
        return Pair(*floored), clamped

    def _guarded_single(self, floored: Pair) -> tuple[Pair, LoadReason | None]:
        """Return the numbers with that of the only scaled role within the GPU budget."""
        state, now = self.state, self.state.current()
        is_prefill = self.config.mode is Mode.PREFILL
        role, target = (PREFILL, floored.prefill) if is_prefill else (DECODE, floored.decode)
        count, guard = guard_single(state.ready(role), target, state.gpus(role), state.band, state.floor(role))
        return (Pair(count, now.decode) if is_prefill else Pair(now.prefill, count)), guard

    def _within_power(self, targets: Targets) -> tuple[Targets, LimitReason | None]:
        """Return the numbers within the power budget; without the watts of a scaled role, no role grows."""
        limit = self.config.total_gpu_power_limit
        if not self.config.enable_power_awareness or limit is None:
            return targets, None
        state = self.state
        watts = [found.power_watts_per_replica or 0 if found else 0 for found in state.capabilities.both]
        if any(target is not None and one <= 0 for target, one in zip(targets, watts, strict=True)):
            kept = held(state.current(), targets)
            return kept, None if kept == targets else LimitReason.POWER_UNKNOWN
        cost = PairCost(watts[0], watts[1], state.floor(PREFILL), state.floor(DECODE))
        return fit_power(state.current(), targets, PowerBudget(limit, cost))

    def _is_wanted(self, role: str, target: int | None) -> bool:
        """Return whether a number has to be set: it differs from the ready workers, or cancels starting ones."""
        return target is not None and (target != self.state.ready(role) or self._cancels(role))

    def _cancels(self, role: str) -> bool:
        if not self.state.pending(role):
            return False
        proposed = (self._load.decision, self._throughput.decision)
        return any(
            one is not None and (one.num_prefill if role == PREFILL else one.num_decode) == self.state.ready(role)
            for one in proposed
        )


def _traffic(traffic: TrafficObservation) -> TrafficMetrics:
    return TrafficMetrics(
        duration_s=traffic.duration_s,
        num_req=traffic.num_req,
        isl=traffic.isl,
        osl=traffic.osl,
        kv_hit_rate=traffic.kv_hit_rate,
        accept_length=traffic.accept_length,
    )


def _encoded(steps: Mapping[RankKey, ForwardPassMetrics]) -> dict[str, bytes]:
    return {f"{worker}/{rank}": msgspec.msgpack.encode(step) for (worker, rank), step in steps.items()}


def _workers(counts: WorkerCounts) -> WorkerState:
    return WorkerState(
        ready_prefill=counts.ready_num_prefill,
        ready_decode=counts.ready_num_decode,
        expected_prefill=counts.expected_num_prefill,
        expected_decode=counts.expected_num_decode,
        prefill_scaling_in_progress=counts.prefill_scaling_in_progress,
        decode_scaling_in_progress=counts.decode_scaling_in_progress,
    )


def _predicted(context: PipelineContext | None) -> Traffic | None:
    """Return the predicted traffic; None if a mandatory part is missing."""
    found = context.predictions if context else None
    if found is None or found.predicted_num_req is None or found.predicted_isl is None or found.predicted_osl is None:
        return None
    return Traffic(
        num_req=found.predicted_num_req,
        isl=found.predicted_isl,
        osl=found.predicted_osl,
        kv_hit_rate=found.predicted_kv_hit_rate,
        accept_length=found.predicted_accept_length,
    )


def _targets(decision: ScalingDecision) -> list[ComponentTarget]:
    pairs = ((PREFILL, decision.num_prefill), (DECODE, decision.num_decode))
    return [ComponentTarget(sub_component_type=role, replicas=count) for role, count in pairs if count is not None]


def without_nan(traffic: TrafficObservation) -> TrafficObservation | None:
    """Return traffic whose averages are numbers; None if the request count is unknown.

    An idle window has no averages, so that NaN there is 0; an optional value that is NaN is unknown.
    """
    if math.isnan(traffic.num_req):
        return None
    return replace(
        traffic,
        isl=0.0 if math.isnan(traffic.isl) else traffic.isl,
        osl=0.0 if math.isnan(traffic.osl) else traffic.osl,
        kv_hit_rate=_known(traffic.kv_hit_rate),
        accept_length=_known(traffic.accept_length),
    )


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
