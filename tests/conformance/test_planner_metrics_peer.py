"""Planner metrics compared with the released planner's: names, types, labels, states and buckets, and the values that plugins cause.

Ours has more: states of reasons that the released enums lack, `failures_total` and `ticks_missed_total`. The circuit state is exposed for
every plugin, in the released planner only for those that were called or held since the start. The series `_created` of the released
client library are not exposed.
"""

import math
import random
import re
from typing import Any

import pytest
from tests.conformance.planner_cases import released
from tests.conformance.test_planner_pipeline_peer import may_hold_final, ours, pipeline_case

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.plugin_metrics import PluginMetrics

pytestmark = pytest.mark.conformance

OWN = {"failures_total", "ticks_missed_total"}
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


def exposed(registry: MetricsRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples of the Prometheus text."""
    found = {}
    for line in registry.render().splitlines():
        matched = SAMPLE.match(line)
        if line.startswith("#") or matched is None:
            continue
        name, labels, value = matched.groups()
        found[name, tuple(sorted(LABEL.findall(labels or "")))] = float(value)
    return found


def test_families_have_the_released_names_types_labels_and_buckets() -> None:
    registry = MetricsRegistry()
    PlannerMetrics(registry, parse({}))
    plugins = PluginMetrics(registry)
    plugins.finished(0.0, 1.0)
    plugins.called("p", "propose", 0.0)
    (theirs,) = released("metrics", [{}])
    families = {family.name: family for family in registry.families}
    assert {name for name in families if name.startswith("dynamo_planner_")} - theirs.keys() == {
        "dynamo_planner_" + name for name in OWN
    }
    for name, family in theirs.items():
        own = families[name]
        assert (own.kind, sorted(own.label_names)) == (family["type"], family["labels"]), name
        if "bounds" in family:
            bounds = re.findall(rf'^{name}_bucket{{.*le="([^"]+)"', registry.render(), re.MULTILINE)
            assert [float(one) for one in bounds] == [*family["bounds"], math.inf], name


def test_reasons_are_the_released_states_in_their_order_before_our_own() -> None:
    (theirs,) = released("metrics", [{}])
    for kind, name in ((LoadReason, "load_scaling_decision"), (ThroughputReason, "throughput_scaling_decision")):
        states = theirs["dynamo_planner_" + name]["states"]
        assert [one.value for one in kind][: len(states)] == states


def test_plugins_cause_the_released_values() -> None:
    rng = random.Random(4)
    given = [case for case in (pipeline_case(rng) for _ in range(600)) if not may_hold_final(case)]
    names: set[str] = set()
    for case, expected in zip(given, released("pipeline_metrics", given), strict=True):
        registry = MetricsRegistry()
        ours(case, PluginMetrics(registry))
        found = exposed(registry)
        for name, labels, value in expected:
            if "latency_seconds" in name or "duration_seconds" in name:
                continue  # Time of the run.
            names.add(name)
            assert found.pop((name, tuple(tuple(one) for one in labels))) == value, (name, labels, case)
        rest: list[Any] = [key for key in found if "duration_seconds" not in key[0] and "circuit_state" not in key[0]]
        assert not [key for key in rest if found[key]], (rest, case)
    assert {"dynamo_planner_plugin_evaluations_total", "dynamo_planner_constrain_capped_total"} <= names
    assert {"dynamo_planner_plugin_override_active", "dynamo_planner_tick_skipped_total"} <= names
