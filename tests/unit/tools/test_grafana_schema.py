"""Dashboards in the types of Grafana's own SDK: every property exists there, and is written as it was read."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard as grafana
from tools.dashboard_table import DASHBOARDS, Dashboard
from tools.dashboards import rendered

plugins.register_default_plugins()
BY_NAME = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.name)


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
