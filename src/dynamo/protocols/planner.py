"""What a planner sees at each tick, and what it answers (control-plane.md §1.3). Pure data: who plans knows no cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.protocols.load import ForwardPassMetrics

RankKey = tuple[int, int]
"""A worker, and one of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficObservation:
    """What came in during the time that the tick asked about."""

    duration_s: float
    num_req: int
    isl: float
    """Mean tokens of a prompt …"""
    osl: float
    """… and of an answer, of those that ended."""
    kv_hit_rate: float | None = None
    """Which part of the prompts' tokens caches held."""
    accept_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """How many workers there are; aggregated ones are decode workers. None: there is no such role."""

    ready_num_prefill: int | None = None
    ready_num_decode: int | None = None
    expected_num_prefill: int | None = None
    expected_num_decode: int | None = None
    prefill_scaling_in_progress: bool = False
    decode_scaling_in_progress: bool = False
    pending_num_prefill: int = 0
    """Of those that are expected: on their way, and nothing else is amiss."""
    pending_num_decode: int = 0


@dataclass(frozen=True, slots=True)
class FpmObservations:
    """The latest forward pass of each rank; aggregated workers are in `decode`."""

    prefill: Mapping[RankKey, ForwardPassMetrics] = field(default_factory=dict)
    decode: Mapping[RankKey, ForwardPassMetrics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What one worker of a role can do."""

    num_gpu: int = 1
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    context_length: int | None = None
    max_kv_tokens: int | None = None
    kv_cache_block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTick:
    """When the planner wants to be asked next, and what it wants to see then."""

    at_s: float
    run_load_scaling: bool = False
    run_throughput_scaling: bool = False
    need_traffic_metrics: bool = False
    traffic_metrics_duration_s: float = 0.0
    need_worker_states: bool = False
    need_worker_fpm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TickInput:
    """What it sees; None where it did not ask."""

    now_s: float
    traffic: TrafficObservation | None = None
    worker_counts: WorkerCounts | None = None
    fpm_observations: FpmObservations | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """How many workers there should be; None: as many as there are."""

    num_prefill: int | None = None
    num_decode: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerEffects:
    """What a tick comes to."""

    scale_to: ScalingDecision | None = None
    next_tick: ScheduledTick | None = None
    """None: it need not be asked again."""
    diagnostics: Mapping[str, Any] = field(default_factory=dict)


class Planner(Protocol):
    """Decides how many workers there should be. Pure: it is told the time and everything else."""

    @property
    def name(self) -> str:
        """What it is, for reports."""
        ...

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """Before anything happens: what workers can do. The first tick; None where it has nothing to decide."""
        ...

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """It is time."""
        ...
