"""Metrics of the planner, under the names of the released one."""

import enum
import math
from collections.abc import Mapping

from dynamo.core.metrics import Family, Gauge, MetricsRegistry
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.engine import TickDecision
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.planner.plugins.types import PredictionData
from dynamo.protocols.planner import FpmObservations, TickInput, WorkerCounts

PREFIX = "dynamo_planner_"
DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
GAUGES = {
    "num_prefill_replicas": "Ready prefill workers",
    "num_decode_replicas": "Ready decode or aggregated workers",
    "observed_ttft_ms": "Mean time to first token of the last window in milliseconds",
    "observed_itl_ms": "Mean inter-token latency of the last window in milliseconds",
    "observed_requests_per_second": "Request rate of the last window",
    "observed_request_duration_seconds": "Mean request duration of the last window",
    "observed_input_sequence_tokens": "Mean prompt length of the last window in tokens",
    "observed_output_sequence_tokens": "Mean output length of the last window in tokens",
    "predicted_requests_per_second": "Predicted request rate of the next window",
    "predicted_input_sequence_tokens": "Predicted prompt length of the next window in tokens",
    "predicted_output_sequence_tokens": "Predicted output length of the next window in tokens",
    "predicted_num_prefill_replicas": "Prefill workers of the last decision",
    "predicted_num_decode_replicas": "Decode or aggregated workers of the last decision",
    "gpu_hours": "GPU hours of the ready workers since the planner started",
    "sla_target_ttft_ms": "Objective for the time to first token in milliseconds",
    "sla_target_itl_ms": "Objective for the inter-token latency in milliseconds",
    "estimated_ttft_ms": "Time to first token that load scaling estimates, in milliseconds",
    "estimated_itl_ms": "Inter-token latency that load scaling estimates, in milliseconds",
    "engine_prefill_capacity_requests_per_second": "Requests per second of one prefill worker within the objectives",
    "engine_decode_capacity_requests_per_second": "Requests per second of one decode worker within the objectives",
}
ENGINE_GAUGES = {
    "engine_queued_prefill_tokens": "Prompt tokens in the queue of a rank",
    "engine_queued_decode_kv_tokens": "KV tokens of the preempted requests of a rank",
    "engine_inflight_decode_kv_tokens": "KV tokens of the decode requests of a rank",
}


class PlannerMetrics:
    """Gauges of the planner's observations and decisions; a value that is unknown is NaN."""

    def __init__(self, registry: MetricsRegistry, config: PlannerConfig) -> None:
        self._gauges = {name: registry.gauge(PREFIX + name, text).labels() for name, text in GAUGES.items()}
        self._engines = {
            name: registry.gauge(PREFIX + name, text, ("worker_id", "dp_rank")) for name, text in ENGINE_GAUGES.items()
        }
        load, throughput = PREFIX + "load_scaling_decision", PREFIX + "throughput_scaling_decision"
        self._load = ReasonGauge(registry.gauge(load, "Reason of the last load decision", (load,)), load, LoadReason)
        self._throughput = ReasonGauge(
            registry.gauge(throughput, "Reason of the last throughput decision", (throughput,)),
            throughput,
            ThroughputReason,
        )
        self._duration = registry.histogram(
            PREFIX + "tick_duration_seconds", "Duration of ticks", (), DURATION_BUCKETS
        ).labels()
        self._lag = registry.gauge(PREFIX + "tick_lag_seconds", "Delay of the last tick after its due time").labels()
        self._timeouts = registry.counter(PREFIX + "tick_timeout_total", "Ticks that exceeded their time").labels()
        self._skipped = registry.counter(PREFIX + "tick_skipped_total", "Due times that passed without a tick").labels()
        self._rejected = registry.counter(
            PREFIX + "reject_short_circuited_total", "Ticks that a plugin rejected", ("plugin_id",)
        )
        self._failures = registry.counter(
            PREFIX + "failures_total", "Observations and scale requests that failed", ("operation",)
        )
        self._gauges["sla_target_ttft_ms"].set(config.ttft_ms)
        self._gauges["sla_target_itl_ms"].set(config.itl_ms)
        self._last_s: float | None = None

    def observed(self, seen: TickInput, gpus: Mapping[str, int]) -> None:
        """Record the workers and their load at a tick; `gpus` are those of one worker by role."""
        if seen.worker_counts is not None:
            self._count(seen.worker_counts, seen.now_s, gpus)
        if seen.fpm_observations is not None:
            self._record_engines(seen.fpm_observations)

    def traffic(self, observed: ObservedTraffic) -> None:
        """Record the traffic of a window."""
        traffic = observed.traffic
        self._set("observed_ttft_ms", observed.ttft_ms)
        self._set("observed_itl_ms", observed.itl_ms)
        self._set("observed_request_duration_seconds", observed.request_duration_s)
        self._set("observed_requests_per_second", None if traffic is None else traffic.num_req / traffic.duration_s)
        self._set("observed_input_sequence_tokens", None if traffic is None else traffic.isl)
        self._set("observed_output_sequence_tokens", None if traffic is None else traffic.osl)

    def decided(self, decision: TickDecision, interval_s: float) -> None:
        """Record a decision; `interval_s` is the window of the predicted number of requests."""
        self._load.set(decision.load.reason)
        self._throughput.set(decision.throughput.reason)
        self._set("estimated_ttft_ms", decision.load.estimated_ttft_ms)
        self._set("estimated_itl_ms", decision.load.estimated_itl_ms)
        self._set("engine_prefill_capacity_requests_per_second", decision.throughput.engine_rps_prefill)
        self._set("engine_decode_capacity_requests_per_second", decision.throughput.engine_rps_decode)
        if decision.predictions is not None:
            self._predicted(decision.predictions, interval_s)
        if decision.scale_to is not None:
            for name, number in (("prefill", decision.scale_to.num_prefill), ("decode", decision.scale_to.num_decode)):
                if number is not None:
                    self._set(f"predicted_num_{name}_replicas", number)
        if decision.rejected_by:
            self._rejected.labels(plugin_id=decision.rejected_by).inc()

    def finished(self, duration_s: float, lag_s: float, skipped: int) -> None:
        """Record the duration of a tick, its delay, and the ticks that were left out before it."""
        self._duration.observe(duration_s)
        self._lag.set(lag_s)
        self._skipped.inc(skipped)

    def timed_out(self) -> None:
        """Count a tick that exceeded its time."""
        self._timeouts.inc()

    def failed(self, operation: str) -> None:
        """Count an observation or scale request that failed."""
        self._failures.labels(operation=operation).inc()

    def _count(self, counts: WorkerCounts, now_s: float, gpus: Mapping[str, int]) -> None:
        prefill, decode = counts.ready_num_prefill, counts.ready_num_decode
        self._set("num_prefill_replicas", prefill or 0)
        self._set("num_decode_replicas", decode or 0)
        used = (prefill or 0) * gpus.get(PREFILL, 0) + (decode or 0) * gpus.get(DECODE, 0)
        if self._last_s is not None:
            self._gauges["gpu_hours"].inc(used * (now_s - self._last_s) / 3600)
        self._last_s = now_s

    def _record_engines(self, steps: FpmObservations) -> None:
        for family in self._engines.values():
            family.remove()
        for (worker_id, rank), step in (*steps.prefill.items(), *steps.decode.items()):
            labels = {"worker_id": worker_id, "dp_rank": str(rank)}
            values = (
                step.queued_requests.sum_prefill_tokens,
                step.queued_requests.sum_decode_kv_tokens,
                step.scheduled_requests.sum_decode_kv_tokens,
            )
            for family, value in zip(self._engines.values(), values, strict=True):
                family.labels(**labels).set(value)

    def _predicted(self, found: PredictionData, interval_s: float) -> None:
        requests = found.predicted_num_req
        self._set("predicted_requests_per_second", None if requests is None else requests / interval_s)
        self._set("predicted_input_sequence_tokens", found.predicted_isl)
        self._set("predicted_output_sequence_tokens", found.predicted_osl)

    def _set(self, name: str, value: float | None) -> None:
        self._gauges[name].set(math.nan if value is None else value)


class ReasonGauge:
    """A reason as a Prometheus enum: one series for each state, of which one is 1."""

    def __init__(self, family: Family[Gauge], label: str, states: type[enum.StrEnum]) -> None:
        self._series: dict[str, Gauge] = {state.value: family.labels(**{label: state.value}) for state in states}
        self.set(next(iter(states)))

    def set(self, state: enum.StrEnum) -> None:
        """Set the present state."""
        for name, gauge in self._series.items():
            gauge.set(1 if name == state.value else 0)
