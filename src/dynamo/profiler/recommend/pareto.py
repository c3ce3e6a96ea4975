"""Pareto page: goodput per GPU of all simulated deployments by their latency, with error bars, as one HTML file. Pure."""

import html
from collections.abc import Callable, Sequence

from dynamo.profiler.recommend.estimate import EstimateError
from dynamo.profiler.recommend.exploration import front
from dynamo.profiler.recommend.simulation import SimulatedResult
from dynamo.replay.charts import round_steps, short_number
from dynamo.replay.page import small_page

WIDTH, HEIGHT = 900, 460
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 20, 60
BLUE, ORANGE, GRAY = "#2563eb", "#d97706", "#8888"
Scale = Callable[[float], float]

LATENCY_SPREAD = 3.0
"""Multiple of the best deployment's latency up to which deployments are drawn: overloaded ones would hide the others."""


def pareto_page(
    results: Sequence[SimulatedResult], best: SimulatedResult, share: float, estimate: EstimateError
) -> str:
    """Return the page: a plot and a table of the front."""
    on_front = front(results)
    shown = [one for one in results if one.e2e_ms <= LATENCY_SPREAD * best.e2e_ms]
    rows = "".join(_row(one, share, is_best=one == best) for one in on_front)
    head = "<tr><th>deployment<th>GPUs<th>tok/s per GPU<th>latency s<th>TTFT ms<th>ITL ms<th>met"
    left_out = len(results) - len(shown)
    note = (
        f"<p>{len(results)} simulated deployments; the estimate's error is {html.escape(estimate.text())} "
        f"({html.escape(estimate.source)}). Hover over a point for its deployment."
        + (
            f" {left_out} overloaded ones, of more than {LATENCY_SPREAD:g} times the latency, are not drawn."
            if left_out
            else ""
        )
    )
    table = f"<h2>Pareto front</h2><table>{head}{rows}</table>"
    return small_page("Recommendation", f"{_plot(shown, on_front, best, share, estimate)}{note}{table}")


def _row(one: SimulatedResult, share: float, *, is_best: bool) -> str:
    label = html.escape(one.candidate.label())
    name = f"<b>{label}</b> (recommended)" if is_best else label
    met = f"{100 * one.met_share:.1f} %{'' if one.met_share >= share else ' (missed)'}"
    return (
        f"<tr><td>{name}<td>{one.mean_gpus:.3g}<td>{one.goodput_per_gpu:.0f}<td>{one.e2e_ms / 1000:.2f}"
        f"<td>{one.ttft_ms:.0f}<td>{one.itl_ms:.1f}<td>{met}"
    )


def _plot(
    shown: Sequence[SimulatedResult],
    on_front: Sequence[SimulatedResult],
    best: SimulatedResult,
    share: float,
    estimate: EstimateError,
) -> str:
    most_s = max(one.e2e_ms for one in shown) / 1000 * 1.05
    top = (max(one.goodput_per_gpu for one in shown) or 1.0) * 1.08

    def across(seconds: float) -> float:
        return LEFT + min(1.0, seconds / most_s) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = ["<h2>Goodput per GPU by mean latency of a request</h2>"]
    parts.append(f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>")
    for y in round_steps(top):
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={up(y):.1f} y2={up(y):.1f} />")
        parts.append(f"<text x={LEFT - 8} y={up(y) + 5:.1f} text-anchor=end>{short_number(y)}</text>")
    for x in round_steps(most_s):
        parts.append(f"<line class=grid x1={across(x):.1f} x2={across(x):.1f} y1={TOP} y2={HEIGHT - BOTTOM} />")
        parts.append(f"<text x={across(x):.1f} y={HEIGHT - BOTTOM + 20} text-anchor=middle>{short_number(x)}</text>")
    parts.append(f"<text x={WIDTH - RIGHT} y={HEIGHT - 12} text-anchor=end>mean latency, s</text>")
    parts.append(f"<text x={LEFT} y={TOP - 5}>tokens/s per GPU within the objectives</text>")
    line = " ".join(
        f"{across(one.e2e_ms / 1000):.1f},{up(one.goodput_per_gpu):.1f}" for one in on_front if one in shown
    )
    parts.append(f"<polyline fill=none stroke={GRAY} stroke-width=2 points='{line}' />")
    parts += [_point(one, across, up, share, is_best=one == best) for one in shown]
    parts.append(_error_bar(best, across, up, estimate))
    parts.append("</svg><div class=key>")
    for color, name in ((BLUE, "aggregated"), (ORANGE, "disaggregated"), (GRAY, "misses the objectives")):
        parts.append(f"<span><i style='background:{color}'></i>{name}</span>")
    parts.append("<span>line: Pareto front</span><span>ring: recommended, with the error of its latency</span></div>")
    return "".join(parts)


def _point(one: SimulatedResult, across: Scale, up: Scale, share: float, *, is_best: bool) -> str:
    x, y = across(one.e2e_ms / 1000), up(one.goodput_per_gpu)
    color = ORANGE if one.candidate.config.is_disaggregated else BLUE
    title = (
        f"{one.candidate.label()}: {one.goodput_per_gpu:.0f} tok/s per GPU, {one.e2e_ms / 1000:.2f} s, "
        f"{100 * one.met_share:.1f} % met"
    )
    ring = f"<circle cx={x:.1f} cy={y:.1f} r=10 fill=none stroke={color} stroke-width=2 />" if is_best else ""
    fill = color if one.met_share >= share else GRAY
    return f"<g><title>{html.escape(title)}</title><circle cx={x:.1f} cy={y:.1f} r=5 fill={fill} />{ring}</g>"


def _error_bar(best: SimulatedResult, across: Scale, up: Scale, estimate: EstimateError) -> str:
    """Return the bar of the latency's error: those of TTFT and of the tokens after it."""
    spread_ms = estimate.ttft * best.ttft_ms + estimate.itl * (best.e2e_ms - best.ttft_ms)
    low, high = across(max(0.0, best.e2e_ms - spread_ms) / 1000), across((best.e2e_ms + spread_ms) / 1000)
    y = up(best.goodput_per_gpu)
    ends = "".join(f"<line class=axis x1={x:.1f} x2={x:.1f} y1={y - 5:.1f} y2={y + 5:.1f} />" for x in (low, high))
    return f"<line class=axis x1={low:.1f} x2={high:.1f} y1={y:.1f} y2={y:.1f} />{ends}"
