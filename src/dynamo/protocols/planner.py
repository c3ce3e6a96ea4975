"""Planner interface: observations at each tick, and the resulting decisions. Pure data, independent of the cluster."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.protocols.load import ForwardPassMetrics

RankKey = tuple[str, int]
"""A worker id in decimal digits, and a data-parallel rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficObservation:
    """Traffic during the interval that the tick covers."""

    duration_s: float
    num_req: float
    isl: float
    """Mean prompt length in tokens, over the requests that ended."""
    osl: float
    """Mean output length in tokens, over the requests that ended."""
    kv_hit_rate: float | None = None
    """Cached fraction of the prompt tokens."""
    accept_length: float | None = None


class RolloutPhase(enum.StrEnum):
    """Phase of a rolling update, as the deployment's status names it."""

    NONE = ""
    PENDING = "Pending"
    IN_PROGRESS = "InProgress"
    COMPLETED = "Completed"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """Number of workers per role; aggregated workers count as decode workers. None: the role does not exist."""

    ready_num_prefill: int | None = None
    ready_num_decode: int | None = None
    expected_num_prefill: int | None = None
    expected_num_decode: int | None = None
    prefill_scaling_in_progress: bool = False
    decode_scaling_in_progress: bool = False
    pending_num_prefill: int = 0
    """Expected prefill workers that are still starting; counted only if nothing else is wrong."""
    pending_num_decode: int = 0
    rollout: RolloutPhase = RolloutPhase.NONE


@dataclass(frozen=True, slots=True)
class FpmObservations:
    """The latest forward pass of each rank; aggregated workers are in `decode`."""

    prefill: Mapping[RankKey, ForwardPassMetrics] = field(default_factory=dict)
    decode: Mapping[RankKey, ForwardPassMetrics] = field(default_factory=dict)
    prompts: tuple[ForwardPassMetrics, ...] = ()
    """The last step of each aggregated rank that computed prompts, where that is not its latest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Capacity of one worker of a role."""

    num_gpu: int | None = None
    gpu_cost_per_replica: int | None = None
    """GPUs that a replica occupies, where that differs from the GPUs of its engine."""
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    context_length: int | None = None
    max_kv_tokens: int | None = None
    kv_cache_block_size: int | None = None
    speculative_nextn: int | None = None
    """Speculative tokens per step."""
    power_watts_per_replica: int | None = None

    @property
    def gpus_per_replica(self) -> int | None:
        """GPUs that a replica occupies."""
        return self.num_gpu if self.gpu_cost_per_replica is None else self.gpu_cost_per_replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTick:
    """Time of the next tick, and the observations that it requires."""

    at_s: float
    run_load_scaling: bool = False
    run_throughput_scaling: bool = False
    need_traffic_metrics: bool = False
    use_full_traffic_metrics: bool = False
    """All averages; otherwise only the KV hit rate and the accept length."""
    traffic_metrics_duration_s: float = 0.0
    need_worker_states: bool = False
    need_worker_fpm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TickInput:
    """Observations of a tick; None if not requested."""

    now_s: float
    traffic: TrafficObservation | None = None
    worker_counts: WorkerCounts | None = None
    fpm_observations: FpmObservations | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """Target number of workers per role; None: no change."""

    num_prefill: int | None = None
    num_decode: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerEffects:
    """The result of a tick."""

    scale_to: ScalingDecision | None = None
    next_tick: ScheduledTick | None = None
    """The next tick; None to stop."""
    diagnostics: Mapping[str, Any] = field(default_factory=dict)


class Planner(Protocol):
    """An autoscaling policy that chooses the number of workers. Pure: time and observations are arguments."""

    @property
    def name(self) -> str:
        """Name for reports."""
        ...

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """Initialize with the workers' capabilities. Return the first tick; None if there is nothing to decide."""
        ...

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """Process a tick and return its effects."""
        ...
