"""Scenario: description of one run: load, cluster, router and planner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.core.interpreter import rare_collections
from dynamo.protocols.planner import Planner
from dynamo.replay.agentic import AgenticLoad, Play
from dynamo.replay.cluster import Cluster
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ClosedLoop, OpenLoop, ReplaySession, TurnSource
from dynamo.replay.modes import CACHE_AWARE, canonical, placement, queue_timeout_s
from dynamo.replay.names import Namer
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.plan import Bypass, ClusterPlan, Failure, PlannedRestart, PoolPlan, Role
from dynamo.replay.telemetry import TelemetrySampler


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The load, independent of its target."""

    sessions: Sequence[ReplaySession]
    block_tokens: int = 512
    plays: Sequence[Play] = ()
    """Plays whose sessions depend on each other."""

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return sum(len(session.turns) for session in self.sessions)

    def load(self, concurrency: int | None, speedup: float, lanes: int | None) -> TurnSource:
        """Return the load with its arrival process. Raise `ConfigError` for flags that do not apply to it."""
        if self.plays:
            if concurrency is not None:
                raise ConfigError("--replay-concurrency: not allowed for agentic traces; use --agentic-lanes")
            return AgenticLoad(self.plays, lanes, speedup)
        if lanes is not None:
            raise ConfigError("--agentic-lanes: requires an agentic trace")
        if concurrency is None:
            return OpenLoop(self.sessions, speedup)
        return ClosedLoop(self.sessions, concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All parameters of a run."""

    sessions: Sequence[ReplaySession]
    plays: Sequence[Play] = ()
    workers: int = 1
    prefill_workers: int | None = None
    """Number of prefill workers; `workers` then are decode workers."""
    prefill_engine: EngineArgs | None = None
    """Engine of the prefill workers; None: the same engine."""
    bypass: Bypass | None = None
    router_mode: str = "round_robin"
    router_settings: dict[str, Any] = field(default_factory=dict)
    engine: EngineArgs = field(default_factory=EngineArgs)
    concurrency: int | None = None
    """Number of concurrent sessions; None: recorded arrival times."""
    lanes: int | None = None
    speedup: float = 1.0
    block_tokens: int = 512
    failures: tuple[Failure, ...] = ()
    restarts: tuple[PlannedRestart, ...] = ()
    planner: Callable[[], Planner | None] | None = None
    """Factory of a new planner for each run."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Speed of some workers relative to the others, by place."""
    event_lag_ms: float = 0.0
    overhead_ms: float = 0.0
    """Delay of each request between its client and the router."""
    gpus_per_worker: tuple[int, int] = (1, 1)
    """GPUs of a prefill worker, and of a decode or aggregated worker."""
    interval_ms: float = 1000.0
    max_sim_time_ms: float | None = None
    seed: int = 42

    def run(
        self, progress: Callable[[int, float], None] | None = None, sampler: TelemetrySampler | None = None
    ) -> RunOutcome:
        """Run the scenario; equal scenarios have equal outcomes."""
        if self.bypass is not None and canonical(self.router_mode) not in CACHE_AWARE:
            raise ConfigError("conditional disaggregation requires a router mode that uses KV events")
        load = LoadSource(self.sessions, self.block_tokens, self.plays).load(self.concurrency, self.speedup, self.lanes)
        plan = ClusterPlan(
            pools=self._pools(),
            bypass=self.bypass,
            failures=self.failures,
            restarts=self.restarts,
            event_lag_ms=self.event_lag_ms,
            interval_ms=self.interval_ms,
            seed=self.seed,
            max_sim_time_ms=self.max_sim_time_ms,
            max_model_len=self.engine.max_model_len,
            queue_timeout_ms=1000 * queue_timeout_s(self.router_mode, self.router_settings),
            overhead_ms=self.overhead_ms,
        )
        placements = {
            pool.role: placement(self.router_mode, self.router_settings, self.engine.block_size, self.seed, pool.role)
            for pool in plan.pools
        }
        planner = None if self.planner is None else self.planner()
        namer = Namer(self.block_tokens, self.engine.block_size)
        with rare_collections():
            return Cluster.of(plan, load, namer, placements, planner, sampler).run(progress)

    def _pools(self) -> tuple[PoolPlan, ...]:
        prefill_gpus, decode_gpus = self.gpus_per_worker
        if self.prefill_workers is None:
            return (_pool(Role.AGGREGATED, self.workers, self.engine, decode_gpus, self.speeds),)
        prefill = self.prefill_engine or self.engine
        return (
            _pool(Role.PREFILL, self.prefill_workers, prefill, prefill_gpus, self.speeds),
            _pool(Role.DECODE, self.workers, self.engine, decode_gpus, self.speeds),
        )


def _pool(role: Role, workers: int, engine: EngineArgs, gpus: int, speeds: Mapping[int, float]) -> PoolPlan:
    return PoolPlan(
        workers=workers,
        role=role,
        limits=engine.limits(),
        timing=engine.timing(),
        startup_ms=(engine.startup_time or 0.0) * 1000,
        ranks=engine.dp_size,
        gpus_per_worker=gpus,
        speeds=speeds,
    )
