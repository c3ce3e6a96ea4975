"""Telemetry: samples of a simulated cluster at equal intervals of virtual time, with upstream's fields. Pure.

The first sample is of the start and the last of the end; the others follow each interval. A sample has the traffic since the one
before, the state of each rank in service, and the workers by state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo.core.errors import InvalidArgument
from dynamo.replay.fleet import Fleet
from dynamo.replay.outcome import Flight
from dynamo.replay.plan import Role
from dynamo.replay.worker import SimulatedWorker

SampleKind = Literal["baseline", "periodic", "final"]
Totals = tuple[int, int, int]
"""Cached and all tokens of admitted prompts, and preemptions."""


@dataclass(slots=True)
class TelemetrySampler:
    """Makes the samples of one run and passes each to `emit`."""

    interval_ms: float
    emit: Callable[[dict[str, Any]], object]
    _ended: list[Flight] = field(init=False, default_factory=list)
    """Requests answered since the last sample."""
    _arrived: int = field(init=False, default=0)
    _since_ms: float = field(init=False, default=0.0)
    _ordinal: int = field(init=False, default=0)
    _totals: dict[Role, Totals] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.interval_ms > 0:
            raise InvalidArgument(f"telemetry_sample_interval_ms {self.interval_ms:g}: expected more than 0")

    def ended(self, flight: Flight) -> None:
        """Record an answered request."""
        self._ended.append(flight)

    def sample(self, kind: SampleKind, fleets: Mapping[Role, Fleet], arrived: int, queued: int, now_ms: float) -> None:
        """Emit a sample; `arrived` requests have arrived so far and `queued` ones wait in the router."""
        prefill = fleets.get(Role.PREFILL)
        decode = fleets.get(Role.DECODE) or fleets[Role.AGGREGATED]
        is_split = prefill is not None
        self.emit(
            {
                "sample_ordinal": self._ordinal,
                "kind": kind,
                "interval_start_ms": self._since_ms,
                "sampled_at_ms": now_ms,
                "traffic": traffic_of(self._ended, arrived - self._arrived, now_ms - self._since_ms),
                "prefill_scheduler_metrics": ranks_of(prefill),
                "decode_scheduler_metrics": ranks_of(decode),
                "prefill_interval_metrics": self._interval(Role.PREFILL, prefill),
                "decode_interval_metrics": self._interval(decode.plan.role, decode),
                "router_pending_prefill_requests": queued if is_split else 0,
                "router_pending_decode_requests": 0 if is_split else queued,
                **workers_of("prefill", prefill),
                **workers_of("decode", decode),
            }
        )
        self._ended, self._arrived, self._since_ms = [], arrived, now_ms
        self._ordinal += 1

    def _interval(self, role: Role, fleet: Fleet | None) -> dict[str, int]:
        """Return the growth of a pool's totals since the last sample; a worker that ended takes its totals along."""
        before = self._totals.get(role, (0, 0, 0))
        after = self._totals[role] = totals_of(fleet)
        grown = [max(0, new - old) for new, old in zip(after, before, strict=True)]
        return dict(zip(("cache_hit_tokens", "cache_total_tokens", "preemptions"), grown, strict=True))


def totals_of(fleet: Fleet | None) -> Totals:
    """Return the totals of a pool's present ranks."""
    simulations = [] if fleet is None else [rank.simulation for rank in fleet.all_ranks()]
    return (
        sum(one.reused_tokens for one in simulations),
        sum(one.admitted_tokens for one in simulations),
        sum(one.preemptions for one in simulations),
    )


def traffic_of(ended: Sequence[Flight], arrived: int, duration_ms: float) -> dict[str, Any]:
    """Return arrivals and answers; means are over the answered requests, 0 without any."""
    steps = [flight.turn.output_tokens - 1 for flight in ended]
    itls = [(one.finished_ms - one.first_ms) / n for one, n in zip(ended, steps, strict=True) if n]
    return {
        "duration_s": duration_ms / 1000,
        "arriving_requests": arrived,
        "completed_requests": len(ended),
        "avg_isl": mean([one.turn.input_tokens for one in ended]),
        "avg_osl": mean([one.turn.output_tokens for one in ended]),
        "avg_ttft_ms": mean([one.first_ms - one.arrived_ms for one in ended]),
        "avg_itl_ms": mean(itls),
        "ttft_count": len(ended),
        "itl_count": len(itls),
        "avg_router_kv_hit_rate": mean([one.cached_tokens / one.turn.input_tokens for one in ended]),
        "router_kv_hit_rate_count": len(ended),
        "avg_accept_length": None,  # No speculative decoding is simulated.
        "accept_length_forward_count": 0,
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


def ranks_of(fleet: Fleet | None) -> list[dict[str, Any]]:
    """Return the state of each rank of a pool that is in service or draining."""
    return [] if fleet is None else [rank_state(rank) for rank in fleet.all_ranks()]


def rank_state(rank: SimulatedWorker) -> dict[str, Any]:
    """Return the blocks and requests of a rank."""
    simulation = rank.simulation
    pool = simulation.pool
    total, active, idle = rank.limits.num_blocks, pool.used, len(pool.readable) - pool.held
    return {
        "worker_id": rank.worker_id,
        "dp_rank": rank.rank,
        "active_blocks": active,
        "inactive_blocks": idle,
        "total_blocks": total,
        "active_cache_usage": active / total,
        "physical_cache_usage": (active + idle) / total,
        "running_requests": len(simulation.decoding) + (simulation.partial is not None),
        "waiting_requests": len(simulation.waiting) + len(simulation.loading) + len(simulation.loaded),
    }


def workers_of(role: str, fleet: Fleet | None) -> dict[str, list[int]]:
    """Return the ids of a pool's workers by state."""
    states: dict[str, Iterable[int]] = {"active": (), "starting": (), "draining": ()}
    if fleet is not None:
        states = {"active": fleet.serving, "starting": fleet.starting, "draining": fleet.leaving}
    return {f"{state}_{role}_ids": sorted(ids) for state, ids in states.items()}
