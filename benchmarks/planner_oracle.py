"""Planners that know the demand in advance: an upper bound for any policy with the same start-up time.

`oracle` uses the arrivals of the next start-up time. `known rate` uses those of the next ten seconds: it follows a
change at once, but does not expect it. Both use the performance model, the limits and the backlog rule of forecast
scaling, so that only the knowledge differs.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.forecast import DRAIN_S, OBJECTIVE_MARGIN
from dynamo.planner.core.perf_model import EngineModel
from dynamo.planner.core.regression import StepLoad, StepRegression
from dynamo.protocols.planner import EngineCapabilities, PlannerEffects, ScalingDecision, ScheduledTick, TickInput
from dynamo.replay.core_planner import measured_steps
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession

INTERVAL_S = 5.0
WINDOW_S = 10.0
"""Window of the mean demand: shorter peaks are queued."""
PROBE = 1000
BLOCK_TOKENS = 512


@dataclass(slots=True)
class KnownDemand:
    """Work of each request on one replica, by arrival time. Prefixes that an earlier request had are cached."""

    sessions: Sequence[ReplaySession]
    engine: EngineArgs
    token_s: float = field(init=False)
    idle_s: float = field(init=False)
    _times_s: list[float] = field(init=False)
    _sums_s: list[float] = field(init=False)
    """Total work before each arrival."""

    def __post_init__(self) -> None:
        model = EngineModel(EngineRole.AGGREGATED, StepRegression(EngineRole.AGGREGATED, 64, 16, 5), 64, None)
        model.learn(measured_steps(EngineRole.AGGREGATED, self.engine))

        def seconds(load: StepLoad) -> float:
            found = model.steps.seconds(load)
            assert found is not None, "the model has steps"
            return found

        self.idle_s = seconds(StepLoad())
        self.token_s = (seconds(StepLoad(prefill_requests=1, prefill_tokens=PROBE)) - self.idle_s) / PROBE
        kv_s = (seconds(StepLoad(decode_requests=1, decode_kv_tokens=PROBE)) - self.idle_s) / PROBE
        cached = set[int]()
        self._times_s, self._sums_s = [], [0.0]
        for turn in sorted((one.turns[0] for one in self.sessions), key=lambda turn: turn.at_ms or 0.0):
            blocks = list(turn.hash_ids)
            hits = next((at for at, block in enumerate(blocks) if block not in cached), len(blocks))
            cached.update(blocks)
            uncached = max(0, turn.input_tokens - hits * BLOCK_TOKENS)
            context = turn.input_tokens + turn.output_tokens / 2
            work = uncached * self.token_s + turn.output_tokens * context * kv_s
            self._times_s.append((turn.at_ms or 0.0) / 1000)
            self._sums_s.append(self._sums_s[-1] + work)

    def mean(self, begin_s: float) -> float:
        """Return the mean work of a window."""
        first, last = bisect_left(self._times_s, begin_s), bisect_left(self._times_s, begin_s + WINDOW_S)
        return (self._sums_s[last] - self._sums_s[first]) / WINDOW_S


@dataclass(slots=True)
class OraclePlanner:
    """Planner that requests the replicas for the largest demand of the known time."""

    demand: KnownDemand
    ahead_s: float
    """Time until the last window that is known."""
    itl_ms: float
    replicas_max: int
    name: str = "oracle"

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """Return the first tick."""
        return self._tick_at(0.1)

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """Return the replicas for the known demand and the backlog."""
        starts = [seen.now_s + INTERVAL_S * at for at in range(int(self.ahead_s / INTERVAL_S) + 1)]
        work = max(map(self.demand.mean, starts))
        steps = seen.fpm_observations.decode.values() if seen.fpm_observations else ()
        backlog_s = sum(step.queued_requests.sum_prefill_tokens for step in steps) * self.demand.token_s
        counts = seen.worker_counts
        assert counts is not None, "the tick requires worker counts"
        expected = counts.expected_num_decode or 0
        left_s = max(0.0, backlog_s - max(0.0, expected - work) * INTERVAL_S)
        limit = 1 - self.demand.idle_s * 1000 / (OBJECTIVE_MARGIN * self.itl_ms)
        wanted = min(self.replicas_max, max(1, math.ceil(work / limit + left_s / DRAIN_S)))
        return PlannerEffects(
            scale_to=ScalingDecision(num_decode=wanted) if wanted != expected else None,
            next_tick=self._tick_at(scheduled.at_s + INTERVAL_S),
        )

    @staticmethod
    def _tick_at(at_s: float) -> ScheduledTick:
        return ScheduledTick(at_s=at_s, run_load_scaling=True, need_worker_states=True, need_worker_fpm=True)
