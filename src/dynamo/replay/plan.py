"""Plan: a cluster, described: its pools of workers, what befalls them, and how prompts travel between them."""

import enum
from dataclasses import dataclass, field

from dynamo.core.errors import ConfigError
from dynamo.mocker.simulation.scheduler import Limits
from dynamo.mocker.simulation.timing import StepTimes, Timing


class Role(enum.Enum):
    """What a pool's workers do."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's place fails at a time, and a new worker takes it so much later, or none."""

    at_ms: float
    slot: int
    restart_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """A worker is taken out of service at a time, ends what it has, and a new one takes its place."""

    at_ms: float
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Workers that are alike."""

    workers: int
    role: Role = Role.AGGREGATED
    limits: Limits = field(default_factory=Limits)
    timing: StepTimes = field(default_factory=Timing)
    startup_ms: float = 0.0
    """What a worker needs that does not stand there from the beginning."""
    ranks: int = 1
    """Of each worker: engines with batches and caches of their own."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"{self.role.value} workers: {self.workers}: expected 1 or more")
        if self.ranks < 1:
            raise ConfigError(f"dp_size {self.ranks}: expected 1 or more")


@dataclass(frozen=True, slots=True)
class Bypass:
    """Which prompts the decode worker computes itself (serving-plane.md §4.11, `isl_bounding`): those of which little is new."""

    tokens: int = 2048
    """Fewer than so many tokens are not in its cache …"""
    ratio: float = 0.7
    """… and less than this part of the prompt."""

    def applies(self, tokens: int, missing: int) -> bool:
        """Whether a prompt of so many tokens, of which so many are missing, stays there."""
        return missing < self.tokens and missing < self.ratio * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cluster, and what befalls it."""

    pools: tuple[PoolPlan, ...]
    """One, or prefill and decode."""
    bypass: Bypass | None = None
    failures: tuple[Failure, ...] = ()
    restarts: tuple[Restart, ...] = ()
    event_lag_ms: float = 0.0
    interval_ms: float = 1000.0
    """Of the timeline."""
    seed: int = 42
    max_sim_time_ms: float | None = None

    def __post_init__(self) -> None:
        roles = tuple(pool.role for pool in self.pools)
        assert roles in {(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)}, "pools that do not make a cluster"
        if self.event_lag_ms < 0:
            raise ConfigError(f"--kv-event-lag-ms {self.event_lag_ms:g}: expected zero or more")
        places = sum(pool.workers for pool in self.pools)
        for flag, befalls in (("--fail", self.failures), ("--restart", self.restarts)):
            for one in befalls:
                if not 0 <= one.slot < places:
                    raise ConfigError(f"{flag}: there is no worker {one.slot}: they are 0 to {places - 1}")
        blocks = {pool.limits.block_tokens for pool in self.pools}
        if len(blocks) > 1:
            raise ConfigError("prefill and decode workers have blocks of different sizes: a prompt could not travel")
