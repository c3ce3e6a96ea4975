"""Page: a report as one self-contained HTML file with plots."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.replay.comparison import ROWS, cell
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.report import percentile, rows_of
from dynamo.replay.timeline import Timeline

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 26, 12, 42
DECISIONS_SHOWN = 500  # Rows of the table of decisions: an hour of a decision every 7 s.
POINTS = 240  # Maximum points per line; screens cannot show more.
STYLE = """
:root{color-scheme:light dark;--line:#8884}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:0 0 .3rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:1.5rem;margin:1.5rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid var(--line)}td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto}svg text{font-size:15px;fill:currentColor}
.axis{stroke:currentColor;stroke-opacity:.5}.grid{stroke:currentColor;stroke-opacity:.12}
.key{font-size:13px}.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
"""

Points = Sequence[tuple[float, float]]


def page(outcomes: Mapping[str, RunOutcome], summaries: Mapping[str, dict[str, Any]]) -> str:
    """Return the HTML page of runs by name."""
    names = list(outcomes)
    plots = [
        plot("Time to first token: share of requests", _cdfs(outcomes, "ttft_ms"), "ms", is_log=True),
        plot("Inter token latency: share of requests", _cdfs(outcomes, "itl_ms"), "ms", is_log=True),
        plot("Running requests, all workers", _sums(outcomes, "running"), "s"),
        plot("Waiting requests, all workers", _sums(outcomes, "waiting"), "s"),
        plot("Cached prompt tokens, %", _hits(outcomes), "s"),
        plot("Output tokens per second", _rates(outcomes, "output_tokens"), "s"),
    ]
    replicas = {
        f"{name}: {what}": points for name, outcome in outcomes.items() for what, points in _replicas(outcome).items()
    }
    if replicas:
        plots.insert(0, plot("Replicas: ready, and with those that are starting", replicas, "s"))
    worker_counts = {name: _worker_counts(outcome) for name, outcome in outcomes.items() if outcome.planner is not None}
    if worker_counts:
        plots.insert(0, plot("Workers in service", worker_counts, "s"))
    for name in names:
        timeline = outcomes[name].timeline
        for level, title in (("running", "running requests"), ("used_blocks", "KV blocks in use")):
            lines = {f"worker {at}": _over_time(timeline, timeline.level(level, at)) for at in range(timeline.places)}
            plots.append(plot(f"{name}: {title}, by worker", lines, "s"))
    body = "".join(f"<section>{plot}</section>" for plot in plots)
    decisions = "".join(_decisions(name, outcome) for name, outcome in outcomes.items())
    return small_page(f"Replay: {', '.join(names)}", f"{_table(summaries)}<div class=plots>{body}</div>{decisions}")


def small_page(title: str, body: str) -> str:
    """Return a self-contained HTML page."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Replay</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )


def _table(summaries: Mapping[str, dict[str, Any]]) -> str:
    names = list(summaries)
    first = summaries[names[0]]
    lines = ["<tr><th>" + "".join(f"<th>{html.escape(name)}" for name in names)]
    for key, title, _ in ROWS:
        values = [(name, summaries[name].get(key)) for name in names]
        if any(value for _, value in values):
            base = first.get(key)
            cells = [
                "n/a" if value is None else cell(key, value, None if name == names[0] else base)
                for name, value in values
            ]
            lines.append(f"<tr><td>{title}" + "".join(f"<td>{text}" for text in cells))
    return f"<table>{''.join(lines)}</table>"


# Plotted data.


def _cdfs(outcomes: Mapping[str, RunOutcome], metric: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        values = sorted(value for row in rows_of(outcome.flights) if (value := getattr(row, metric)) is not None)
        if values:
            parts = [at / POINTS for at in range(POINTS + 1)]
            found[name] = [(max(percentile(values, part), 0.01), part) for part in parts]
    return found


def _sums(outcomes: Mapping[str, RunOutcome], level: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        timeline = outcome.timeline
        sums = [sum(values) for values in zip(*_all(timeline, level), strict=True)]
        found[name] = _over_time(timeline, sums)
    return found


def _worker_counts(outcome: RunOutcome) -> Points:
    """Return the number of workers in service over time."""
    assert outcome.planner is not None
    count, found = 0, list[tuple[float, float]]()
    for row in outcome.planner.lifecycle_operations:
        change = {"worker_ready": 1, "worker_draining": -1, "worker_failed": -1}.get(row["operation"], 0)
        if change and row["at_s"]:
            found.append((row["at_s"], float(count)))
        count += change
        if change:
            found.append((row["at_s"], float(count)))
    return [*found, (outcome.duration_ms / 1000, float(count))]


def _replicas(outcome: RunOutcome) -> dict[str, Points]:
    """Return ready and expected workers at the planner's ticks; empty for a run without worker counts."""
    ticks = [] if outcome.planner is None else [row for row in outcome.planner.ticks if row["worker_counts"]]
    found: dict[str, Points] = {}
    for kind in ("ready", "expected"):
        for role in ("prefill", "decode"):
            key = f"{kind}_num_{role}"
            points = [(row["at_s"], float(row["worker_counts"][key])) for row in ticks if row["worker_counts"][key]]
            if points:
                found[f"{kind} {role}"] = points
    return found


def _decisions(name: str, outcome: RunOutcome) -> str:
    """Return a table of the decisions that changed the number of workers, with their reasons."""
    if outcome.planner is None:
        return ""
    lines = list[str]()
    for row in outcome.planner.ticks:
        if row["scale_to"] is None or len(lines) >= DECISIONS_SHOWN:
            continue
        targets = ", ".join(f"{key[4:]} {count}" for key, count in row["scale_to"].items() if count is not None)
        lines.append(f"<tr><td>{row['at_s']:,.0f} s<td>{targets}<td>{html.escape(_reason(row['diagnostics']))}")
    if not lines:
        return ""
    title = html.escape(f"{name}: decisions")
    return f"<h2>{title}</h2><table><tr><th>time<th>target<th>reason{''.join(lines)}</table>"


def _reason(diagnostics: Mapping[str, Any]) -> str:
    """Return the reasons of a tick in words."""
    silent = {"unset", "disabled"}
    words = [
        str(diagnostics[key])
        for key in ("load_reason", "throughput_reason", "prefill", "decode")
        if key in diagnostics and diagnostics[key] not in silent
    ]
    forecast = diagnostics.get("forecast") or {}
    words += [one["detail"] for one in forecast.values() if one and one["detail"]]
    return "; ".join([*words, *diagnostics.get("clamped", ())])


def _all(timeline: Timeline, level: str) -> list[list[float]]:
    return [timeline.level(level, at) for at in range(timeline.places)]


def _counted(timeline: Timeline, name: str) -> list[int]:
    return [sum(values) for values in zip(*(timeline.counted(name, at) for at in range(timeline.places)), strict=True)]


def _hits(outcomes: Mapping[str, RunOutcome]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        timeline = outcome.timeline
        bins = max(1, math.ceil(timeline.length / 60))
        admitted, reused = (_binned(_counted(timeline, what), bins) for what in ("admitted_tokens", "reused_tokens"))
        seconds = timeline.interval_ms / 1000 * bins
        pairs = enumerate(zip(admitted, reused, strict=True))
        found[name] = [((at + 0.5) * seconds, 100 * hit / all_) for at, (all_, hit) in pairs if all_]
    return found


def _rates(outcomes: Mapping[str, RunOutcome], count: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        seconds = outcome.timeline.interval_ms / 1000
        found[name] = _over_time(outcome.timeline, [value / seconds for value in _counted(outcome.timeline, count)])
    return found


def _binned(values: Sequence[float], bins: int) -> list[float]:
    return [sum(values[at : at + bins]) for at in range(0, len(values), bins)]


def _over_time(timeline: Timeline, values: Sequence[float]) -> Points:
    bins = max(1, math.ceil(len(values) / POINTS))
    seconds = timeline.interval_ms / 1000 * bins
    sums = _binned(values, bins)
    last = len(values) - (len(sums) - 1) * bins
    return [((at + 0.5) * seconds, value / (last if at == len(sums) - 1 else bins)) for at, value in enumerate(sums)]


# Drawing.


def plot(title: str, lines: Mapping[str, Points], unit: str, *, is_log: bool = False) -> str:
    """Return an SVG plot of several lines."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return f"<h2>{html.escape(title)}</h2><p>no data"
    low = min(x for x, _ in points)
    high = max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    ticks = _powers(low, high) if is_log else round_steps(high)
    if is_log:
        low, high = min(low, ticks[0]), max(high, ticks[-1], low * 1.01)
    else:
        low, high = 0.0, high or 1.0

    def across(x: float) -> float:
        part = math.log(x / low) / math.log(high / low) if is_log else (x - low) / (high - low)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>"]
    for y in round_steps(top):
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={up(y):.1f} y2={up(y):.1f} />")
        parts.append(f"<text x={LEFT - 6} y={up(y) + 5:.1f} text-anchor=end>{short_number(y)}</text>")
    for x in ticks:
        parts.append(f"<line class=grid x1={across(x):.1f} x2={across(x):.1f} y1={TOP} y2={HEIGHT - BOTTOM} />")
        parts.append(f"<text x={across(x):.1f} y={HEIGHT - BOTTOM + 18} text-anchor=middle>{short_number(x)}</text>")
    parts.append(f"<text x={WIDTH - RIGHT} y={HEIGHT - 5} text-anchor=end>{unit}</text>")
    parts.append(f"<line class=axis x1={LEFT} x2={WIDTH - RIGHT} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />")
    for at, line in enumerate(lines.values()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        color = COLORS[at % len(COLORS)]
        parts.append(f"<polyline fill=none stroke={color} stroke-width=1.6 points='{path}' />")
    parts.append("</svg><div class=key>")
    for at, name in enumerate(lines):
        parts.append(f"<span><i style='background:{COLORS[at % len(COLORS)]}'></i>{html.escape(name)}</span>")
    parts.append("</div>")
    return "".join(parts)


def _powers(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def round_steps(high: float) -> list[float]:
    """Return about five round numbers from 0 on."""
    raw = high / 5
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    return [step * at for at in range(int(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """Return a number with k for thousands and M for millions."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"
