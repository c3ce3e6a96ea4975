"""Dashboards: the committed files are those of the table, and every query names metrics and labels that exist.

Every property exists in the types of Grafana's own SDK, which read and write it unchanged.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard as grafana
from tools.dashboard_table import DASHBOARDS, Dashboard, Panel
from tools.dashboards import content, labels_of, metrics_of, path_of, rendered
from tools.metrics_page import recorded

plugins.register_default_plugins()
OF_PROMETHEUS = {"le", "instance", "job"}
BY_NAME = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.name)


def panels(dashboard: Dashboard) -> list[Panel]:
    return [panel for row in dashboard.rows for panel in row.panels]


@BY_NAME
def test_committed_file_is_written_from_the_table(dashboard: Dashboard) -> None:
    assert path_of(dashboard).read_text(encoding="utf-8") == content(dashboard), "run python -m tools.dashboards"


@BY_NAME
def test_queries_name_metrics_that_are_declared_with_their_labels(dashboard: Dashboard) -> None:
    declared = {one.name: one for one in recorded()[0]}
    for panel in panels(dashboard):
        for query in panel.queries:
            names = metrics_of(query.expr)
            assert names, query.expr
            assert names <= declared.keys(), panel.title
            labels = {label for name in names for label in declared[name].labels} | OF_PROMETHEUS
            assert labels_of(query.expr) <= labels, panel.title


@BY_NAME
def test_rates_are_of_counters_and_levels_of_gauges(dashboard: Dashboard) -> None:
    kinds = {one.name: one.kind for one in recorded()[0]}
    for panel in panels(dashboard):
        for query in panel.queries:
            found = {kinds[name] for name in metrics_of(query.expr)}
            assert ("rate(" in query.expr) == (found <= {"counter", "histogram"}), f"{panel.title}: {query.expr}"


@BY_NAME
def test_panels_have_unique_titles_and_do_not_overlap(dashboard: Dashboard) -> None:
    assert max(Counter((row.title, one.title) for row in dashboard.rows for one in row.panels).values()) == 1
    cells: Counter[tuple[int, int]] = Counter()
    for panel in rendered(dashboard)["panels"]:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        cells.update(
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        )
    assert max(cells.values()) == 1


def test_identities_are_unique() -> None:
    assert max(Counter(json.loads(content(one))["uid"] for one in DASHBOARDS).values()) == 1


def test_names_in_queries_are_found() -> None:
    expr = 'sum by (le, dynamo_planner_reason) (rate(dynamo_x_seconds_bucket{model=~"$model", status!="a"}[5m])) / sum(vllm:y)'
    assert metrics_of(expr) == {"dynamo_x_seconds", "vllm:y"}
    assert labels_of(expr) == {"le", "dynamo_planner_reason", "model", "status"}


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the properties of `ours` that `theirs` lacks or changes; `theirs` may have more, which are defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name in theirs:
                yield from differences(value, theirs[name], f"{path}.{name}")
            else:
                yield f"{path}.{name} does not exist"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} is read as {theirs!r}"


def reread(written: dict[str, Any]) -> Any:
    """Return a dashboard as Grafana's types read and write it."""
    return json.loads(encoder.JSONEncoder().encode(grafana.Dashboard.from_json(written)))


@BY_NAME
def test_every_property_exists_in_grafana(dashboard: Dashboard) -> None:
    written = rendered(dashboard)
    assert list(differences(written, reread(written))) == []


def test_misspelled_properties_are_found() -> None:
    written = rendered(DASHBOARDS[0])
    panel = written["panels"][1]
    panel["titel"] = panel["options"]["colour"] = panel["targets"][0]["expression"] = "x"
    assert len(list(differences(written, reread(written)))) == 3
