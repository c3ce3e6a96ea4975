"""Plugin metrics: results, held overrides, circuits, and plugins that leave."""

import pytest

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.pipeline import PluginCall, PluginPipeline, PluginSpec, drive
from dynamo.planner.plugin_metrics import PluginMetrics
from dynamo.planner.plugins.types import (
    ComponentTarget,
    ConstrainStageResponse,
    HoldPolicy,
    OverrideResult,
    OverrideType,
    PipelineContext,
    StageResponse,
)

CAP = PluginSpec(
    plugin_id="cap",
    stage=PluginStage.CONSTRAIN,
    priority=1,
    execution_interval_s=10.0,
    hold_policy=HoldPolicy.HOLD_LAST,
)


@pytest.fixture
def registry() -> MetricsRegistry:
    return MetricsRegistry()


def values(registry: MetricsRegistry) -> dict[str, float]:
    lines = [line.removeprefix("dynamo_planner_") for line in registry.render().splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def capped(call: PluginCall) -> StageResponse:
    target = ComponentTarget(sub_component_type="decode", replicas=2, type=OverrideType.AT_MOST)
    return ConstrainStageResponse(override=OverrideResult(targets=[target]))


def failing(call: PluginCall) -> StageResponse:
    raise OSError("plugin is away")


def test_bound_is_counted_when_it_is_returned_and_while_it_is_held(registry: MetricsRegistry) -> None:
    pipeline, metrics = PluginPipeline([CAP]), PluginMetrics(registry)
    for now_s in (0.0, 5.0):
        outcome = drive(pipeline.run(PipelineContext(), {"decode": 3}, now_s), capped)
        metrics.tick(pipeline, outcome.stages, now_s)
    found = values(registry)
    assert found['plugin_evaluations_total{plugin_id="cap",stage="constrain",result="at_most"}'] == 1
    assert found['plugin_evaluations_total{plugin_id="cap",stage="constrain",result="held_over"}'] == 1
    assert found['constrain_capped_total{sub_component_type="decode",source="cap"}'] == 2
    assert found['plugin_cache_age_seconds{plugin_id="cap"}'] == 5
    assert found['plugin_override_active{plugin_id="cap",stage="constrain",override_type="AT_MOST"}'] == 1


def test_failures_open_the_circuit_and_an_unregistered_plugin_has_no_gauge(registry: MetricsRegistry) -> None:
    pipeline, metrics = PluginPipeline([CAP]), PluginMetrics(registry)
    for tick in range(5):
        outcome = drive(pipeline.run(PipelineContext(), {"decode": 3}, float(tick)), failing)
        metrics.tick(pipeline, outcome.stages, float(tick))
    found = values(registry)
    assert found['plugin_evaluations_total{plugin_id="cap",stage="constrain",result="error"}'] == 5
    assert found['plugin_circuit_state{plugin_id="cap"}'] == 1
    pipeline.unregister("cap")
    metrics.tick(pipeline, (), 6.0)
    assert 'plugin_circuit_state{plugin_id="cap"}' not in values(registry)


def test_tick_above_its_limit_is_a_timeout(registry: MetricsRegistry) -> None:
    metrics = PluginMetrics(registry)
    metrics.finished(1.0, 30.0)
    metrics.finished(31.0, 30.0)
    found = values(registry)
    assert (found["tick_duration_seconds_count"], found["tick_timeout_total"]) == (2, 1)
