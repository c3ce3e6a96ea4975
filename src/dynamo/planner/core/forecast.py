"""Forecast scaling (`scaling_policy: forecast`): replicas for a quantile of the demand over the start-up time.

A replica that is busy for a fraction u of its time answers in unit / (1 - u), where unit is the time of a step (or of a prompt) on
an idle replica. The objective therefore limits u, and the demand in busy replicas divided by that limit is the number of replicas.
See docs/planner-forecast.md.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.demand import DemandForecast, DemandHistory
from dynamo.planner.core.perf_model import EngineModel, uncached_fraction
from dynamo.planner.core.reasons import LoadReason
from dynamo.planner.core.regression import StepLoad
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import TrafficObservation

STARTUP_PRIOR_S = 60.0
"""Start-up time of a replica until one was measured."""
STARTUP_WEIGHT = 0.3
"""Weight of a new measurement of the start-up time."""
OVERDUE_FACTOR, OVERDUE_MIN_S = 5.0, 300.0
"""A start that takes longer than this multiple of the usual time, and than this time, is cancelled and requested again."""
UP_QUANTILE, DOWN_QUANTILE = 0.95, 1.0
"""Quantiles of the demand for which replicas are added, and for which they must suffice to be removed."""
OBJECTIVE_MARGIN = 0.7
"""Fraction of an objective that the mean latency may use: single requests must meet it too."""
BUSY_MAX, BUSY_MIN = 0.9, 0.1
"""Bounds of the busy fraction of a replica, for objectives much longer or shorter than a step."""
DRAIN_S = 20.0
"""Time within which a backlog that the present replicas cannot finish has to be finished by additional ones."""
DOWN_WINDOW_S = 45.0
"""A replica is removed only if it was not needed at any time of this window."""
OUTPUT_WEIGHT = 0.1
"""Weight of a new interval in the mean output length, which only completed requests report."""
PROBE_TOKENS = 1000
"""Tokens of the step whose time, less that of an empty step, gives the time per token."""
CLOCK_JUMP_INTERVALS = 20.0
"""A tick that is later than the last one by more intervals than this follows a jump of the clock or a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastEstimate:
    """Result of forecast scaling for one role: inputs, estimates and the reason."""

    target: int | None = None
    """Replicas with those that are starting; None: no change."""
    reason: LoadReason = LoadReason.UNSET
    detail: str = ""
    demand: float = 0.0
    """Mean work over the horizon, in busy replicas."""
    demand_up: float = 0.0
    """Quantile for which replicas are added."""
    demand_down: float = 0.0
    """Quantile for which the replicas that remain must suffice."""
    busy_limit: float = 0.0
    backlog_s: float = 0.0
    startup_s: float = 0.0
    needed: int = 0
    """Replicas for the quantile of the demand and the backlog."""
    kept: int = 0
    """Replicas below which the objective would not be kept."""
    latency_ms: float | None = None
    """Estimated latency at the present number of replicas."""


@dataclass(frozen=True, slots=True)
class WorkCost:
    """Cost of a role's requests on one replica."""

    request_s: float
    """Busy time per request."""
    busy_limit: float
    """Busy fraction at which the objective is reached."""
    token_s: float
    """Busy time per queued prompt token."""
    unit_s: float
    """Latency of an idle replica."""


@dataclass(slots=True)
class StartupClock:
    """Measures how long replicas take to start, from the numbers of ready and starting ones."""

    mean_s: float = STARTUP_PRIOR_S
    _begun_s: deque[float] = field(default_factory=deque)
    _ready: int = 0
    _last_s: float | None = None
    """Time of the last tick: starts that are new at a tick were requested at the one before."""
    _is_measured: bool = False
    _requested: tuple[float, int] = (0.0, 0)
    """Time and number of the replicas requested at the last tick: they may be ready before a tick sees them start."""

    def request(self, now_s: float, replicas: int) -> None:
        """Record that replicas are requested."""
        self._requested = (now_s, replicas)

    def observe(self, now_s: float, ready: int, pending: int) -> None:
        """Update with the numbers of a tick: starts complete in the order in which they began."""
        requested_s, requested = self._requested
        self._requested = (0.0, 0)
        started = min(requested, max(0, ready - self._ready - len(self._begun_s)))
        self._begun_s.extend([requested_s] * started)
        for _ in range(min(max(0, ready - self._ready), len(self._begun_s))):
            took_s = now_s - self._begun_s.popleft()
            if took_s >= 0:
                weight = STARTUP_WEIGHT if self._is_measured else 1.0
                self.mean_s += weight * (took_s - self.mean_s)
                self._is_measured = True
        while len(self._begun_s) > pending:
            self._begun_s.pop()
        while len(self._begun_s) < pending:
            self._begun_s.append(now_s if self._last_s is None else self._last_s)
        self._ready, self._last_s = ready, now_s

    def restart(self) -> None:
        """Forget the starts under way, because the clock jumped or they were cancelled."""
        self._begun_s.clear()
        self._last_s = None
        self._requested = (0.0, 0)

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the oldest start takes much longer than usual."""
        limit_s = max(OVERDUE_MIN_S, OVERDUE_FACTOR * self.mean_s)
        return bool(self._begun_s) and now_s - self._begun_s[0] > limit_s


@dataclass(slots=True)
class RoleForecast:
    """Forecast scaling of one role. One owner; times and observations are arguments."""

    role: EngineRole
    config: PlannerConfig
    model: EngineModel
    _demand: DemandHistory = field(default_factory=DemandHistory)
    _startup: StartupClock = field(default_factory=StartupClock)
    _output_tokens: float = 0.0
    _hit_rate: float | None = None
    _kept: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and the replicas that were needed then."""
    _last: TrafficObservation | None = None
    _last_s: float = -math.inf
    _begun_s: float = -math.inf
    """Begin of the observation: the first tick, or that after a jump of the clock."""
    _counters: list[tuple[str, int, int]] = field(default_factory=list)
    """Step numbers of the last tick: traffic that repeats without a new step is stale."""

    def propose(
        self,
        now_s: float,
        counts: tuple[int, int],
        traffic: TrafficObservation | None,
        steps: Sequence[ForwardPassMetrics],
    ) -> ForecastEstimate:
        """Return the replicas of the role, given the ready and the starting ones."""
        self._check_clock(now_s)
        ready, pending = counts
        self._startup.observe(now_s, ready, pending)
        if pending and self._startup.is_overdue(now_s):
            self._startup.restart()
            return ForecastEstimate(
                target=max(ready, self._floor),
                reason=LoadReason.SCALE_DOWN,
                detail=f"{pending} starts are overdue: cancelled, to be requested again",
                startup_s=self._startup.mean_s,
            )
        counters = [(step.worker_id, step.dp_rank, step.counter_id) for step in steps]
        is_repeated = traffic is not None and traffic.num_req > 0 and traffic == self._last
        is_new = not (is_repeated and counters == self._counters) and self._observe_lengths(traffic)
        self._counters = counters
        cost = self._cost(traffic if is_new else self._last)
        if cost is None:
            return ForecastEstimate(reason=LoadReason.INSUFFICIENT_DATA, startup_s=self._startup.mean_s)
        if is_new and traffic is not None:
            self._demand.add(
                now_s, traffic.duration_s, traffic.num_req / traffic.duration_s * cost.request_s, cost.request_s
            )
            self._last = traffic
        if self._demand.is_empty:
            return ForecastEstimate(reason=LoadReason.NO_FPM_DATA, detail="no traffic was measured yet")
        backlog_s = sum(_finite(step.queued_requests.sum_prefill_tokens) for step in steps) * cost.token_s
        return self._decided(now_s, ready, pending, cost, backlog_s, is_blind=not is_new)

    @property
    def _floor(self) -> int:
        return max(1, self.config.prefill_floor if self.role is EngineRole.PREFILL else self.config.decode_floor)

    def _check_clock(self, now_s: float) -> None:
        interval_s = self.config.load_adjustment_interval_seconds
        if now_s < self._last_s or now_s - self._last_s > CLOCK_JUMP_INTERVALS * interval_s:
            self._startup.restart()
            self._demand.clear_after(now_s)
            self._kept.clear()
            self._begun_s = now_s
        self._last_s = now_s

    def _observe_lengths(self, traffic: TrafficObservation | None) -> bool:
        """Update mean lengths; return whether the observation is complete and finite."""
        if traffic is None or not traffic.duration_s > 0:
            return False
        values = (traffic.num_req, traffic.isl, traffic.osl)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not math.isfinite(traffic.duration_s):
            return False
        if traffic.osl > 0:
            weight = OUTPUT_WEIGHT if self._output_tokens else 1.0
            self._output_tokens += weight * (traffic.osl - self._output_tokens)
        hit_rate = traffic.kv_hit_rate
        if hit_rate is not None and math.isfinite(hit_rate):
            self._hit_rate = hit_rate if self._hit_rate is None else 0.9 * self._hit_rate + 0.1 * hit_rate
        return True

    def _cost(self, traffic: TrafficObservation | None) -> WorkCost | None:
        """Return the cost of the interval's requests; None without a model of the steps."""
        idle_s = self.model.steps.seconds(StepLoad())
        prompt_s = self.model.steps.seconds(StepLoad(prefill_requests=1, prefill_tokens=PROBE_TOKENS))
        context = max(1, int((traffic.isl if traffic else 0.0) + self._output_tokens / 2))
        decode_s = self.model.steps.seconds(StepLoad(decode_requests=1, decode_kv_tokens=context))
        if idle_s is None or prompt_s is None or decode_s is None:
            return None
        token_s = max(0.0, prompt_s - idle_s) / PROBE_TOKENS
        prefill_s = token_s * (traffic.isl if traffic else 0.0) * uncached_fraction(self._hit_rate)
        generation_s = self._output_tokens * max(0.0, decode_s - idle_s)
        margin = OBJECTIVE_MARGIN / 1000
        by_ttft = 1 - (idle_s + prefill_s) / (self.config.ttft_ms * margin)
        by_itl = 1 - idle_s / (self.config.itl_ms * margin)
        if self.role is EngineRole.PREFILL:
            return WorkCost(prefill_s, _bounded(by_ttft), token_s, idle_s + prefill_s)
        work_s = generation_s if self.role is EngineRole.DECODE else prefill_s + generation_s
        limit = min(by_itl, self._batch_limit(work_s, idle_s))
        if self.role is EngineRole.DECODE:
            return WorkCost(work_s, _bounded(limit), token_s, idle_s)
        return WorkCost(work_s, _bounded(min(by_ttft, limit)), token_s, idle_s)

    def _batch_limit(self, request_s: float, idle_s: float) -> float:
        """Return the busy fraction at which the sequences of a replica reach its batch limit; 1 without a limit.

        By Little's law a replica has `u / request_s · tokens · t` sequences, where a step takes `t = idle_s / (1 - u)`.
        """
        capabilities = self.model.capabilities
        if capabilities is None or not capabilities.max_num_seqs or request_s <= 0:
            return 1.0
        batch = OBJECTIVE_MARGIN * capabilities.max_num_seqs
        return batch / (batch + self._output_tokens * idle_s / request_s)

    def _decided(
        self, now_s: float, ready: int, pending: int, cost: WorkCost, backlog_s: float, *, is_blind: bool
    ) -> ForecastEstimate:
        startup_s = self._startup.mean_s
        horizon_s = startup_s + self.config.load_adjustment_interval_seconds
        demand = self._demand.forecast(now_s, horizon_s)
        expected = ready + pending
        needed = self._needed(demand, cost, backlog_s, expected, horizon_s)
        kept = max(needed, math.ceil(demand.quantile(DOWN_QUANTILE) / cost.busy_limit), self._floor)
        self._kept.append((now_s, kept))
        while self._kept[0][0] < now_s - DOWN_WINDOW_S:
            self._kept.popleft()
        lowest = max(count for _, count in self._kept)
        target, reason, detail = None, LoadReason.NO_CHANGE, "the expected replicas suffice"
        if needed > expected:
            target, reason = needed, LoadReason.SCALE_UP
            self._startup.request(now_s, needed - expected)
            detail = f"demand and backlog over {horizon_s:.0f} s need {needed} replicas"
        elif is_blind:
            reason, detail = LoadReason.NO_FPM_DATA, "metrics are missing or repeated: replicas are kept"
        elif lowest < expected and now_s - self._begun_s < DOWN_WINDOW_S:
            reason, detail = LoadReason.INSUFFICIENT_DATA, f"demand was observed for less than {DOWN_WINDOW_S:.0f} s"
        elif lowest < expected:
            target, reason = lowest, LoadReason.SCALE_DOWN
            detail = f"{lowest} replicas keep the objective at the upper quantile of the demand"
        elif needed < expected:
            reason = LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION
            detail = f"{expected - 1} replicas would not keep the objective at the upper quantile of the demand"
        return ForecastEstimate(
            target=target,
            reason=reason,
            detail=detail,
            demand=demand.mean,
            demand_up=demand.quantile(UP_QUANTILE),
            demand_down=demand.quantile(DOWN_QUANTILE),
            busy_limit=cost.busy_limit,
            backlog_s=backlog_s,
            startup_s=startup_s,
            needed=needed,
            kept=kept,
            latency_ms=_latency_ms(cost, demand.mean, ready),
        )

    def _needed(self, demand: DemandForecast, cost: WorkCost, backlog_s: float, expected: int, horizon_s: float) -> int:
        """Return the replicas for the demand, and for the backlog that is left when new replicas are ready."""
        work = demand.quantile(UP_QUANTILE)
        left_s = max(0.0, backlog_s - max(0.0, expected - work) * horizon_s)
        return max(math.ceil(work / cost.busy_limit + left_s / DRAIN_S), self._floor)


def _bounded(busy: float) -> float:
    return min(BUSY_MAX, max(BUSY_MIN, busy))


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _latency_ms(cost: WorkCost, work: float, replicas: int) -> float | None:
    """Return the mean latency; None if the replicas are fewer than the work."""
    return cost.unit_s * 1000 / (1 - work / replicas) if replicas > work else None
