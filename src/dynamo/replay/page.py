"""Page: a report as one self-contained HTML file: what was run, latencies against their objectives, plots over time."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.replay.charts import COLORS, Mark, Points, heat_map, plot
from dynamo.replay.comparison import ROWS, cell
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.report import NONE, Objectives, RequestRow, percentile, rows_of, statistics
from dynamo.replay.timeline import Timeline

DECISIONS_SHOWN = 500  # Rows of the table of decisions: an hour of a decision every 7 s.
POINTS = 240  # Maximum points per line; screens cannot show more.
HEAT_CELLS = 120  # Maximum cells per row of a heat map.
HEAT_ROWS = 128  # Maximum workers of a heat map.
PLOTTED_MAX = 4  # Runs whose workers are shown one by one.
LATENCIES = (("ttft_ms", "time to first token"), ("itl_ms", "inter token latency"), ("e2e_latency_ms", "latency"))
GREEN = "#059669"
STYLE = """
:root{color-scheme:light dark;--line:#8884}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:0 0 .3rem}section{min-width:0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));gap:1.5rem;margin:1.5rem 0}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid var(--line)}td:first-child,th:first-child{text-align:left}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;overflow-wrap:anywhere}dt{opacity:.7}dd{margin:0}
.met{color:#059669}.missed{color:#dc2626}
svg{width:100%;height:auto}svg text{font-size:15px;fill:currentColor}
.axis{stroke:currentColor;stroke-opacity:.5}.grid{stroke:currentColor;stroke-opacity:.12}
.mark{stroke-width:1.5;stroke-dasharray:4 3}
.key{font-size:13px}.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
@media(max-width:600px){body{margin:1rem auto}td,th{padding:.2rem .45rem}dl{grid-template-columns:1fr}dd{margin:0 0 .4rem}}
"""


def page(
    outcomes: Mapping[str, RunOutcome],
    summaries: Mapping[str, dict[str, Any]],
    described: Mapping[str, str] | None = None,
    objectives: Objectives = NONE,
) -> str:
    """Return the HTML page of runs by name. `described`: what was run; `objectives`: latency limits."""
    rows = {name: rows_of(outcome.flights) for name, outcome in outcomes.items()}
    marks = {name: _marks(outcome) for name, outcome in outcomes.items()}
    every = [mark for of in marks.values() for mark in of] if len(outcomes) == 1 else []
    limits = {
        "ttft_ms": _limit(objectives.ttft_ms),
        "itl_ms": _limit(objectives.itl_ms),
        "e2e_latency_ms": _limit(objectives.e2e_ms),
    }
    plots = [
        plot(f"{title.capitalize()}: share of requests", _cdfs(rows, metric), "ms", is_log=True, marks=limits[metric])
        for metric, title in LATENCIES
    ]
    plots += [
        plot("Running requests, all workers", _sums(outcomes, "running"), "s", marks=every),
        plot("Waiting requests in the workers' queues", _sums(outcomes, "waiting"), "s", marks=every),
        plot("Waiting requests in the router's queue", _router_queues(outcomes, rows), "s", marks=every),
        plot("Imbalance: requests of the busiest worker over the mean", _imbalances(outcomes), "s", marks=every),
        plot("Cached prompt tokens, %", _hits(outcomes), "s", marks=every),
        plot("Output tokens per second", _rates(outcomes, "output_tokens"), "s", marks=every),
    ]
    replicas = {
        f"{name}: {what}": points for name, outcome in outcomes.items() for what, points in _replicas(outcome).items()
    }
    if replicas:
        plots.insert(0, plot("Replicas: ready, and with those that are starting", replicas, "s", marks=every))
    worker_counts = {name: _worker_counts(outcome) for name, outcome in outcomes.items() if outcome.planner is not None}
    if worker_counts:
        plots.insert(0, plot("Workers in service", worker_counts, "s", marks=every))
    for name, outcome in list(outcomes.items())[:PLOTTED_MAX]:
        plots += _heat_maps(name, outcome, marks[name])
    body = "".join(f"<section>{plot}</section>" for plot in plots)
    decisions = "".join(_decisions(name, outcome) for name, outcome in outcomes.items())
    return small_page(
        f"Replay: {', '.join(outcomes)}",
        f"{_described(described or {})}{_latencies(rows, objectives)}{_table(summaries)}"
        f"{_events(marks)}<div class=plots>{body}</div>{decisions}",
    )


def small_page(title: str, body: str) -> str:
    """Return a self-contained HTML page."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>Replay</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )


def _described(described: Mapping[str, str]) -> str:
    """Return a list of what was run."""
    if not described:
        return ""
    items = "".join(f"<dt>{html.escape(key)}<dd>{html.escape(value)}" for key, value in described.items())
    return f"<dl>{items}</dl>"


def _latencies(rows: Mapping[str, Sequence[RequestRow]], objectives: Objectives) -> str:
    """Return a table of percentiles, with the share of requests that met each objective."""
    limits = (objectives.ttft_ms, objectives.itl_ms, objectives.e2e_ms)
    lines = ["<tr><th><th>p50<th>p90<th>p99<th>mean" + ("<th>objective<th>met" if objectives.are_any else "")]
    for name, of_run in rows.items():
        for (metric, title), limit in zip(LATENCIES, limits, strict=True):
            values = [value for row in of_run if (value := getattr(row, metric)) is not None]
            found = statistics(values)
            cells = [found[key] for key in ("median", "p90", "p99", "mean")]
            line = f"<tr><td>{html.escape(name)}: {title}, ms" + "".join(f"<td>{_number(value)}" for value in cells)
            if objectives.are_any:
                line += "<td><td>" if limit is None or not values else _met(values, limit)
            lines.append(line)
    return f"<div class=wide><table>{''.join(lines)}</table></div>"


def _met(values: Sequence[float], limit: float) -> str:
    """Return the cells of an objective: the limit, and the share of requests within it."""
    share = sum(value <= limit for value in values) / len(values)
    return f"<td>{limit:,g}<td class={'met' if share >= 0.99 else 'missed'}>{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.1f}"


def _limit(limit: float | None) -> list[Mark]:
    return [] if limit is None else [Mark(limit, f"objective: {limit:g} ms", GREEN)]


def _marks(outcome: RunOutcome) -> list[Mark]:
    """Return the failures, restarts and scaling decisions of a run, in the order of time."""
    found = [Mark(event.at_ms / 1000, event.title) for event in outcome.events]
    if outcome.planner is not None:
        found += [
            Mark(
                row["at_s"],
                f"{row['role']}: {row['from']} to {row['to']} workers",
                COLORS[3 if row["to"] < row["from"] else 2],
            )
            for row in outcome.planner.scaling_events
        ]
    return sorted(found)


def _events(marks: Mapping[str, Sequence[Mark]]) -> str:
    """Return a list of the failures and scaling decisions, which are vertical lines in the plots."""
    lines = [
        f"<tr><td>{html.escape(name)}<td>{mark.at:,.1f} s<td style='color:{mark.color}'>{html.escape(mark.title)}"
        for name, of_run in marks.items()
        for mark in of_run[:DECISIONS_SHOWN]
    ]
    if not lines:
        return ""
    title = f"{len(lines)} failures, restarts and scaling decisions (vertical lines)"
    return f"<details><summary>{title}</summary><div class=wide><table>{''.join(lines)}</table></div></details>"


def _heat_maps(name: str, outcome: RunOutcome, marks: Sequence[Mark]) -> list[str]:
    """Return maps of the requests and the used blocks of each worker over time."""
    timeline = outcome.timeline
    seconds = timeline.length * timeline.interval_ms / 1000
    bins = max(1, math.ceil(timeline.length / HEAT_CELLS))
    places = range(min(timeline.places, HEAT_ROWS))
    found = []
    for levels, title, unit in (
        (("running", "waiting"), "running and waiting requests", "requests"),
        (("used_blocks",), "KV blocks in use", "blocks"),
    ):
        rows = {
            f"{at}": [
                value / bins
                for value in _binned(
                    [sum(one) for one in zip(*(timeline.level(level, at) for level in levels), strict=True)], bins
                )
            ]
            for at in places
        }
        found.append(heat_map(f"{name}: {title}, by worker", rows, seconds, unit, marks))
    return found


def _router_queues(outcomes: Mapping[str, RunOutcome], rows: Mapping[str, Sequence[RequestRow]]) -> dict[str, Points]:
    """Return the number of requests that wait in the router, from their arrivals and waits."""
    found: dict[str, Points] = {}
    for name, of_run in rows.items():
        timeline = outcomes[name].timeline
        levels = Timeline(timeline.interval_ms)
        for row in of_run:
            if row.wait_ms > 0:
                levels.hold(0, (1.0, 0.0, 0.0), row.arrival_ms, row.arrival_ms + row.wait_ms)
        values = levels.level("running", 0) if levels.places else []
        found[name] = _over_time(timeline, values + [0.0] * (timeline.length - len(values)))
    return found


def _span(values: Sequence[float]) -> tuple[int, int]:
    """Return the first and the last index of a value above zero: the time in which a worker is at the place."""
    above = [at for at, value in enumerate(values) if value > 0]
    return (above[0], above[-1]) if above else (0, -1)


def _imbalances(outcomes: Mapping[str, RunOutcome]) -> Mapping[str, Points]:
    """Return the requests of the busiest worker over the mean of the workers, where there are requests."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, outcome in outcomes.items():
        timeline = outcome.timeline
        bins = max(1, math.ceil(timeline.length / POINTS))
        seconds = timeline.interval_ms / 1000 * bins
        loads = [
            _binned([a + b for a, b in zip(running, waiting, strict=True)], bins)
            for running, waiting in zip(_all(timeline, "running"), _all(timeline, "waiting"), strict=True)
        ]
        spans = [_span(values) for values in loads]
        found[name] = []
        for at in range(len(loads[0]) if loads else 0):
            there = [values[at] for values, (first, last) in zip(loads, spans, strict=True) if first <= at <= last]
            if sum(there) > 0:
                found[name].append(((at + 0.5) * seconds, max(there) * len(there) / sum(there)))
    return found


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
    return f"<div class=wide><table>{''.join(lines)}</table></div>"


# Plotted data.


def _cdfs(rows: Mapping[str, Sequence[RequestRow]], metric: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, of_run in rows.items():
        values = sorted(value for row in of_run if (value := getattr(row, metric)) is not None)
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
    table = f"<table><tr><th>time<th>target<th>reason{''.join(lines)}</table>"
    return f"<h2>{title}</h2><div class=wide>{table}</div>"


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
