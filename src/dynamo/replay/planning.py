"""Planning: observations of a simulated cluster for a planner: traffic, worker counts, latest forward passes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dynamo.mocker.simulation.scheduler import RankLimits
from dynamo.planner.core.router_queue import QueuedPrompts, with_queue
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPass, ForwardPassMetrics
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    Planner,
    PlannerEffects,
    RankKey,
    ScheduledTick,
    TickInput,
    TrafficObservation,
    WorkerCounts,
)
from dynamo.replay.fleet import Fleet
from dynamo.replay.outcome import Flight, PlannerLog
from dynamo.replay.plan import PoolPlan, Role
from dynamo.replay.worker import SimulatedWorker

TICKS_MAX = 100_000  # Planner ticks in the report: more than one per second for a day.


def capabilities(limits: RankLimits) -> EngineCapabilities:
    """Return a worker's capabilities in the planner's form."""
    return EngineCapabilities(
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_kv_tokens=limits.num_blocks * limits.block_tokens,
        kv_cache_block_size=limits.block_tokens,
    )


@dataclass(slots=True)
class PlannerAdapter:
    """A planner attached to a simulated cluster."""

    planner: Planner
    log: PlannerLog = field(init=False)
    _ended_ms: list[float] = field(init=False, default_factory=list)
    """End times of requests, ascending, for binary search."""
    _ended: list[Flight] = field(init=False, default_factory=list)
    """The requests that ended at these times."""

    def __post_init__(self) -> None:
        self.log = PlannerLog(self.planner.name)

    def begin(self, pools: Sequence[PoolPlan]) -> ScheduledTick | None:
        """Start the planner and return its first tick."""
        known = {pool.role: capabilities(pool.limits) for pool in pools}
        decode = known.get(Role.DECODE) or known[Role.AGGREGATED]
        return self.planner.begin(known.get(Role.PREFILL), decode)

    def ended(self, flight: Flight, now_ms: float) -> None:
        """Record an answered request."""
        self._ended_ms.append(now_ms)
        self._ended.append(flight)

    def tick(
        self, scheduled: ScheduledTick, fleets: dict[Role, Fleet], flights: Sequence[Flight], now_ms: float
    ) -> PlannerEffects:
        """Pass the requested observations to the planner, and log its effects."""
        seen = TickInput(
            now_s=now_ms / 1000,
            traffic=self._traffic(scheduled, flights, now_ms) if scheduled.need_traffic_metrics else None,
            worker_counts=counts(fleets) if scheduled.need_worker_states else None,
            fpm_observations=passes(fleets) if scheduled.need_worker_fpm else None,
        )
        effects = self.planner.tick(scheduled, seen)
        if len(self.log.ticks) < TICKS_MAX:
            self.log.ticks.append(_tick_row(seen, effects))
        return effects

    def _traffic(self, scheduled: ScheduledTick, flights: Sequence[Flight], now_ms: float) -> TrafficObservation:
        """Return the arrivals and completions of the observation window."""
        since_ms = now_ms - scheduled.traffic_metrics_duration_s * 1000
        came = flights[bisect_right(flights, since_ms, key=lambda flight: flight.arrived_ms) :]
        ended = self._ended[bisect_right(self._ended_ms, since_ms) :]
        prompt_tokens = sum(flight.turn.input_tokens for flight in came)
        answered_prompt_tokens = sum(flight.turn.input_tokens for flight in ended)
        return TrafficObservation(
            duration_s=scheduled.traffic_metrics_duration_s,
            num_req=len(came),
            isl=prompt_tokens / len(came) if came else 0.0,
            osl=sum(flight.turn.output_tokens for flight in ended) / len(ended) if ended else 0.0,
            kv_hit_rate=sum(flight.cached_tokens for flight in ended) / answered_prompt_tokens
            if answered_prompt_tokens
            else None,
        )


def _tick_row(seen: TickInput, effects: PlannerEffects) -> dict[str, Any]:
    return {
        "at_s": seen.now_s,
        "traffic": None if seen.traffic is None else asdict(seen.traffic),
        "worker_counts": None if seen.worker_counts is None else asdict(seen.worker_counts),
        "scale_to": None if effects.scale_to is None else asdict(effects.scale_to),
        "diagnostics": dict(effects.diagnostics),
    }


def counts(fleets: dict[Role, Fleet]) -> WorkerCounts:
    """Return the numbers of workers by role and state."""
    prefill = fleets.get(Role.PREFILL)
    decode = fleets.get(Role.DECODE) or fleets[Role.AGGREGATED]
    return WorkerCounts(
        ready_num_prefill=None if prefill is None else len(prefill.serving),
        ready_num_decode=len(decode.serving),
        expected_num_prefill=None if prefill is None else len(prefill.serving) + len(prefill.starting),
        expected_num_decode=len(decode.serving) + len(decode.starting),
        prefill_scaling_in_progress=prefill is not None and bool(prefill.starting or prefill.leaving),
        decode_scaling_in_progress=bool(decode.starting or decode.leaving),
        pending_num_prefill=0 if prefill is None else len(prefill.starting),
        pending_num_decode=len(decode.starting),
    )


def passes(fleets: dict[Role, Fleet]) -> FpmObservations:
    """Return the latest forward pass of each rank in service; an idle rank reports an empty one, like a heartbeat.

    `prompts` are the last steps with prompts of aggregated ranks since the call before.
    """
    found: dict[Role, dict[RankKey, ForwardPassMetrics]] = {Role.PREFILL: {}, Role.DECODE: {}}
    prompts = []
    for role, fleet in fleets.items():
        of_role = found[Role.PREFILL if role is Role.PREFILL else Role.DECODE]
        for rank in (rank for ranks in fleet.serving.values() for rank in ranks):
            of_role[f"{rank.worker_id}", rank.rank] = _metrics(rank, rank.passes, rank.latest_pass())
            taken, rank.prompts = rank.prompts, None
            if role is Role.AGGREGATED and taken is not None and taken[1] is not rank.latest_pass():
                prompts.append(_metrics(rank, *taken))
        of_role |= with_queue(of_role, QueuedPrompts(*fleet.placement.queued))
    return FpmObservations(found[Role.PREFILL], found[Role.DECODE], tuple(prompts))


def _metrics(rank: SimulatedWorker, number: int, passed: ForwardPass) -> ForwardPassMetrics:
    return ForwardPassMetrics(
        FORWARD_PASS_VERSION,
        f"{rank.worker_id}",
        rank.rank,
        number,
        passed.wall_time,
        passed.scheduled_requests,
        passed.queued_requests,
    )
