"""Planner metrics: exposed values, unknown values, and reasons."""

from dataclasses import replace

import pytest

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore
from dynamo.planner.core.reasons import LoadReason
from dynamo.planner.core.scaling import DECODE, PREFILL, WorkerCapabilities
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import FpmObservations, TickInput, TrafficObservation, WorkerCounts

GPUS = {PREFILL: 2, DECODE: 4}


@pytest.fixture
def registry() -> MetricsRegistry:
    return MetricsRegistry()


@pytest.fixture
def metrics(registry: MetricsRegistry) -> PlannerMetrics:
    return PlannerMetrics(registry, parse({"ttft_ms": 300, "itl_ms": 20}))


def values(registry: MetricsRegistry) -> dict[str, str]:
    lines = [line.removeprefix("dynamo_planner_") for line in registry.render().splitlines() if line[:1] != "#"]
    return dict(line.rsplit(" ", 1) for line in lines)


def test_objectives_are_exposed_from_the_start(registry: MetricsRegistry, metrics: PlannerMetrics) -> None:
    found = values(registry)
    assert (float(found["sla_target_ttft_ms"]), float(found["sla_target_itl_ms"])) == (300, 20)


def test_gpu_hours_are_those_of_ready_workers_between_ticks(registry: MetricsRegistry, metrics: PlannerMetrics) -> None:
    counts = WorkerCounts(ready_num_prefill=1, ready_num_decode=2)
    for now_s in (100.0, 1900.0):
        metrics.observed(TickInput(now_s=now_s, worker_counts=counts), GPUS)
    found = values(registry)
    assert float(found["gpu_hours"]) == pytest.approx(5.0)
    assert (float(found["num_prefill_replicas"]), float(found["num_decode_replicas"])) == (1, 2)


def test_unknown_traffic_is_nan(registry: MetricsRegistry, metrics: PlannerMetrics) -> None:
    metrics.traffic(ObservedTraffic(traffic=TrafficObservation(duration_s=5, num_req=10, isl=3, osl=4), ttft_ms=9))
    assert float(values(registry)["observed_requests_per_second"]) == 2
    metrics.traffic(ObservedTraffic(unknown="x"))
    found = values(registry)
    assert {found["observed_requests_per_second"], found["observed_ttft_ms"]} == {"NaN"}


def test_ranks_that_ended_are_no_longer_exposed(registry: MetricsRegistry, metrics: PlannerMetrics) -> None:
    for worker in ("1", "2"):
        queued = QueuedRequests(sum_prefill_tokens=5)
        step = ForwardPassMetrics(FORWARD_PASS_VERSION, worker, 0, 1, 0.1, ScheduledRequests(), queued)
        metrics.observed(TickInput(now_s=1.0, fpm_observations=FpmObservations({(worker, 0): step})), GPUS)
    found = {name: value for name, value in values(registry).items() if name.startswith("engine_queued_prefill_tokens")}
    assert len(found) == 1
    assert all('worker_id="2"' in name and float(value) == 5 for name, value in found.items())


def test_reason_of_a_decision_is_the_only_state_that_is_one(registry: MetricsRegistry, metrics: PlannerMetrics) -> None:
    core = PlannerCore(parse({}), WorkerCapabilities())
    metrics.decided(core.tick(core.first_tick(0.0), TickInput(now_s=5.0)), 5.0)
    found = {name: value for name, value in values(registry).items() if name.startswith("load_scaling_decision")}
    assert len(found) == len(LoadReason)
    assert [name for name, value in found.items() if float(value) == 1] == [
        'load_scaling_decision{dynamo_planner_load_scaling_decision="no_fpm_data"}'
    ]


def test_missed_ticks_and_failures_are_counted(registry: MetricsRegistry, metrics: PlannerMetrics) -> None:
    metrics.missed(3)
    metrics.failed("scale")
    found = values(registry)
    assert (float(found["ticks_missed_total"]), float(found['failures_total{operation="scale"}'])) == (3, 1)


def test_power_is_that_of_ready_workers_and_absent_while_a_limit_is_unknown(registry: MetricsRegistry) -> None:
    config = {"environment": "kubernetes", "enable_power_awareness": True, "total_gpu_power_limit": 10_000}
    metrics = PlannerMetrics(registry, parse(config))
    seen = TickInput(now_s=1.0, worker_counts=WorkerCounts(ready_num_prefill=1, ready_num_decode=2))
    metrics.observed(seen, GPUS, {PREFILL: 1000, DECODE: None})
    assert float(values(registry)["power_budget_total_watts"]) == 0
    metrics.observed(seen, GPUS, {PREFILL: 1000, DECODE: 2000})
    found = values(registry)
    names = ("power_budget_total_watts", "power_projected_watts", "power_budget_utilization")
    assert [float(found[name]) for name in names] == [10_000, 5000, 0.5]


def test_value_that_a_tick_did_not_compute_keeps_its_last_one(
    registry: MetricsRegistry, metrics: PlannerMetrics
) -> None:
    core = PlannerCore(parse({}), WorkerCapabilities())
    scheduled = core.first_tick(0.0)
    decision = core.tick(scheduled, TickInput(now_s=5.0))
    metrics.decided(replace(decision, load=replace(decision.load, estimated_itl_ms=7.0)), 5.0, scheduled)
    metrics.decided(decision, 5.0, replace(scheduled, run_load_scaling=False))
    found = values(registry)
    assert float(found["estimated_itl_ms"]) == 7
    assert float(found['load_scaling_decision{dynamo_planner_load_scaling_decision="no_fpm_data"}']) == 1
