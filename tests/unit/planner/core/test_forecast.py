"""Forecast scaling: pure decisions, and seeded simulations of faulty observations and flapping workers."""

import math
import random
from dataclasses import replace

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore, TickDecision
from dynamo.planner.core.forecast import StartupClock
from dynamo.planner.core.reasons import LoadReason
from dynamo.planner.core.record import Start, encode, recorded, replay
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    TickInput,
    TrafficObservation,
    WorkerCounts,
)

BUDGET = 8
RAW = {
    "optimization_target": "sla",
    "scaling_policy": "forecast",
    "mode": "agg",
    "ttft_ms": 2000,
    "max_gpu_budget": BUDGET,
}
ENGINE = EngineCapabilities(num_gpu=1, max_num_batched_tokens=8192, max_num_seqs=256, max_kv_tokens=1_000_000)
REQUEST_S = 0.2
"""Busy time of a request of `traffic`, in the model of `profile`: 4,000 prompt tokens at 25 µs and 100 decode steps at 1 ms."""


def profile() -> list[ForwardPassMetrics]:
    found = []
    for prompt in (0, 1000, 4000):
        for kv in (4050, 40_500, 405_000):
            scheduled = ScheduledRequests(
                num_prefill_requests=int(prompt > 0),
                sum_prefill_tokens=prompt,
                num_decode_requests=1,
                sum_decode_kv_tokens=kv,
            )
            seconds = 0.006 + 25e-6 * prompt + kv / 4050 * 1e-3
            found.append(ForwardPassMetrics(FORWARD_PASS_VERSION, "p", 0, 1, seconds, scheduled, QueuedRequests()))
    return found


def start(engine: EngineCapabilities = ENGINE, **more: object) -> Start:
    return Start(
        config={**RAW, **more},
        capabilities=WorkerCapabilities(decode=engine),
        bootstrap={EngineRole.AGGREGATED: profile()},
    )


def traffic(rate: float, duration_s: float = 5.0) -> TrafficObservation:
    return TrafficObservation(duration_s=duration_s, num_req=rate * duration_s, isl=4000.0, osl=100.0)


def steps(workers: int, queued: int = 0) -> FpmObservations:
    waiting = QueuedRequests(num_prefill_requests=1 if queued else 0, sum_prefill_tokens=queued)
    return FpmObservations(
        decode={
            (f"{at}", 0): ForwardPassMetrics(FORWARD_PASS_VERSION, f"{at}", 0, 1, 0.0, ScheduledRequests(), waiting)
            for at in range(workers)
        }
    )


class Deployment:
    """Replicas that start after a time, and a planner that observes them every five seconds."""

    def __init__(self, ready: int, startup_s: float, engine: EngineCapabilities = ENGINE, **more: object) -> None:
        self.core = start(engine, **more).planner()
        self.ready, self.startup_s = ready, startup_s
        self.starting: list[float] = []
        self.now_s = 0.0
        self.scheduled = self.core.first_tick(0.0)
        self.requested: list[int] = []

    def tick(
        self, observed: TrafficObservation | None, fpm: FpmObservations | None, reported_s: float | None = None
    ) -> TickDecision:
        self.now_s += 5
        done = [at for at in self.starting if at <= self.now_s]
        self.starting = [at for at in self.starting if at > self.now_s]
        self.ready += len(done)
        pending = len(self.starting)
        counts = WorkerCounts(
            ready_num_decode=self.ready, expected_num_decode=self.ready + pending, pending_num_decode=pending
        )
        now_s = self.now_s if reported_s is None else reported_s
        seen = TickInput(now_s=now_s, traffic=observed, worker_counts=counts, fpm_observations=fpm)
        decision = self.core.tick(self.scheduled, seen)
        self.scheduled = self.core.next_tick(self.scheduled, now_s)
        if decision.scale_to is not None and decision.scale_to.num_decode is not None:
            self.scale(decision.scale_to.num_decode)
        return decision

    def scale(self, target: int) -> None:
        self.requested.append(target)
        self.starting += [self.now_s + self.startup_s] * (target - self.ready - len(self.starting))
        while self.starting and self.ready + len(self.starting) > target:
            self.starting.pop()
        self.ready = min(self.ready, target)

    def run(self, ticks: int, rate: float, **more: int) -> TickDecision:
        for number in range(ticks):
            found = self.tick(traffic(rate + 1e-6 * (number % 7)), steps(self.ready, **more))
        return found


def test_forecast_requires_the_sla_target() -> None:
    with pytest.raises(ConfigError, match="optimization_target: throughput: must be sla with scaling_policy=forecast"):
        parse({**RAW, "optimization_target": "throughput"})


def test_step_of_demand_adds_several_replicas_in_one_decision() -> None:
    deployment = Deployment(1, 30.0)
    deployment.run(12, 1.0)
    deployment.run(4, 20.0)
    assert max(deployment.requested) >= 4
    assert any(
        after - before >= 2 for before, after in zip([1, *deployment.requested], deployment.requested, strict=False)
    )


def test_steady_demand_converges_to_replicas_that_keep_the_objective() -> None:
    deployment = Deployment(8, 30.0)
    decision = deployment.run(300, 10.0)
    assert decision.forecast is not None
    estimate = decision.forecast.decode
    assert estimate is not None
    assert estimate.demand == pytest.approx(10.0 * REQUEST_S, rel=0.05)
    assert deployment.ready == math.ceil(estimate.demand / estimate.busy_limit)
    assert estimate.latency_ms is not None
    assert estimate.latency_ms < 50
    count = len(deployment.requested)
    deployment.run(100, 10.0)
    assert len(deployment.requested) == count, "no oscillation"


def test_batch_limit_of_a_worker_limits_its_work() -> None:
    """A request has 100 steps of 6 ms / (1 - u) in 0.2 s of work, so that two sequences at 70 % give u = 1.4 / (1.4 + 3)."""
    limits = []
    for sequences in (2, 256):
        decision = Deployment(4, 30.0, engine=replace(ENGINE, max_num_seqs=sequences)).run(3, 5.0)
        assert decision.forecast is not None
        assert decision.forecast.decode is not None
        limits.append(decision.forecast.decode.busy_limit)
    few, many = limits
    assert few == pytest.approx(1.4 / (1.4 + 100 * 0.006 / REQUEST_S), rel=0.02)
    assert many > 0.8


def test_backlog_adds_replicas_beyond_the_demand() -> None:
    deployment = Deployment(2, 30.0)
    deployment.run(40, 5.0)
    assert deployment.ready + len(deployment.starting) <= 2
    deployment.run(3, 5.0, queued=3_000_000)
    assert deployment.requested[-1] > 2


def test_startup_time_is_measured_from_the_counts() -> None:
    clock = StartupClock()
    for now_s, ready, pending in ((0, 1, 0), (5, 1, 2), (25, 1, 2), (45, 3, 0)):
        clock.observe(float(now_s), ready, pending)
    assert clock.mean_s == pytest.approx(45.0), "from the tick before, which requested them"


def test_missing_metrics_hold_the_replicas_with_a_reason() -> None:
    deployment = Deployment(4, 30.0)
    deployment.run(20, 14.0)
    before = deployment.ready
    for _ in range(200):
        decision = deployment.tick(None, None)
        assert decision.load.reason in (LoadReason.NO_FPM_DATA, LoadReason.SCALE_UP, LoadReason.NO_CHANGE)
    assert deployment.ready >= before


def test_starts_that_never_complete_are_cancelled_and_requested_again() -> None:
    deployment = Deployment(2, 1e9)
    deployment.run(200, 20.0)
    assert deployment.ready == 2
    assert deployment.requested.count(2) >= 1
    deployment.startup_s = 30.0
    deployment.run(200, 20.0)
    assert deployment.ready >= 5


def test_record_of_forecast_decisions_replays_to_the_same_bytes() -> None:
    begun = start()
    core = begun.planner()
    scheduled, lines = core.first_tick(0.0), [encode(begun)]
    for number in range(60):
        now_s = 5.0 * (number + 1)
        counts = WorkerCounts(ready_num_decode=2, expected_num_decode=2)
        seen = TickInput(
            now_s=now_s, traffic=traffic(number % 13), worker_counts=counts, fpm_observations=steps(2, number * 100)
        )
        lines.append(encode(recorded(core, scheduled, seen).tick))
        scheduled = core.next_tick(scheduled, now_s)
    assert all(bytes(tick.decision) == again for tick, again in replay(lines))


@pytest.mark.parametrize("seed", range(20))
def test_faulty_observations_never_scale_to_zero_or_over_budget_and_the_planner_recovers(seed: int) -> None:
    rng = random.Random(seed)
    deployment = Deployment(rng.randint(1, BUDGET), rng.choice((5.0, 30.0, 120.0)))
    last: TrafficObservation | None = None
    skew_s = 0.0
    for _ in range(300):
        observed: TrafficObservation | None = traffic(rng.choice((0.0, 2.0, 15.0, 60.0)) * rng.random())
        fpm: FpmObservations | None = steps(deployment.ready, rng.choice((0, 0, 10_000, 10_000_000)))
        fault = rng.randrange(8)
        if fault == 0:
            observed, fpm = None, None
        elif fault == 1:
            observed = TrafficObservation(
                duration_s=5.0, num_req=math.nan, isl=math.nan, osl=math.inf, kv_hit_rate=math.nan
            )
        elif fault == 2:
            observed = last
        elif fault == 3:
            skew_s = rng.choice((0.0, 3600.0, -3600.0, 86400.0))
        elif fault == 4:
            deployment.ready = rng.randint(1, BUDGET)
            deployment.starting.clear()
        elif fault == 5:
            fpm = steps(rng.randint(0, 12))
        elif fault == 6:
            deployment.startup_s = rng.choice((5.0, 30.0, 1e9))
        last = observed
        deployment.tick(observed, fpm, deployment.now_s + 5 + skew_s)
        assert all(1 <= target <= BUDGET for target in deployment.requested)
    deployment.startup_s = 30.0
    deployment.run(400, 10.0)
    assert deployment.ready in (3, 4), "recovered"
    assert isinstance(deployment.core, PlannerCore)


def test_replicas_are_not_removed_before_the_demand_was_observed_for_a_while() -> None:
    deployment = Deployment(4, 30.0)
    decision = deployment.run(8, 1.0)
    assert deployment.ready == 4
    assert decision.load.reason is LoadReason.INSUFFICIENT_DATA
    deployment.run(20, 1.0)
    assert deployment.ready == 1
