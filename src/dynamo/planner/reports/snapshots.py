"""Snapshots: one record for each tick with the field names of the released planner, and their bounded history. Pure."""

import math
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.engine import TickDecision
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import RankKey, ScheduledTick, TickInput

SCHEMA = "planner_diagnostics_snapshot_log_v1"
SNAPSHOTS_MAX = 50_000
ENGINES_MAX = 200_000
"""Engine rows of all snapshots together, some 40 MB; beyond it the oldest snapshots lose theirs."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Load of one rank at a tick."""

    worker_id: str = ""
    dp_rank: int = 0
    queued_prefill_tokens: int = 0
    queued_decode_kv_tokens: int = 0
    inflight_decode_kv_tokens: int = 0

    @property
    def rank(self) -> str:
        """Name in charts."""
        return f"{self.worker_id}:dp{self.dp_rank}"


class TickSnapshot(msgspec.Struct, kw_only=True):
    """One tick; None where nothing was observed or computed."""

    timestamp_s: float = 0.0
    num_prefill_replicas: int | None = None
    num_decode_replicas: int | None = None
    observed_ttft_ms: float | None = None
    observed_itl_ms: float | None = None
    observed_requests_per_second: float | None = None
    observed_request_duration_seconds: float | None = None
    observed_input_sequence_tokens: float | None = None
    observed_output_sequence_tokens: float | None = None
    observed_kv_hit_rate: float | None = None
    estimated_ttft_ms: float | None = None
    estimated_itl_ms: float | None = None
    predicted_requests_per_second: float | None = None
    predicted_input_sequence_tokens: float | None = None
    predicted_output_sequence_tokens: float | None = None
    predicted_kv_hit_rate: float | None = None
    engine_rps_prefill: float | None = None
    engine_rps_decode: float | None = None
    load_decision_reason: str | None = None
    throughput_decision_reason: str | None = None
    load_decision_reason_prefill: str | None = None
    load_decision_reason_decode: str | None = None
    throughput_decision_reason_prefill: str | None = None
    throughput_decision_reason_decode: str | None = None
    prefill_engines: list[EngineLoad] = []
    decode_engines: list[EngineLoad] = []
    throughput_lower_bound_prefill: int | None = None
    throughput_lower_bound_decode: int | None = None
    scale_to_prefill: int | None = None
    scale_to_decode: int | None = None
    gpu_hours: float = 0.0


def is_reported(scheduled: ScheduledTick, decision: TickDecision) -> bool:
    """Return whether a tick is part of a report: a scaling method was due, or something was decided or rejected."""
    return (
        scheduled.run_load_scaling
        or scheduled.run_throughput_scaling
        or decision.scale_to is not None
        or bool(decision.rejected_by)
    )


def snapshot_of(
    config: PlannerConfig,
    seen: TickInput,
    decision: TickDecision,
    observed: ObservedTraffic | None,
    *,
    time_s: float,
    gpu_hours: float,
) -> TickSnapshot:
    """Return the snapshot of a tick at a wall-clock time; `observed` is the traffic of the last window."""
    load, throughput, predictions = decision.load, decision.throughput, decision.predictions
    interval_s = float(config.throughput_adjustment_interval_seconds)
    traffic = None if observed is None else observed.traffic
    counts, steps = seen.worker_counts, seen.fpm_observations
    requests = None if predictions is None else predictions.predicted_num_req
    bounds: Mapping[str, int] = decision.lower_bounds if config.enable_throughput_scaling else {}
    return TickSnapshot(
        timestamp_s=time_s,
        num_prefill_replicas=None if counts is None else counts.ready_num_prefill,
        num_decode_replicas=None if counts is None else counts.ready_num_decode,
        observed_ttft_ms=None if observed is None else observed.ttft_ms,
        observed_itl_ms=None if observed is None else observed.itl_ms,
        observed_requests_per_second=None if traffic is None else traffic.num_req / traffic.duration_s,
        observed_request_duration_seconds=None if observed is None else observed.request_duration_s,
        observed_input_sequence_tokens=None if traffic is None else traffic.isl,
        observed_output_sequence_tokens=None if traffic is None else traffic.osl,
        observed_kv_hit_rate=None if traffic is None else traffic.kv_hit_rate,
        estimated_ttft_ms=load.estimated_ttft_ms,
        estimated_itl_ms=load.estimated_itl_ms,
        predicted_requests_per_second=None if requests is None else requests / interval_s,
        predicted_input_sequence_tokens=None if predictions is None else predictions.predicted_isl,
        predicted_output_sequence_tokens=None if predictions is None else predictions.predicted_osl,
        predicted_kv_hit_rate=None if predictions is None else predictions.predicted_kv_hit_rate,
        engine_rps_prefill=throughput.engine_rps_prefill,
        engine_rps_decode=throughput.engine_rps_decode,
        load_decision_reason=load.reason.value,
        throughput_decision_reason=throughput.reason.value,
        load_decision_reason_prefill=_set(load.reason_prefill),
        load_decision_reason_decode=_set(load.reason_decode),
        throughput_decision_reason_prefill=_set(throughput.reason_prefill),
        throughput_decision_reason_decode=_set(throughput.reason_decode),
        prefill_engines=[] if steps is None else engine_loads(steps.prefill),
        decode_engines=[] if steps is None else engine_loads(steps.decode),
        throughput_lower_bound_prefill=bounds.get(PREFILL),
        throughput_lower_bound_decode=bounds.get(DECODE),
        scale_to_prefill=None if decision.scale_to is None else decision.scale_to.num_prefill,
        scale_to_decode=None if decision.scale_to is None else decision.scale_to.num_decode,
        gpu_hours=gpu_hours,
    )


def engine_loads(steps: Mapping[RankKey, ForwardPassMetrics]) -> list[EngineLoad]:
    """Return the load of each rank."""
    return [
        EngineLoad(
            worker_id=worker_id,
            dp_rank=rank,
            queued_prefill_tokens=step.queued_requests.sum_prefill_tokens,
            queued_decode_kv_tokens=step.queued_requests.sum_decode_kv_tokens,
            inflight_decode_kv_tokens=step.scheduled_requests.sum_decode_kv_tokens,
        )
        for (worker_id, rank), step in steps.items()
    ]


def _set(reason: LoadReason | ThroughputReason) -> str | None:
    return None if reason.value == "unset" else reason.value


class SnapshotHistory:
    """The last snapshots. One owner."""

    def __init__(self, *, snapshots_max: int = SNAPSHOTS_MAX, engines_max: int = ENGINES_MAX) -> None:
        self._snapshots: deque[TickSnapshot] = deque()
        self._snapshots_max, self._engines_max = snapshots_max, engines_max
        self._with_engines: deque[TickSnapshot] = deque()
        self._engines = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def add(self, snapshot: TickSnapshot) -> None:
        """Add a snapshot; remove what is beyond the bounds."""
        self._snapshots.append(snapshot)
        self._with_engines.append(snapshot)
        self._engines += _engines_of(snapshot)
        while len(self._with_engines) > self._snapshots_max or self._engines > self._engines_max:
            oldest = self._with_engines.popleft()
            self._engines -= _engines_of(oldest)
            oldest.prefill_engines, oldest.decode_engines = [], []
        while len(self._snapshots) > self._snapshots_max:
            self._snapshots.popleft()

    def all(self) -> list[TickSnapshot]:
        """Return the snapshots, the newest last."""
        return list(self._snapshots)

    def clear(self) -> None:
        """Remove all snapshots."""
        self._snapshots.clear()
        self._with_engines.clear()
        self._engines = 0


def _engines_of(snapshot: TickSnapshot) -> int:
    return len(snapshot.prefill_engines) + len(snapshot.decode_engines)


def log_rows(
    config: PlannerConfig, snapshots: list[TickSnapshot], report_path: str, now: datetime
) -> list[dict[str, Any]]:
    """Return the rows of a report's log: metadata, then one for each snapshot. A number that is not finite is null."""
    metadata = {
        "schema": SCHEMA,
        "kind": "metadata",
        "generated_at_utc": now.isoformat(),
        "num_snapshots": len(snapshots),
        "html_report_path": report_path,
        "ttft_ms": config.ttft_ms,
        "itl_ms": config.itl_ms,
    }
    rows = [
        {
            **msgspec.to_builtins(one),
            "schema": SCHEMA,
            "kind": "snapshot",
            "timestamp_utc": datetime.fromtimestamp(one.timestamp_s, UTC).isoformat(),
        }
        for one in snapshots
    ]
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in (metadata, *rows)
    ]
