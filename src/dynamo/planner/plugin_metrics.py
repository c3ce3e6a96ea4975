"""Metrics of the plugin pipeline, under the names and labels of the released planner."""

from collections.abc import Iterable

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.merge import PluginResult
from dynamo.planner.core.pipeline import ActivityKind, PluginActivity, PluginPipeline, StageRecord
from dynamo.planner.plugins.types import AcceptResult, CircuitState, OverrideResult, RejectResult

PREFIX = "dynamo_planner_"
LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
OVERRIDE_TYPES = ("SET", "AT_LEAST", "AT_MOST", "REJECT")
CIRCUIT_VALUES = {CircuitState.CLOSED: 0.0, CircuitState.HALF_OPEN: 0.5, CircuitState.OPEN: 1.0}


class PluginMetrics:
    """Counters and gauges of one planner's pipeline. Plugins that have left have no gauges."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._plugin_evaluations = registry.counter(
            PREFIX + "plugin_evaluations_total", "Calls of plugins by result", ("plugin_id", "stage", "result")
        )
        self._plugin_held_over = registry.counter(
            PREFIX + "plugin_held_over_total",
            "Ticks in which a plugin's last override took part",
            ("plugin_id", "stage"),
        )
        self._reconcile_clamped = registry.counter(
            PREFIX + "reconcile_clamped_total",
            "Numbers that a bound of the stage RECONCILE changed, by the plugin of the bound",
            ("sub_component_type", "source"),
        )
        self._constrain_capped = registry.counter(
            PREFIX + "constrain_capped_total",
            "Numbers that a bound of the stage CONSTRAIN changed, by the plugin of the bound",
            ("sub_component_type", "source"),
        )
        self._reject_short_circuited = registry.counter(
            PREFIX + "reject_short_circuited_total", "Ticks that a plugin rejected", ("plugin_id",)
        )
        self._tick_skipped = registry.counter(
            PREFIX + "tick_skipped_total", "Ticks at which a plugin's interval had not passed", ("plugin_id",)
        )
        self._tick_requires_unsatisfied = registry.counter(
            PREFIX + "tick_requires_unsatisfied_total",
            "Ticks at which a plugin was not called because a required field was not set",
            ("plugin_id", "missing_field"),
        )
        self._plugin_circuit_state = registry.gauge(
            PREFIX + "plugin_circuit_state",
            "Circuit breaker of a plugin: 0 closed, 0.5 half open, 1 open",
            ("plugin_id",),
        )
        self._plugin_cache_age_seconds = registry.gauge(
            PREFIX + "plugin_cache_age_seconds",
            "Age of the last override of a plugin when it took part",
            ("plugin_id",),
        )
        self._plugin_override_active = registry.gauge(
            PREFIX + "plugin_override_active",
            "1 if the plugin returned a target of this type (or REJECT) at the last tick",
            ("plugin_id", "stage", "override_type"),
        )
        self._tick_lag_seconds = registry.gauge(
            PREFIX + "tick_lag_seconds",
            "Delay of the last call of a plugin after the end of its interval",
            ("plugin_id",),
        )
        self._latency = registry.histogram(
            PREFIX + "plugin_latency_seconds",
            "Duration of successful calls of plugins",
            ("plugin_id", "stage"),
            LATENCY_BUCKETS,
        )
        self._duration = registry.histogram(
            PREFIX + "tick_duration_seconds", "Duration of the pipeline of a tick", (), DURATION_BUCKETS
        ).labels()
        self._timeouts = registry.counter(
            PREFIX + "tick_timeout_total", "Ticks that took longer than tick_max_duration_seconds"
        ).labels()
        self._present: set[str] = set()

    def called(self, plugin_id: str, stage: str, seconds: float) -> None:
        """Record the duration of a successful call of a plugin that is not built in."""
        self._latency.labels(plugin_id=plugin_id, stage=stage).observe(seconds)

    def finished(self, duration_s: float, limit_s: float) -> None:
        """Record the duration of the pipeline of a tick."""
        self._duration.observe(duration_s)
        if duration_s > limit_s:
            self._timeouts.inc()

    def tick(self, pipeline: PluginPipeline, stages: Iterable[StageRecord], now_s: float) -> None:
        """Record what the plugins did at a tick."""
        records = {one.stage: one for one in stages}
        self._remove_absent({one.plugin_id for one in pipeline.plugins})
        for one in pipeline.activity:
            self._record(one, records.get(one.stage))
        for record in records.values():
            self._record_stage(record)
        for plugin in pipeline.plugins:
            state = pipeline.circuit(plugin.plugin_id).state(now_s)
            self._plugin_circuit_state.labels(plugin_id=plugin.plugin_id).set(CIRCUIT_VALUES[state])

    def _remove_absent(self, present: set[str]) -> None:
        for plugin_id in self._present - present:
            for family in (
                self._plugin_circuit_state,
                self._plugin_cache_age_seconds,
                self._plugin_override_active,
                self._tick_lag_seconds,
            ):
                family.remove(plugin_id=plugin_id)
        self._present = present

    def _record(self, one: PluginActivity, record: StageRecord | None) -> None:
        plugin_id, stage = one.plugin_id, one.stage.value
        if one.kind is ActivityKind.IDLE:
            self._tick_skipped.labels(plugin_id=plugin_id).inc()
        elif one.kind is ActivityKind.UNSATISFIED:
            self._tick_requires_unsatisfied.labels(plugin_id=plugin_id, missing_field=one.missing).inc()
        elif one.kind is ActivityKind.DUE:
            self._tick_lag_seconds.labels(plugin_id=plugin_id).set(one.seconds)
        else:
            if one.kind is ActivityKind.HELD:
                self._plugin_held_over.labels(plugin_id=plugin_id, stage=stage).inc()
                self._plugin_cache_age_seconds.labels(plugin_id=plugin_id).set(one.seconds)
            result = result_label(one, () if record is None else record.results)
            self._plugin_evaluations.labels(plugin_id=plugin_id, stage=stage, result=result).inc()
            if one.stage is not PluginStage.PREDICT:
                self._reset_overrides(plugin_id, stage)

    def _reset_overrides(self, plugin_id: str, stage: str) -> None:
        for kind in OVERRIDE_TYPES:
            self._plugin_override_active.labels(plugin_id=plugin_id, stage=stage, override_type=kind).set(0)

    def _record_stage(self, record: StageRecord) -> None:
        stage = record.stage.value
        for one in record.results:
            for kind in override_types(one):
                self._plugin_override_active.labels(plugin_id=one.plugin_id, stage=stage, override_type=kind).set(1)
            if isinstance(one.result, RejectResult):
                self._reject_short_circuited.labels(plugin_id=one.plugin_id).inc()
        clamps = {PluginStage.RECONCILE: self._reconcile_clamped, PluginStage.CONSTRAIN: self._constrain_capped}
        if record.stage in clamps and record.outcome is not None:
            for clamp in record.outcome.clamped:
                clamps[record.stage].labels(
                    sub_component_type=clamp.component, source=clamp.plugin_id or "unknown"
                ).inc()


def override_types(one: PluginResult) -> set[str]:
    """Return the types of a result's targets; REJECT for a rejection."""
    if isinstance(one.result, RejectResult):
        return {"REJECT"}
    return {target.type.name for target in one.result.targets} if isinstance(one.result, OverrideResult) else set()


def result_label(one: PluginActivity, results: Iterable[PluginResult]) -> str:
    """Return the label `result` of an evaluation: the type of the first target, whatever the others are."""
    if one.kind is ActivityKind.HELD:
        return "held_over"
    if one.kind is ActivityKind.FAILED:
        return "error"
    if one.stage is PluginStage.PREDICT:
        return "accept"
    found = next((result.result for result in results if result.plugin_id == one.plugin_id), None)
    if isinstance(found, AcceptResult):
        return "accept"
    if isinstance(found, RejectResult):
        return "reject"
    if found is None:
        return "error"
    return found.targets[0].type.name.lower() if found.targets else "set"
