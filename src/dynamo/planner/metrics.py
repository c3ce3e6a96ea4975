"""Metrics of the planner, under the names of the released one."""

import enum
import math
from collections.abc import Mapping

from dynamo.core.metrics import Family, Gauge, MetricsRegistry
from dynamo.planner.config.planner_config import Mode, PlannerConfig
from dynamo.planner.core.engine import TickDecision
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.planner.plugins.types import PredictionData
from dynamo.protocols.planner import FpmObservations, ScheduledTick, TickInput, WorkerCounts

PREFIX = "dynamo_planner_"
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
    "power_budget_total_watts": "Limit of the watts of all workers; 0 without a power budget",
    "power_projected_watts": "Watts of the ready workers at their power limits",
    "power_budget_utilization": "Projected watts divided by the limit",
}
ENGINE_GAUGES = {
    "engine_queued_prefill_tokens": "Prompt tokens in the queue of a rank",
    "engine_queued_decode_kv_tokens": "KV tokens of the preempted requests of a rank",
    "engine_inflight_decode_kv_tokens": "KV tokens of the decode requests of a rank",
}


class PlannerMetrics:
    """Gauges of the planner's observations and decisions; observed traffic that is unknown is NaN."""

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
        self._missed = registry.counter(
            PREFIX + "ticks_missed_total", "Due times that passed without a tick; not upstream's"
        ).labels()
        self._failures = registry.counter(
            PREFIX + "failures_total", "Observations and scale requests that failed", ("operation",)
        )
        self._gauges["sla_target_ttft_ms"].set(config.ttft_ms)
        self._gauges["sla_target_itl_ms"].set(config.itl_ms)
        self._mode = config.mode
        self._power_limit = config.total_gpu_power_limit if config.enable_power_awareness else None
        self._last_s: float | None = None

    @property
    def gpu_hours(self) -> float:
        """GPU hours of the ready workers since the planner started."""
        return self._gauges["gpu_hours"].value

    def observed(self, seen: TickInput, gpus: Mapping[str, int], watts: Mapping[str, int | None] | None = None) -> None:
        """Record the workers and their load at a tick; `gpus` and `watts` are those of one worker by role."""
        if seen.worker_counts is not None:
            self._count(seen.worker_counts, seen.now_s, gpus)
            self._record_power(seen.worker_counts, watts or {})
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

    def decided(self, decision: TickDecision, interval_s: float, scheduled: ScheduledTick | None = None) -> None:
        """Record a decision; `interval_s` is the window of the predicted number of requests.

        A value that this tick did not compute, and the reason of a method that was not due, keep their last value.
        """
        if scheduled is None or scheduled.run_load_scaling:
            self._load.set(decision.load.reason)
        if scheduled is None or scheduled.run_throughput_scaling:
            self._throughput.set(decision.throughput.reason)
        self._update("estimated_ttft_ms", decision.load.estimated_ttft_ms)
        self._update("estimated_itl_ms", decision.load.estimated_itl_ms)
        self._update("engine_prefill_capacity_requests_per_second", decision.throughput.engine_rps_prefill)
        self._update("engine_decode_capacity_requests_per_second", decision.throughput.engine_rps_decode)
        if decision.predictions is not None:
            self._predicted(decision.predictions, interval_s)
        if decision.scale_to is not None:
            for name, number in (("prefill", decision.scale_to.num_prefill), ("decode", decision.scale_to.num_decode)):
                if number is not None:
                    self._set(f"predicted_num_{name}_replicas", number)

    def missed(self, ticks: int) -> None:
        """Count the due times that passed without a tick."""
        self._missed.inc(ticks)

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

    def _record_power(self, counts: WorkerCounts, watts: Mapping[str, int | None]) -> None:
        """Record the projected watts; without the watts of a scaled role, nothing."""
        ready = {PREFILL: counts.ready_num_prefill, DECODE: counts.ready_num_decode}
        scaled = {PREFILL: self._mode.scales_prefill, DECODE: self._mode.scales_decode}
        if not self._power_limit or any(scaled[role] and watts.get(role) is None for role in scaled):
            return
        projected = sum((ready[role] or 0) * (watts.get(role) or 0) for role in ready)
        self._set("power_budget_total_watts", self._power_limit)
        self._set("power_projected_watts", projected)
        self._set("power_budget_utilization", projected / self._power_limit)

    def _record_engines(self, steps: FpmObservations) -> None:
        queued, queued_kv, active_kv = self._engines.values()
        for family in self._engines.values():
            family.remove()
        is_aggregated = self._mode is Mode.AGG
        for (worker_id, rank), step in (*steps.prefill.items(), *(steps.decode.items() if is_aggregated else ())):
            queued.labels(worker_id=worker_id, dp_rank=str(rank)).set(step.queued_requests.sum_prefill_tokens)
        for (worker_id, rank), step in steps.decode.items():
            labels = {"worker_id": worker_id, "dp_rank": str(rank)}
            queued_kv.labels(**labels).set(step.queued_requests.sum_decode_kv_tokens)
            active_kv.labels(**labels).set(step.scheduled_requests.sum_decode_kv_tokens)

    def _predicted(self, found: PredictionData, interval_s: float) -> None:
        requests = found.predicted_num_req
        self._update("predicted_requests_per_second", None if requests is None else requests / interval_s)
        self._update("predicted_input_sequence_tokens", found.predicted_isl)
        self._update("predicted_output_sequence_tokens", found.predicted_osl)

    def _update(self, name: str, value: float | None) -> None:
        """Set a gauge if there is a value."""
        if value is not None:
            self._gauges[name].set(value)

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
