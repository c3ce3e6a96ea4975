"""Planner metrics: released names, enums as one series per state, and unknown values as NaN."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.planner.start import prepare_start
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import EngineCapabilities, FpmObservations, TickInput, TrafficObservation, WorkerCounts

CONFIG = parse({"environment": "virtual", "mode": "agg", "load_adjustment_interval": 1})


def values(registry: MetricsRegistry) -> dict[tuple[str, ...], float]:
    """Return every sample by its name and label values."""
    return {
        (sample.name.removeprefix("dynamo_planner_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(registry.render())
        for sample in family.samples
    }


def seen(now_s: float, workers: int) -> TickInput:
    step = ForwardPassMetrics(
        1, "7", 0, 1, 0.1, ScheduledRequests(sum_decode_kv_tokens=5), QueuedRequests(sum_prefill_tokens=9)
    )
    return TickInput(
        now_s=now_s,
        worker_counts=WorkerCounts(ready_num_decode=workers, expected_num_decode=workers),
        fpm_observations=FpmObservations(decode={("7", 0): step}),
    )


def test_workers_and_their_gpu_hours_are_counted() -> None:
    registry = MetricsRegistry()
    metrics = PlannerMetrics(registry, CONFIG)
    metrics.observed(seen(0.0, 2), {"decode": 4})
    metrics.observed(seen(1800.0, 2), {"decode": 4})
    found = values(registry)
    assert (found["num_decode_replicas",], found["gpu_hours",]) == (2.0, 4.0)
    assert found["engine_queued_prefill_tokens", "7", "0"] == 9.0
    assert found["engine_inflight_decode_kv_tokens", "7", "0"] == 5.0


def test_unknown_traffic_is_not_a_number() -> None:
    registry = MetricsRegistry()
    metrics = PlannerMetrics(registry, CONFIG)
    metrics.traffic(ObservedTraffic(traffic=TrafficObservation(duration_s=10, num_req=50, isl=3, osl=2), ttft_ms=80.0))
    assert values(registry)["observed_requests_per_second",] == 5.0
    assert values(registry)["observed_ttft_ms",] == pytest.approx(80.0)
    metrics.traffic(ObservedTraffic(unknown="no frontend"))
    assert math.isnan(values(registry)["observed_requests_per_second",])


def test_reason_of_a_decision_is_the_only_state_that_is_set() -> None:
    registry = MetricsRegistry()
    metrics = PlannerMetrics(registry, CONFIG)
    core = prepare_start(CONFIG, WorkerCapabilities(decode=EngineCapabilities(num_gpu=1))).planner()
    scheduled = core.first_tick(0.0)
    counts = WorkerCounts(ready_num_decode=1, expected_num_decode=1)
    metrics.decided(core.tick(scheduled, TickInput(now_s=scheduled.at_s, worker_counts=counts)), 10.0)
    states = {key: value for key, value in values(registry).items() if key[0] == "load_scaling_decision"}
    assert [key[1] for key, value in states.items() if value == 1] == ["no_fpm_data"]
    assert ("load_scaling_decision", "gpu_budget_reconcile") in states
