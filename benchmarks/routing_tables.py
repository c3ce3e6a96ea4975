"""Tables of the routing benchmark, made from its result file."""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from statistics import mean, stdev
from typing import Any

from benchmarks.report import table

OURS = "balanced"
T_QUANTILE = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's, two-sided 95 %, by the number of seeds."""
FIGURES = ("e2e", "ttft", "ttft_p99", "tpot", "worst_tenant", "longest_p99")
Figures = Mapping[str, Sequence[float]]
Point = Mapping[str, Figures]
"""Figures of each policy at a point, by seed."""


def tables(result: Mapping[str, Any]) -> str:
    """Return all tables that the result has figures for."""
    parts: list[str] = []
    points = result.get("points", {})
    for kind, title in (("held_out", "Held-out loads"), ("training", "Training loads")):
        if kind in points:
            parts += [f"### {title}", "", *verdicts(points[kind]), "", *latencies(points[kind]), ""]
    if points:
        every = {**points.get("training", {}), **points.get("held_out", {})}
        parts += ["### Event lag", "", *lags(every), ""]
    if "tuning" in result:
        parts += ["### Constants", "", *constants(result["tuning"]), "", *left_out(result["tuning"]), ""]
    return "\n".join(parts)


def verdicts(points: Mapping[str, Point]) -> Iterator[str]:
    """Yield a table of `balanced` against the best of all other policies at each point without lag."""
    head = [
        "load",
        "e2e",
        "TTFT",
        "TTFT p99",
        "TPOT / round-robin",
        "worst tenant",
        "longest prompts p99",
        "best other",
    ]
    rows, ratios = [], dict[str, list[float]]()
    for name, point in _without_lag(points):
        cells = []
        for figure in FIGURES:
            other = "round-robin" if figure == "tpot" else _best(point, figure)
            found = [a / b for a, b in zip(point[OURS][figure], point[other][figure], strict=False)]
            cells.append(_percent(found))
            ratios.setdefault(f"{name.rsplit(', ')[-1]} {figure}", []).append(mean(found))
        rows.append([name, *cells, _best(point, "e2e")])
    for strength in ("light", "near", "over"):
        means = [ratios.get(f"{strength} {figure}", []) for figure in FIGURES]
        if means[0]:
            rows.append([f"**all, {strength}**", *(f"{100 * (geometric(one) - 1):+.1f} %" for one in means), ""])
    yield table(head, rows)


def latencies(points: Mapping[str, Point]) -> Iterator[str]:
    """Yield a table of mean latencies and mean times to first token of every policy."""
    policies = next(list(point) for _, point in _without_lag(points))
    rows = [
        [name, *(f"{mean(point[one]['e2e']):,.0f} ({mean(point[one]['ttft']):,.0f})" for one in policies)]
        for name, point in _without_lag(points)
    ]
    yield table(["mean e2e (TTFT), ms", *policies], rows)


def lags(points: Mapping[str, Point]) -> Iterator[str]:
    """Yield a table of the increase of the mean latency by late events."""
    rows = []
    for name, point in points.items():
        if not name.endswith("near, lag 0"):
            continue
        shape = name.removesuffix(", near, lag 0")
        cells = []
        for lag_ms in (5, 50):
            late = points.get(f"{shape}, near, lag {lag_ms}", {})
            for policy in ("kv tuned", "preble", OURS):
                if policy in late:
                    pairs = zip(late[policy]["e2e"], point[policy]["e2e"], strict=False)  # Lag has one seed.
                    cells.append(_percent([a / b for a, b in pairs]))
        if cells:
            rows.append([shape, *cells])
    names = ("kv tuned", "preble", OURS)
    yield table(["e2e over lag 0", *(f"{one}, {lag_ms} ms" for lag_ms in (5, 50) for one in names)], rows)


def constants(points: Mapping[str, Point]) -> Iterator[str]:
    """Yield a table of the latency with other constants, over all training loads, and over those of a strength."""
    variants = list(dict.fromkeys(name for point in points.values() for name in point if name != OURS))
    columns = [("e2e", "light"), ("e2e", "near"), ("e2e", "over"), ("ttft", None), ("ttft_p99", None)]
    rows = [
        [one, *(f"{100 * (_gain(points, one, strength, figure) - 1):+.2f} %" for figure, strength in columns)]
        for one in variants
    ]
    yield table(["all training loads", "e2e, light", "e2e, near", "e2e, over", "TTFT", "TTFT p99"], rows)


def left_out(points: Mapping[str, Point]) -> Iterator[str]:
    """Yield a table: for each shape, the variant chosen on the other shapes, and its cost on this one."""
    shapes = list(dict.fromkeys(_shape(name) for name in points))
    variants = list(dict.fromkeys(name for point in points.values() for name in point))
    rows = []
    for shape in shapes:
        others = {name: point for name, point in points.items() if _shape(name) != shape}
        mine = {name: point for name, point in points.items() if _shape(name) == shape}
        chosen = min(variants, key=lambda one: _gain(others, one))
        best = min(variants, key=lambda one: _gain(mine, one))
        rows.append(
            [
                shape,
                chosen,
                best,
                f"{100 * (_gain(mine, chosen) - 1):+.2f} %",
                f"{100 * (_gain(mine, best) - 1):+.2f} %",
            ]
        )
    head = [
        "shape left out",
        "best constants on the others",
        "best on this shape",
        "chosen, over ours",
        "best, over ours",
    ]
    yield table(head, rows, words=3)


def _shape(name: str) -> str:
    return name.rsplit(", ", 2)[0]


def _gain(points: Mapping[str, Point], variant: str, strength: str | None = None, figure: str = "e2e") -> float:
    """Return the geometric mean of a variant's latency over that of the constants in use."""
    found = [
        log(mean(point[variant][figure]) / mean(point[OURS][figure]))
        for name, point in points.items()
        if strength is None or f", {strength}, " in name
    ]
    return exp(mean(found))


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(mean([log(value) for value in values]))


def _without_lag(points: Mapping[str, Point]) -> Iterator[tuple[str, Point]]:
    for name, point in points.items():
        if name.endswith(", lag 0"):
            yield name.removesuffix(", lag 0"), point


def _best(point: Point, figure: str) -> str:
    """Return the other policy with the lowest mean of a figure."""
    seeds = len(point[OURS][figure])
    others = [one for one in point if one != OURS and len(point[one][figure]) == seeds]
    return min(others, key=lambda one: mean(point[one][figure]))


def _percent(ratios: Sequence[float]) -> str:
    """Return a mean ratio as a difference in percent, with its 95 % interval where there are several seeds."""
    text = f"{100 * (mean(ratios) - 1):+.1f}"
    if len(ratios) in T_QUANTILE:
        text += f" ± {100 * T_QUANTILE[len(ratios)] * stdev(ratios) / len(ratios) ** 0.5:.1f}"
    return f"{text} %"
