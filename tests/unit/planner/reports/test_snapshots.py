"""Snapshots: bounds of the history, and rows of the log."""

import math
from datetime import UTC, datetime

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.planner.reports.snapshots import (
    EngineLoad,
    SnapshotHistory,
    TickSnapshot,
    is_reported,
    log_rows,
    snapshot_of,
)
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import FpmObservations, TickInput, TrafficObservation, WorkerCounts


def test_history_removes_the_oldest_snapshots_and_their_engines_first() -> None:
    history = SnapshotHistory(snapshots_max=3, engines_max=2)
    for tick in range(5):
        history.add(TickSnapshot(timestamp_s=float(tick), decode_engines=[EngineLoad(worker_id="1")]))
    kept = history.all()
    assert [one.timestamp_s for one in kept] == [2, 3, 4]
    assert [len(one.decode_engines) for one in kept] == [0, 1, 1]
    history.clear()
    assert len(history) == 0


def test_snapshot_has_observations_reasons_and_engines_of_a_tick() -> None:
    config = parse({"environment": "virtual", "mode": "agg"})
    core = PlannerCore(config, WorkerCapabilities())
    step = ForwardPassMetrics(
        FORWARD_PASS_VERSION, "7", 0, 1, 0.1, ScheduledRequests(), QueuedRequests(sum_prefill_tokens=5)
    )
    seen = TickInput(
        now_s=5.0,
        worker_counts=WorkerCounts(ready_num_decode=2),
        fpm_observations=FpmObservations(decode={("7", 0): step}),
    )
    scheduled = core.first_tick(0.0)
    decision = core.tick(scheduled, seen)
    traffic = ObservedTraffic(traffic=TrafficObservation(duration_s=5, num_req=10, isl=3, osl=4), ttft_ms=9)
    found = snapshot_of(config, seen, decision, traffic, time_s=100.0, gpu_hours=1.5)
    assert is_reported(scheduled, decision)
    assert (found.timestamp_s, found.num_decode_replicas, found.observed_requests_per_second) == (100.0, 2, 2)
    assert (found.load_decision_reason, found.throughput_lower_bound_decode) == (decision.load.reason.value, None)
    assert found.decode_engines[0].queued_prefill_tokens == 5


def test_number_that_is_not_finite_is_null_in_the_log() -> None:
    rows = log_rows(parse({}), [TickSnapshot(observed_itl_ms=math.nan)], "r.html", datetime(2026, 1, 1, tzinfo=UTC))
    assert (rows[0]["kind"], rows[0]["num_snapshots"], rows[1]["observed_itl_ms"]) == ("metadata", 1, None)
