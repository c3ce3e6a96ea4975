"""Charts of a report: a Plotly figure as plain data, and its HTML page (extra `planner`)."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.reports.snapshots import EngineLoad, TickSnapshot

COLUMNS = 2
ROW_HEIGHT = 330
GAP_X, GAP_Y = 0.08, 0.055
LOAD_COLORS = {
    "scale_up": "green",
    "scale_down": "blue",
    "scale_down_capped_by_throughput": "purple",
    "no_fpm_data": "gold",
    "scaling_in_progress": "orange",
    "worker_count_mismatch": "red",
    "insufficient_data": "pink",
    "disabled": "lightgray",
}
THROUGHPUT_COLORS = {
    "scale": "green",
    "set_lower_bound": "blue",
    "no_traffic_data": "gold",
    "predict_failed": "red",
    "model_not_ready": "orange",
    "partner_not_ready": "pink",
    "disabled": "lightgray",
}
MISSING = (
    "plotly is not installed: reports are written as logs only, without charts; pip install 'dynamo-serve[planner]'"
)

Trace = dict[str, Any]


def page(snapshots: Sequence[TickSnapshot], config: PlannerConfig, max_kv_tokens: int | None) -> str:
    """Return the HTML page of snapshots, at least one. Raise `ConfigError` without the extra."""
    try:
        from plotly import io
    except ModuleNotFoundError:
        raise ConfigError(MISSING) from None
    html: str = io.to_html(figure(snapshots, config, max_kv_tokens), include_plotlyjs=True, full_html=True)
    return html


def figure(snapshots: Sequence[TickSnapshot], config: PlannerConfig, max_kv_tokens: int | None) -> dict[str, Any]:
    """Return the figure: traces and layout."""
    times = [datetime.fromtimestamp(one.timestamp_s, UTC).isoformat() for one in snapshots]
    charts = _charts(snapshots, config, max_kv_tokens)
    rows = -(-len(charts) // COLUMNS)
    layout: dict[str, Any] = {
        "title": {"text": _summary(snapshots, config), "font": {"size": 14}, "y": 0.99, "yanchor": "top"},
        "height": rows * ROW_HEIGHT,
        "margin": {"t": 130},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.03},
        "annotations": [],
        "shapes": [],
    }
    data = []
    for index, chart in enumerate(charts):
        x_axis, y_axis = (f"{axis}{index + 1 if index else ''}" for axis in "xy")
        _add_axes(layout, index, rows, chart)
        for limit, text in chart.lines:
            layout["shapes"].append(_line(x_axis, y_axis, limit))
            layout["annotations"].append(_line_label(x_axis, y_axis, limit, text))
        data += [{"type": "scatter", "x": times, "xaxis": x_axis, "yaxis": y_axis, **one} for one in chart.traces]
    return {"data": data, "layout": layout}


class Chart:
    """One panel."""

    def __init__(
        self, title: str, traces: Iterable[Trace], lines: Iterable[tuple[float, str]] = (), *, roles: bool = False
    ) -> None:
        self.title = title
        self.traces = list(traces)
        self.lines = list(lines)
        self.has_roles = roles
        """Whether the two rows are roles."""


def _charts(snapshots: Sequence[TickSnapshot], config: PlannerConfig, max_kv_tokens: int | None) -> list[Chart]:
    def trace(name: str, field: str, **style: Any) -> Trace:
        return {"name": name, "y": [getattr(one, field) for one in snapshots], "mode": "lines", **style}

    dots, marks = {"line": {"dash": "dot"}, "connectgaps": True}, {"mode": "lines+markers"}
    ttft = [(config.ttft_ms, f"SLA ({config.ttft_ms:.0f}ms)")]
    itl = [(config.itl_ms, f"SLA ({config.itl_ms:.0f}ms)")]
    capacity = [(float(max_kv_tokens), f"KV Capacity ({max_kv_tokens:,})")] if max_kv_tokens else []
    return [
        Chart("Replica Counts", _replicas(snapshots)),
        Chart(
            "Request Rate (Observed vs Predicted)",
            [
                trace("Observed RPS", "observed_requests_per_second"),
                trace("Predicted RPS", "predicted_requests_per_second", **dots),
            ],
        ),
        Chart("Observed TTFT vs SLA", [trace("Observed TTFT", "observed_ttft_ms")], ttft),
        Chart("Observed ITL vs SLA", [trace("Observed ITL", "observed_itl_ms")], itl),
        Chart("Estimated TTFT vs SLA", [trace("Estimated TTFT", "estimated_ttft_ms", **marks)], ttft),
        Chart("Estimated ITL vs SLA", [trace("Estimated ITL", "estimated_itl_ms", **marks)], itl),
        Chart(
            "Prefill Engine Load (queued prefill tokens)",
            _ranks(snapshots, "prefill_engines", "P {} queued", lambda one: one.queued_prefill_tokens),
        ),
        Chart(
            "Decode Engine Load (queued + inflight decode KV tokens)",
            _ranks(
                snapshots,
                "decode_engines",
                "D {} total KV",
                lambda one: one.queued_decode_kv_tokens + one.inflight_decode_kv_tokens,
            ),
            capacity,
        ),
        Chart(
            "Engine Capacity (req/s)",
            [
                trace("Prefill Engine RPS", "engine_rps_prefill", connectgaps=True, **marks),
                trace("Decode Engine RPS", "engine_rps_decode", connectgaps=True, **marks),
            ],
        ),
        Chart(
            "Sequence Lengths (Observed vs Predicted)",
            [
                trace("Observed ISL", "observed_input_sequence_tokens"),
                trace("Predicted ISL", "predicted_input_sequence_tokens", **dots),
                trace("Observed OSL", "observed_output_sequence_tokens"),
                trace("Predicted OSL", "predicted_output_sequence_tokens", **dots),
            ],
        ),
        _decisions(snapshots, "Load Scaling Decisions", "load", ("Load", "Load Decision"), LOAD_COLORS),
        _decisions(
            snapshots,
            "Throughput Scaling Decisions",
            "throughput",
            ("TP", "Throughput Decision"),
            THROUGHPUT_COLORS,
        ),
        Chart("Cumulative GPU Hours", [trace("Cumulative GPU Hours", "gpu_hours", **marks)]),
    ]


def _replicas(snapshots: Sequence[TickSnapshot]) -> list[Trace]:
    def values(field: str) -> list[int | None]:
        return [getattr(one, field) for one in snapshots]

    roles = (("Prefill", "prefill"), ("Decode", "decode"))
    found: list[Trace] = [
        {"name": f"{name} Replicas", "y": values(f"num_{role}_replicas"), "mode": "lines+markers"}
        for name, role in roles
    ]
    for name, role in roles:
        targets = values(f"scale_to_{role}")
        if any(one is not None for one in targets):
            marker = {"symbol": "diamond", "size": 10}
            found.append({"name": f"Recommended {name} Replicas", "y": targets, "mode": "markers", "marker": marker})
    for name, role in roles:
        bounds = values(f"throughput_lower_bound_{role}")
        if any(one is not None and one > 1 for one in bounds):
            found.append({"name": f"{name} TP Lower Bound", "y": bounds, "mode": "lines", "line": {"dash": "dash"}})
    return found


def _ranks(snapshots: Sequence[TickSnapshot], field: str, name: str, load: Callable[[EngineLoad], int]) -> list[Trace]:
    """Return one trace for each rank that any snapshot has."""
    loads: list[dict[str, int]] = [{one.rank: load(one) for one in getattr(each, field)} for each in snapshots]
    return [
        {
            "name": name.format(rank),
            "y": [each.get(rank) for each in loads],
            "mode": "lines+markers",
            "showlegend": False,
        }
        for rank in sorted({rank for each in loads for rank in each})
    ]


def _decisions(
    snapshots: Sequence[TickSnapshot], title: str, kind: str, names: tuple[str, str], colors: dict[str, str]
) -> Chart:
    """Return the reason of each tick: a row for each role if the snapshots have reasons of roles."""
    fields = {role: f"{kind}_decision_reason_{role}" for role in ("prefill", "decode")}
    has_roles = any(getattr(one, field) is not None for one in snapshots for field in fields.values())
    rows = (
        [(2, fields["prefill"], f"{names[0]} (prefill)"), (1, fields["decode"], f"{names[0]} (decode)")]
        if has_roles
        else [(1, f"{kind}_decision_reason", names[1])]
    )
    traces = []
    for row, field, name in rows:
        reasons = [getattr(one, field) for one in snapshots]
        marker = {"color": [colors.get(one or "", "gray") for one in reasons], "size": 10, "symbol": "square"}
        traces.append(
            {
                "name": name,
                "y": [row] * len(snapshots),
                "text": reasons,
                "mode": "markers",
                "marker": marker,
                "hoverinfo": "text+x",
                "showlegend": False,
            }
        )
    return Chart(title, traces, roles=has_roles)


def _add_axes(layout: dict[str, Any], index: int, rows: int, chart: Chart) -> None:
    """Add the axes and the title of a panel; all panels have the same range of time."""
    row, column = divmod(index, COLUMNS)
    width, height = (1 - GAP_X * (COLUMNS - 1)) / COLUMNS, (1 - GAP_Y * (rows - 1)) / rows
    left, top = column * (width + GAP_X), 1 - row * (height + GAP_Y)
    number = str(index + 1) if index else ""
    layout[f"xaxis{number}"] = {"domain": [left, left + width], "anchor": f"y{number}", "type": "date"}
    if index:
        layout[f"xaxis{number}"]["matches"] = "x"
    layout[f"yaxis{number}"] = {"domain": [max(0.0, top - height), top], "anchor": f"x{number}"}
    if chart.has_roles:
        layout[f"yaxis{number}"] |= {"tickvals": [1, 2], "ticktext": ["decode", "prefill"], "range": [0.5, 2.5]}
    layout["annotations"].append(
        {
            "text": chart.title,
            "x": left + width / 2,
            "y": top,
            "xref": "paper",
            "yref": "paper",
            "xanchor": "center",
            "yanchor": "bottom",
            "showarrow": False,
        }
    )


def _line(x_axis: str, y_axis: str, value: float) -> dict[str, Any]:
    line = {"color": "red", "dash": "dash"}
    return {"type": "line", "xref": f"{x_axis} domain", "x0": 0, "x1": 1, "yref": y_axis, "y0": value, "y1": value, "line": line}  # fmt: skip


def _line_label(x_axis: str, y_axis: str, value: float, text: str) -> dict[str, Any]:
    return {"text": text, "xref": f"{x_axis} domain", "x": 1, "xanchor": "right", "yref": y_axis, "y": value, "yanchor": "bottom", "showarrow": False}  # fmt: skip


def _summary(snapshots: Sequence[TickSnapshot], config: PlannerConfig) -> str:
    first, last = (
        datetime.fromtimestamp(one.timestamp_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        for one in (snapshots[0], snapshots[-1])
    )
    return (
        "<b>Planner Diagnostics Report</b><br>"
        f"Time range: {first} — {last} ({len(snapshots)} ticks)<br>"
        f"Replica transitions: {transitions(snapshots)} | GPU hours: {snapshots[-1].gpu_hours:.2f}<br>"
        f"SLA targets: TTFT={config.ttft_ms:.0f}ms, ITL={config.itl_ms:.0f}ms"
    )


def transitions(snapshots: Sequence[TickSnapshot]) -> int:
    """Return how often a known number of replicas differs from the one known before."""
    known = [
        [value for value in (getattr(one, field) for one in snapshots) if value is not None]
        for field in ("num_prefill_replicas", "num_decode_replicas")
    ]
    return sum(before != after for values in known for before, after in pairwise(values))
