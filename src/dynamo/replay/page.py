"""Page: a report as one self-contained HTML file: what was run, latencies against their objectives, plots over time."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.replay.charts import COLORS, Mark, Points, heat_map, plot
from dynamo.replay.comparison import ROWS, cell
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.page_data import (
    binned,
    distributions,
    hits,
    imbalances,
    prefill_places,
    rates,
    replicas,
    router_queues,
    sums,
    worker_counts,
)
from dynamo.replay.report import NONE, Objectives, RequestRow, rows_of, statistics

DECISIONS_SHOWN = 500  # Rows of the table of decisions: an hour of a decision every 7 s.
WHOLE_FROM = 1000  # Longer times have no decimal.
EVENTS_OPEN = 12  # Longer lists are closed at first.
HEAT_CELLS = 120  # Maximum cells per row of a heat map.
HEAT_ROWS = 128  # Maximum workers of a heat map.
PLOTTED_MAX = 4  # Runs whose workers are shown one by one.
LATENCIES = (("ttft_ms", "TTFT"), ("itl_ms", "ITL of a request"), ("e2e_latency_ms", "Latency"))
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
td,th{white-space:nowrap}.run th{padding-top:.7rem}.words{white-space:normal;text-align:left}.tables{display:flex;flex-wrap:wrap;gap:0 3rem;align-items:flex-start}.tables .wide{max-width:100%}
.met{color:#059669}.missed{color:#dc2626}
svg{width:100%;height:auto}svg text{font-size:15px;fill:currentColor}
.axis{stroke:currentColor;stroke-opacity:.5}.grid{stroke:currentColor;stroke-opacity:.12}
.mark{stroke-width:1.5;stroke-dasharray:4 3}
.key{font-size:13px}.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
@media(prefers-color-scheme:dark){.met{color:#34d399}.missed{color:#f87171}}
@media(max-width:600px){body{margin:1rem auto}td,th{padding:.2rem .3rem;font-size:13px}.latencies td:first-child{white-space:normal}.latencies td:nth-child(5),.latencies th:nth-child(5){display:none}svg text{font-size:20px}dl{grid-template-columns:1fr}dd{margin:0 0 .4rem}}
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
    sections = [*_distribution_plots(rows, objectives), *_time_plots(outcomes, rows, _common(list(marks.values())))]
    for name, outcome in list(outcomes.items())[:PLOTTED_MAX]:
        sections += _heat_maps("" if len(outcomes) == 1 else f"{name}: ", outcome, marks[name])
    body = "".join(f"<section>{section}</section>" for section in sections)
    decisions = "".join(_decisions(name, outcome) for name, outcome in outcomes.items())
    return small_page(
        f"Replay: {', '.join(outcomes)}",
        f"{_described(described or {})}<div class=tables>{_latencies(rows, objectives)}{_table(summaries)}</div>"
        f"{_events(marks)}<div class=plots>{body}</div>{decisions}",
    )


def _distribution_plots(rows: Mapping[str, Sequence[RequestRow]], objectives: Objectives) -> list[str]:
    """Return the distributions of the latencies, with their objectives."""
    limits = (objectives.ttft_ms, objectives.itl_ms, objectives.e2e_ms)
    return [
        plot(
            f"{title}: share of requests",
            distributions(rows, metric),
            "ms",
            is_log=True,
            marks=_limit(limit),
            end=limit or 0.0,
        )
        for (metric, title), limit in zip(LATENCIES, limits, strict=True)
    ]


def _time_plots(
    outcomes: Mapping[str, RunOutcome], rows: Mapping[str, Sequence[RequestRow]], marks: Sequence[Mark]
) -> list[str]:
    """Return the levels of the cluster over the same span of time."""
    ready = {f"{name}: {what}": line for name, outcome in outcomes.items() for what, line in replicas(outcome).items()}
    counts = {name: worker_counts(outcome) for name, outcome in outcomes.items() if outcome.planner is not None}
    found: list[tuple[str, Mapping[str, Points]]] = [
        ("Running requests, all workers", sums(outcomes, "running")),
        ("Waiting requests in the workers' queues", sums(outcomes, "waiting")),
        ("Waiting requests in the router's queue", router_queues(outcomes, rows)),
        ("Imbalance: busiest worker over mean", imbalances(outcomes)),
        ("Cached prompt tokens, %", hits(outcomes)),
        ("Output tokens per second", rates(outcomes, "output_tokens")),
    ]
    if ready:
        found.insert(0, ("Replicas: ready, and with those that are starting", ready))
    if counts:
        found.insert(0, ("Workers in service", counts))
    end_s = max(outcome.duration_ms for outcome in outcomes.values()) / 1000
    return [plot(title, lines, "s", marks=marks, end=end_s) for title, lines in found]


def _common(of_runs: Sequence[Sequence[Mark]]) -> list[Mark]:
    """Return the marks that all runs have in common, for plots with a line for each run."""
    return [mark for mark in of_runs[0] if all(mark in other for other in of_runs[1:])]


def small_page(title: str, body: str) -> str:
    """Return a self-contained HTML page."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
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
    head = ["ms", "p50", "p90", "p99", "mean", *(("SLA", "met") if objectives.are_any else ())]
    lines = [f"<tr>{''.join(f'<th>{name}' for name in head)}"]
    for name, of_run in rows.items():
        if len(rows) > 1:
            lines.append(f"<tr class=run><th colspan={len(head)}>{html.escape(name)}")
        for (metric, title), limit in zip(LATENCIES, limits, strict=True):
            values = [value for row in of_run if (value := getattr(row, metric)) is not None]
            found = statistics(values)
            cells = [found[key] for key in ("median", "p90", "p99", "mean")]
            line = f"<tr><td>{title}" + "".join(f"<td>{_number(value)}" for value in cells)
            if objectives.are_any:
                line += "<td><td>" if limit is None or not values else _met(values, limit)
            lines.append(line)
    return f"<div class=wide><table class=latencies>{''.join(lines)}</table></div>"


def _met(values: Sequence[float], limit: float) -> str:
    """Return the cells of an objective: the limit, and the share of requests within it."""
    share = sum(value <= limit for value in values) / len(values)
    return f"<td>{limit:,g}<td class={'met' if share >= 0.99 else 'missed'}>{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}" if value >= WHOLE_FROM else f"{value:,.1f}"


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
    shared = _common(list(marks.values()))
    found = [("all runs" if len(marks) > 1 else "", mark) for mark in shared]
    found += [(name, mark) for name, of_run in marks.items() for mark in of_run if mark not in shared]
    lines = [
        f"<tr><td>{html.escape(name)}<td>{mark.at:,.1f} s<td class=words style='color:{mark.color}'>{html.escape(mark.title)}"
        for name, mark in sorted(found, key=lambda one: one[1].at)[:DECISIONS_SHOWN]
    ]
    if not lines:
        return ""
    title = f"Failures, restarts and scaling decisions (vertical lines): {len(lines)}"
    state = " open" if len(lines) <= EVENTS_OPEN else ""
    return f"<details{state}><summary>{title}</summary><div class=wide><table>{''.join(lines)}</table></div></details>"


def _heat_maps(prefix: str, outcome: RunOutcome, marks: Sequence[Mark]) -> list[str]:
    """Return maps of the requests and the used blocks of each worker over time."""
    timeline = outcome.timeline
    seconds = timeline.length * timeline.interval_ms / 1000
    bins = max(1, math.ceil(timeline.length / HEAT_CELLS))
    prefill = prefill_places(outcome)
    names = [f"{'P' if at in prefill else 'D'}{at}" if prefill else f"{at}" for at in range(timeline.places)]
    kinds = " (P prefill, D decode)" if prefill else ""
    found = []
    for levels, title, unit in (
        (("running", "waiting"), "Requests", "requests"),
        (("used_blocks",), "KV blocks", "blocks"),
    ):
        rows = {
            name: [
                value / bins
                for value in binned(
                    [sum(one) for one in zip(*(timeline.level(level, at) for level in levels), strict=True)], bins
                )
            ]
            for at, name in enumerate(names[:HEAT_ROWS])
        }
        found.append(heat_map(f"{prefix}{title} by worker{kinds}", rows, seconds, unit, marks))
    return found


def _table(summaries: Mapping[str, dict[str, Any]]) -> str:
    names = list(summaries)
    first = summaries[names[0]]
    lines = ["<tr><th>" + "".join(f"<th>{html.escape(name)}" for name in names)]
    for key, title, _ in ROWS:
        if len(names) == 1 and key.endswith("_ms"):  # The table of percentiles has it.
            continue
        values = [(name, summaries[name].get(key)) for name in names]
        if any(value for _, value in values):
            base = first.get(key)
            cells = [
                "n/a" if value is None else cell(key, value, None if name == names[0] else base)
                for name, value in values
            ]
            lines.append(f"<tr><td>{title}" + "".join(f"<td>{text}" for text in cells))
    return f"<div class=wide><table>{''.join(lines)}</table></div>"


def _decisions(name: str, outcome: RunOutcome) -> str:
    """Return a table of the decisions that changed the number of workers, with their reasons."""
    if outcome.planner is None:
        return ""
    rows = [row for row in outcome.planner.ticks if row["scale_to"] is not None][:DECISIONS_SHOWN]
    reasons = [_reason(row["diagnostics"]) for row in rows]
    lines = ["<tr><th>time<th>target" + ("<th>reason" if any(reasons) else "")]
    for row, reason in zip(rows, reasons, strict=True):
        targets = ", ".join(f"{key[4:]} {count}" for key, count in row["scale_to"].items() if count is not None)
        cell = f"<td class=words>{html.escape(reason)}" if any(reasons) else ""
        lines.append(f"<tr><td>{row['at_s']:,.0f} s<td>{targets}{cell}")
    if not rows:
        return ""
    title = html.escape(f"Decisions of {name}")
    return f"<h2>{title}</h2><div class=wide><table>{''.join(lines)}</table></div>"


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
