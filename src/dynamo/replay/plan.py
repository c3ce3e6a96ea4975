"""ClusterPlan: description of a cluster: pools of workers, failures and restarts, and KV transfers."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo.core.errors import ConfigError
from dynamo.mocker.simulation.scheduler import RankLimits
from dynamo.mocker.simulation.timing import ScaledTimes, StepTimes, Timing


class Role(enum.Enum):
    """The phase that a pool's workers compute."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the worker at a place, and the optional delay until a successor starts there."""

    at_ms: float
    slot: int
    restart_ms: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedRestart:
    """A restart: drain the worker at a place and start a successor."""

    at_ms: float
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool of equal workers."""

    workers: int
    role: Role = Role.AGGREGATED
    limits: RankLimits = field(default_factory=RankLimits)
    timing: StepTimes = field(default_factory=Timing)
    startup_ms: float = 0.0
    """Start-up time of workers that are added during the run."""
    ranks: int = 1
    """Ranks per worker, each with its own batch and cache."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Speed of workers relative to the others, by place."""
    gpus_per_worker: int = 1
    """GPUs that a worker occupies; only cost and budgets depend on them."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"{self.role.value} workers: {self.workers}: expected 1 or more")
        if self.ranks < 1:
            raise ConfigError(f"dp_size {self.ranks}: expected 1 or more")

    def timing_at(self, slot: int) -> StepTimes:
        """Return the step times of the worker at a place."""
        speed = self.speeds.get(slot, 1.0)
        return self.timing if speed == 1.0 else ScaledTimes(self.timing, speed)


@dataclass(frozen=True, slots=True)
class Bypass:
    """Conditional disaggregation: prompts with few uncached tokens are computed by the decode worker."""

    tokens: int = 2048
    """Number of uncached tokens below which the condition holds."""
    ratio: float = 0.7
    """Uncached share of the prompt below which the condition holds; both conditions are required."""

    def applies(self, tokens: int, missing: int) -> bool:
        """Return whether the decode worker computes a prompt of `tokens` tokens, `missing` of them uncached."""
        return missing < self.tokens and missing < self.ratio * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A cluster and its scheduled failures."""

    pools: tuple[PoolPlan, ...]
    """One aggregated pool, or a prefill and a decode pool."""
    bypass: Bypass | None = None
    failures: tuple[Failure, ...] = ()
    restarts: tuple[PlannedRestart, ...] = ()
    event_lag_ms: float = 0.0
    interval_ms: float = 1000.0
    """Interval of the timeline."""
    seed: int = 42
    max_sim_time_ms: float | None = None
    queue_timeout_ms: float = 120_000.0
    """Maximum wait in a router's queue."""
    overhead_ms: float = 0.0
    """Delay of each request between its client and the router, which the engine's step times do not include."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer."""

    def __post_init__(self) -> None:
        roles = tuple(pool.role for pool in self.pools)
        assert roles in {(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)}, "invalid combination of pools"
        if self.event_lag_ms < 0:
            raise ConfigError(f"--kv-event-lag-ms {self.event_lag_ms:g}: expected zero or more")
        if self.overhead_ms < 0:
            raise ConfigError(f"--request-overhead-ms {self.overhead_ms:g}: expected zero or more")
        places = sum(pool.workers for pool in self.pools)
        for flag, befalls in (("--fail", self.failures), ("--restart", self.restarts)):
            for one in befalls:
                if not 0 <= one.slot < places:
                    raise ConfigError(f"{flag}: unknown worker {one.slot}: must be 0 to {places - 1}")
        blocks = {pool.limits.block_tokens for pool in self.pools}
        if len(blocks) > 1:
            raise ConfigError("block_size: must be equal for prefill and decode workers")
