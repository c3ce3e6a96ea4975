"""Load (reactive) scaling: the workers for the present load of the engines, by their latest forward passes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode, OptimizationTarget
from dynamo.planner.core.budget import Pair, guard_pair, guard_single
from dynamo.planner.core.load_signals import (
    Signal,
    decode_threshold_signal,
    itl_signal,
    merge_aggregated,
    prefill_threshold_signal,
    ttft_signal,
)
from dynamo.planner.core.reasons import LoadReason
from dynamo.planner.core.scaling import DECODE, PREFILL, ScalingState, Traffic, decision_of, startup_reduction
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import FpmObservations, RankKey, ScalingDecision

UNOBSERVED = (LoadReason.NO_FPM_DATA, LoadReason.SCALING_IN_PROGRESS, LoadReason.WORKER_COUNT_MISMATCH)
"""Reasons for which the load of a role is not judged; in a disaggregated deployment one role's reason holds for both."""
Steps = Mapping[RankKey, ForwardPassMetrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProposal:
    """Result of load scaling."""

    decision: ScalingDecision | None = None
    reason: LoadReason = LoadReason.UNSET
    reason_prefill: LoadReason = LoadReason.UNSET
    reason_decode: LoadReason = LoadReason.UNSET
    estimated_ttft_ms: float | None = None
    estimated_itl_ms: float | None = None


def propose_load(state: ScalingState, observed: FpmObservations, traffic: Traffic | None = None) -> LoadProposal:
    """Return the workers for the load of the engines."""
    hit_rate = traffic.kv_hit_rate if traffic and traffic.kv_hit_rate is not None else state.kv_hit_rate
    accept = traffic.accept_length if traffic and traffic.accept_length is not None else state.accept_length
    if state.config.mode is Mode.DISAGG:
        return _load_pair(state, observed, hit_rate, accept)
    component = PREFILL if state.config.mode is Mode.PREFILL else DECODE
    steps = observed.prefill if component == PREFILL else observed.decode
    signal, ttft, itl = _signal(state, component, steps, hit_rate, accept)
    if signal.reason in UNOBSERVED:
        return LoadProposal(reason=signal.reason)
    decision, reason = _load_single(state, component, signal)
    return LoadProposal(decision=decision, reason=reason, estimated_ttft_ms=ttft, estimated_itl_ms=itl)


def _signal(
    state: ScalingState, component: str, steps: Steps, hit_rate: float | None, accept: float | None
) -> tuple[Signal, float | None, float | None]:
    """Return the signal of one role, and its estimated latencies in milliseconds."""
    count = state.count(component)
    if count.is_in_progress and not state.is_starting:
        return Signal(None, LoadReason.SCALING_IN_PROGRESS), None, None
    if not steps:
        return Signal(None, LoadReason.NO_FPM_DATA), None, None
    if not is_complete(steps, count.ready or 0):
        return Signal(None, LoadReason.WORKER_COUNT_MISMATCH), None, None
    ordered = [steps[key] for key in sorted(steps)]
    if state.config.optimization_target is OptimizationTarget.SLA:
        return _latency_signal(state, component, ordered, hit_rate, accept)
    return _threshold_signal(state, component, ordered), None, None


def _threshold_signal(state: ScalingState, component: str, steps: list[ForwardPassMetrics]) -> Signal:
    workers, config = state.ready(component), state.config
    if component == PREFILL:
        return prefill_threshold_signal(steps, workers, config, state.capabilities.prefill)
    is_aggregated = config.mode is Mode.AGG
    signal = decode_threshold_signal(
        steps, workers, config, state.capabilities.decode, with_queued_prefill=is_aggregated
    )
    is_last = is_aggregated and workers <= 1 and not state.is_starting and signal.reason is LoadReason.SCALE_DOWN
    return Signal(workers, LoadReason.NO_CHANGE) if is_last else signal


def _latency_signal(
    state: ScalingState, component: str, steps: list[ForwardPassMetrics], hit_rate: float | None, accept: float | None
) -> tuple[Signal, float | None, float | None]:
    workers, config = state.ready(component), state.config
    if component == PREFILL:
        model = state.models[EngineRole.PREFILL]
        signal = ttft_signal(steps, workers, model, config, kv_hit_rate=hit_rate, with_decode=False)
        return signal, signal.estimate_ms, None
    is_aggregated = config.mode is Mode.AGG
    model = state.models[EngineRole.AGGREGATED if is_aggregated else EngineRole.DECODE]
    decode = itl_signal(
        steps, workers, model, config, accept_length=state.accepted_tokens(accept), with_queued_prefill=is_aggregated
    )
    if not is_aggregated:
        return decode, None, decode.estimate_ms
    prefill = ttft_signal(steps, workers, model, config, kv_hit_rate=hit_rate, with_decode=True)
    return merge_aggregated(prefill, decode, workers), prefill.estimate_ms, decode.estimate_ms


def _bounded(state: ScalingState, component: str, target: int) -> tuple[int, bool]:
    """Return the target above all floors, and whether the throughput bound prevented a removal."""
    now, floored = state.ready(component), max(target, state.floor(component))
    if not state.config.enable_throughput_scaling:
        return floored, False
    bounded = max(floored, state.lower_bounds[component])
    return bounded, floored < now <= bounded


def _load_single(state: ScalingState, component: str, signal: Signal) -> tuple[ScalingDecision | None, LoadReason]:
    """Return the decision for a deployment with one scaled role."""
    now, pending = state.ready(component), state.count(component).pending
    wanted = now if signal.target is None else signal.target
    is_sla = state.config.optimization_target is OptimizationTarget.SLA
    if state.config.mode is Mode.AGG and not signal.is_change and (signal.target is None or not is_sla):
        return None, signal.reason
    bounded, is_capped = _bounded(state, component, wanted)
    found, guard = guard_single(now, bounded, state.gpus(component), state.band, state.floor(component))
    if pending and signal.is_change:
        reduced = startup_reduction(found, now, pending)
        if reduced is not None:
            capped = LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT if is_capped else LoadReason.SCALE_DOWN
            return decision_of(component, reduced), guard or capped
        is_dropped = signal.reason is LoadReason.SCALE_UP
        return None, guard or (LoadReason.UNSET if is_dropped else LoadReason.SCALE_UP)
    if guard is not None:
        is_held = found == now or (pending > 0 and found > now)
        return (None if is_held else decision_of(component, found)), guard
    if found == now or pending:
        if pending and found > now:
            return None, LoadReason.SCALE_UP
        if is_capped and state.config.mode is Mode.AGG:
            return None, LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT
        return None, LoadReason.NO_CHANGE if signal.is_change else signal.reason
    return decision_of(component, found), LoadReason.SCALE_UP if found > now else LoadReason.SCALE_DOWN


def _load_pair(
    state: ScalingState, observed: FpmObservations, hit_rate: float | None, accept: float | None
) -> LoadProposal:
    """Return the proposal for a disaggregated deployment."""
    prefill, ttft, _ = _signal(state, PREFILL, observed.prefill, hit_rate, accept)
    decode, _, itl = _signal(state, DECODE, observed.decode, hit_rate, accept)
    for reason in UNOBSERVED:
        is_local = reason is LoadReason.NO_FPM_DATA and (state.is_starting or prefill.reason is not decode.reason)
        if reason in (prefill.reason, decode.reason) and not is_local:
            return LoadProposal(reason=reason, reason_prefill=reason, reason_decode=reason)
    if state.is_starting:
        decision, reason = _startup_load(state, prefill, decode)
        return LoadProposal(decision=decision, reason=reason, estimated_ttft_ms=ttft, estimated_itl_ms=itl)
    now = state.current()
    wanted = Pair(
        now.prefill if prefill.target is None else prefill.target,
        now.decode if decode.target is None else decode.target,
    )
    bounded_prefill, capped_prefill = _bounded(state, PREFILL, wanted.prefill)
    bounded_decode, capped_decode = _bounded(state, DECODE, wanted.decode)
    bounded = Pair(bounded_prefill, bounded_decode)
    fitted = state.below_ceiling(bounded) if state.config.enable_throughput_scaling else bounded
    target, guard = guard_pair(now, fitted, state.cost(), state.band)
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
            _changed_reason(now.prefill, target.prefill, is_capped=capped_prefill),
            _changed_reason(now.decode, target.decode, is_capped=capped_decode),
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


def _startup_load(state: ScalingState, prefill: Signal, decode: Signal) -> tuple[ScalingDecision | None, LoadReason]:
    """Return the reductions of the roles whose load allows one, while workers start."""
    signals = (prefill, decode)
    lower = [
        _bounded(state, component, signal.target)[0]
        if signal.reason is LoadReason.SCALE_DOWN and signal.target is not None
        else None
        for component, signal in zip((PREFILL, DECODE), signals, strict=True)
    ]
    decision = state.startup_reductions(*lower)
    if decision is not None:
        return decision, LoadReason.SCALE_DOWN
    reasons = [_held_reason(signal, is_capped=False) for signal in signals if not signal.is_change]
    return None, _overall_held(reasons) if reasons else LoadReason.UNSET


def is_complete(steps: Steps, ready: int) -> bool:
    """Return whether there is a step of each rank of each ready worker, and of no other worker."""
    ranks: dict[str, set[int]] = {}
    for worker, rank in steps:
        ranks.setdefault(worker, set()).add(rank)
    first = next(iter(ranks.values()))
    return len(ranks) == ready and all(one == first for one in ranks.values())


def _held_reason(signal: Signal, *, is_capped: bool) -> LoadReason:
    """Return the reason of a role that does not change in a deployment that does not change."""
    if is_capped:
        return LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT
    is_unjudged = signal.is_change or signal.reason is LoadReason.NO_FPM_DATA
    return LoadReason.NO_CHANGE if is_unjudged else signal.reason


def _overall_held(reasons: Sequence[LoadReason]) -> LoadReason:
    """Return the reason of a deployment that does not change, from those of its roles."""
    for reason in (
        LoadReason.INSUFFICIENT_DATA,
        LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION,
        LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT,
        LoadReason.NO_CHANGE,
    ):
        if reason in reasons:
            return reason
    return reasons[0]


def _changed_reason(now: int, target: int, *, is_capped: bool) -> LoadReason:
    """Return the reason of a role in a deployment that changes."""
    if target == now:
        return LoadReason.SCALE_DOWN_CAPPED_BY_THROUGHPUT if is_capped else LoadReason.NO_CHANGE
    return LoadReason.SCALE_UP if target > now else LoadReason.SCALE_DOWN
