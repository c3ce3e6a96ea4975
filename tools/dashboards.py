"""Write the Grafana dashboards of `tools.dashboard_table` into deploy/observability/grafana.

python -m tools.dashboards
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tools.dashboard_table import DASHBOARDS, Dashboard, Panel, Variable
from tools.pages import ROOT

FOLDER = ROOT / "deploy" / "observability" / "grafana"
SCHEMA = 39
"""Schema version of Grafana 11; later releases convert it when they load it."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, PANEL_HEIGHT, STAT_HEIGHT = 24, 8, 4
METRIC = re.compile(r"\b((?:dynamo|kvbm|trtllm)_\w+|vllm:\w+)\b")
NAMES_OF_LABELS = re.compile(r"\bby \(([^)]*)\)|\b(\w+)\s*(?:=~|!~|!=|=)\s*\"")


def main() -> int:
    """Rewrite the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        path = path_of(dashboard)
        path.write_text(content(dashboard), encoding="utf-8")
    print(f"dashboards.py: {len(DASHBOARDS)} dashboards")
    return 0


def path_of(dashboard: Dashboard) -> Path:
    """Return the file of a dashboard."""
    return FOLDER / f"{dashboard.name}.json"


def content(dashboard: Dashboard) -> str:
    """Return the file's content."""
    return json.dumps(rendered(dashboard), indent=1, ensure_ascii=False) + "\n"


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard in Grafana's model."""
    return {
        "uid": f"dynamo-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["dynamo"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["dynamo"], "title": "Dynamo", "asDropdown": True, "keepTime": True}],
        "templating": {"list": [data_source(), *map(variable, dashboard.variables)]},
        "panels": panels(dashboard),
    }


def data_source() -> dict[str, Any]:
    """Return the variable that selects the Prometheus server."""
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def variable(one: Variable) -> dict[str, Any]:
    """Return a variable whose values are those of a label."""
    return {
        "name": one.name,
        "label": one.label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": one.query, "refId": one.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Return the rows and their panels, placed from left to right."""
    found: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": place(0, top, COLUMNS, 1),
            }
        )
        top, left, height = top + 1, 0, 0
        for one in row.panels:
            if left + one.width > COLUMNS:
                top, left = top + height, 0
            height = STAT_HEIGHT if one.kind == "stat" else PANEL_HEIGHT
            found.append(drawn(one, len(found) + 1, place(left, top, one.width, height)))
            left += one.width
        top += height
    return found


def place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    """Return the place of a panel in Grafana's grid of 24 columns."""
    return {"x": left, "y": top, "w": width, "h": height}


def drawn(one: Panel, number: int, where: dict[str, int]) -> dict[str, Any]:
    """Return a panel."""
    defaults: dict[str, Any] = {"unit": one.unit, "min": 0}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    if one.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
        options = {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["lastNotNull", "max"],
                "showLegend": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "range": True,
        }
        for index, query in enumerate(one.queries)
    ]
    return {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "description": one.description,
        "datasource": DATASOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def metrics_of(expr: str) -> set[str]:
    """Return the metric families that a query names: a histogram without `_bucket`, `_sum` and `_count`."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in METRIC.findall(without_labels(expr))}


def labels_of(expr: str) -> set[str]:
    """Return the labels that a query groups by or selects."""
    found: set[str] = set()
    for grouped, selected in NAMES_OF_LABELS.findall(expr):
        found |= {name.strip() for name in grouped.split(",")} if grouped else {selected}
    return found - {""}


def without_labels(expr: str) -> str:
    """Return a query without the labels that it groups by, some of which are named as metrics are."""
    return re.sub(r"\bby \([^)]*\)|\{[^}]*\}", "", expr)


if __name__ == "__main__":
    sys.exit(main())
