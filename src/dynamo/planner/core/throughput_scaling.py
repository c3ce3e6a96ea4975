"""Throughput (predictive) scaling: the workers for the predicted traffic of the next interval. Pure.

Where load scaling decides, the result is its lower bound.
"""

import math
from dataclasses import dataclass

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode
from dynamo.planner.core.budget import GpuBand, Pair, clamp_single, guard_pair, guard_single
from dynamo.planner.core.perf_model import CapacityQuery, EngineCapacity, EngineModel
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.core.scaling import DECODE, PREFILL, ScalingState, Traffic, decision_of, startup_reduction
from dynamo.protocols.planner import ScalingDecision


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


def propose_throughput(state: ScalingState, traffic: Traffic | None, duration_s: float) -> ThroughputProposal:
    """Return the workers for the predicted traffic, or set lower bounds if load scaling decides."""
    if traffic is None:
        return ThroughputProposal(reason=ThroughputReason.PREDICT_FAILED)
    state.note_traffic(traffic)
    if not duration_s > 0:
        return ThroughputProposal(reason=ThroughputReason.NO_TRAFFIC_DATA)
    demand_rps = traffic.num_req / duration_s
    capacity = {role: _capacity(state, role, model, traffic) for role, model in state.models.items()}
    rates = {role: found.rps if found and found.rps > 0 else None for role, found in capacity.items()}
    prefill_rps = rates.get(EngineRole.PREFILL, rates.get(EngineRole.AGGREGATED))
    decode_rps = rates.get(EngineRole.DECODE, rates.get(EngineRole.AGGREGATED))
    is_met = all(found is None or found.is_eligible for found in capacity.values())
    if state.config.mode is Mode.DISAGG:
        decision, reasons = _throughput_pair(state, demand_rps, prefill_rps, decode_rps)
    else:
        component = PREFILL if state.config.mode is Mode.PREFILL else DECODE
        rate = prefill_rps if component == PREFILL else decode_rps
        decision, reason = _throughput_single(state, demand_rps, rate, component)
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


def _capacity(state: ScalingState, role: EngineRole, model: EngineModel, traffic: Traffic) -> EngineCapacity | None:
    """Return an engine's capacity; that of an aggregated engine requires its reported token limit."""
    limit = model.capabilities.max_num_batched_tokens if model.capabilities else None
    if not model.is_ready or (role is EngineRole.AGGREGATED and not limit):
        return None
    return model.capacity(_query(state, role, traffic))


def _query(state: ScalingState, role: EngineRole, traffic: Traffic) -> CapacityQuery:
    config = state.config
    return CapacityQuery(
        isl=traffic.isl,
        osl=traffic.osl,
        ttft_s=None if role is EngineRole.DECODE else config.ttft_ms / 1000,
        itl_s=None if role is EngineRole.PREFILL else config.itl_ms / 1000,
        kv_hit_rate=traffic.kv_hit_rate,
        accept_length=state.accepted_tokens(traffic.accept_length),
    )


def _replicas(state: ScalingState, demand_rps: float, rate: float, component: str) -> int:
    """Return the workers for a demand, at most `max_throughput_scaling_replicas` from the current number."""
    limit, now = state.config.max_throughput_scaling_replicas, state.ready(component)
    wanted = max(math.ceil(demand_rps / rate), state.floor(component))
    return max(min(max(wanted, now - limit), now + limit), state.floor(component))


def _throughput_single(
    state: ScalingState, demand_rps: float, rate: float | None, component: str
) -> tuple[ScalingDecision | None, ThroughputReason]:
    """Return the decision for a deployment with one scaled role, whose engines serve `rate` requests per second each."""
    now, floor = state.ready(component), state.floor(component)
    if rate is None:
        if state.config.enable_load_scaling:
            state.set_lower_bound(component, max(now, floor))
            return None, ThroughputReason.MODEL_NOT_READY
        held, _ = guard_single(now, max(now, floor), state.gpus(component), state.band, floor)
        return (None if held == now else decision_of(component, held)), ThroughputReason.MODEL_NOT_READY
    wanted = _replicas(state, demand_rps, rate, component)
    ceiling = GpuBand(-1, state.band.max_gpus)
    fitted = clamp_single(wanted, state.gpus(component), ceiling, floor)
    if state.config.enable_load_scaling:
        state.set_lower_bound(component, fitted)
        return None, ThroughputReason.SET_LOWER_BOUND
    target, guard = guard_single(now, fitted, state.gpus(component), state.band, floor)
    pending = state.count(component).pending
    if pending and guard is not LoadReason.GPU_BUDGET_RECONCILE:
        reduced = startup_reduction(target, now, pending)
        if reduced is None:
            return None, ThroughputReason.UNSET
        return decision_of(component, reduced), ThroughputReason.SCALE
    if target == now:
        return None, ThroughputReason(guard.value) if guard else ThroughputReason.NO_CHANGE
    return decision_of(component, target), ThroughputReason.SCALE


def _throughput_pair(
    state: ScalingState, demand_rps: float, prefill_rps: float | None, decode_rps: float | None
) -> tuple[ScalingDecision | None, tuple[ThroughputReason, ThroughputReason, ThroughputReason]]:
    """Return the decision for a disaggregated deployment, with the reasons of the deployment, of prefill and of decode."""
    now, cost = state.current(), state.cost()
    if prefill_rps is None or decode_rps is None:
        return _hold_pair(state, prefill_rps, decode_rps)
    wanted = Pair(_replicas(state, demand_rps, prefill_rps, PREFILL), _replicas(state, demand_rps, decode_rps, DECODE))
    fitted = state.below_ceiling(wanted)
    if state.config.enable_load_scaling:
        state.set_lower_bounds(fitted)
        is_held = fitted == now != wanted
        return None, _same_reason(
            ThroughputReason.GPU_BUDGET_GUARD_HOLD if is_held else ThroughputReason.SET_LOWER_BOUND
        )
    target, guard = guard_pair(now, fitted, cost, state.band)
    if state.is_starting:
        decision = state.startup_reductions(wanted.prefill, wanted.decode)
        reason = ThroughputReason.UNSET if decision is None else ThroughputReason.SCALE
        return decision, (reason, ThroughputReason.UNSET, ThroughputReason.UNSET)
    if target == now:
        return None, _same_reason(ThroughputReason(guard.value) if guard else ThroughputReason.NO_CHANGE)
    return ScalingDecision(num_prefill=target.prefill, num_decode=target.decode), _same_reason(ThroughputReason.SCALE)


def _hold_pair(
    state: ScalingState, prefill_rps: float | None, decode_rps: float | None
) -> tuple[ScalingDecision | None, tuple[ThroughputReason, ThroughputReason, ThroughputReason]]:
    """Hold both roles where one has no model: scaling only the other moves the bottleneck."""
    not_ready, partner = ThroughputReason.MODEL_NOT_READY, ThroughputReason.PARTNER_NOT_READY
    reasons = (
        not_ready,
        not_ready if prefill_rps is None else partner,
        not_ready if decode_rps is None else partner,
    )
    now = state.current()
    held = Pair(max(now.prefill, state.floor(PREFILL)), max(now.decode, state.floor(DECODE)))
    if state.config.enable_load_scaling:
        state.set_lower_bounds(held)
        return None, reasons
    return (None if held == now else ScalingDecision(num_prefill=held.prefill, num_decode=held.decode)), reasons


def _same_reason(reason: ThroughputReason) -> tuple[ThroughputReason, ThroughputReason, ThroughputReason]:
    """Return the reason of the deployment and of both roles."""
    return reason, reason, reason
