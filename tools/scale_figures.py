"""Tables and plots of docs/scale.md, from the committed result of `benchmarks.scale`. Part of `tools.figures`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "scale.json"
FRONTEND_RESULT = ROOT / "benchmarks" / "results" / "frontend_cpu.json"
PAGE = ROOT / "docs" / "scale.md"
PICTURES = ROOT / "docs" / "pictures"
WIDTH_PX, HEIGHT_PX, LEFT_PX, RIGHT_PX, TOP_PX, FOOT_PX = 760, 320, 70, 24, 78, 52
COLORS = ("#1f77b4", "#d9730d", "#2e7d32")
FRONTENDS = (1, 4, 16, 64)
ANSWER_TOKENS = 128
NEW_BLOCKS = 64
"""Blocks of a request that its worker did not have, each of which is an event at every frontend."""
JOIN_S = 3.0


def result() -> dict[str, Any]:
    """Return the committed result."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def number(value: float) -> str:
    """Return a number with three digits at most after the first."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def power(value: float) -> str:
    """Return a power of ten as `10⁵`."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def decisions(found: Mapping[str, Any]) -> str:
    """Return the table of decisions."""
    rows = [
        [
            f"{int(workers):,}",
            *(number(costs[f"{policy}_decision_us"]) for policy in ("dynamo", "balanced")),
            number(costs["dynamo_end_us"]),
        ]
        for workers, costs in found["workers"].items()
    ]
    head = ["workers", "decision, `dynamo`, µs", "decision, `balanced`, µs", "first token and end, µs"]
    return table(head, rows)


def index(found: Mapping[str, Any]) -> str:
    """Return the table of the index; the last row is extrapolated."""
    names = (
        "bytes_per_block",
        "stored_ns",
        "removed_ns",
        "find_us",
        "stored_pause_ms",
        "collection_ms",
        "full_collection_ms",
    )
    rows = [[power(int(size)), *(number(costs[name]) for name in names)] for size, costs in found["index"].items()]
    size, costs = list(found["index"].items())[-1]
    more = 10 * int(size)
    rows.append(
        [
            f"{power(more)}, extrapolated",
            f"{number(costs['bytes_per_block'])} ({more * costs['bytes_per_block'] / 1e9:.0f} GB)",
            *["–"] * 6,
        ]
    )
    head = [
        "blocks",
        "bytes a block",
        "stored, ns a block",
        "removed, ns a block",
        "look-up, µs",
        "longest event, ms",
        "longest young collection, ms",
        "full collection, ms",
    ]
    return table(head, rows)


def request_costs(found: Mapping[str, Any], workers: str = "1024") -> dict[str, float]:
    """Return the microseconds of a frontend for a request of its own, for one of another frontend, and for a request's events."""
    costs, largest = found["workers"][workers], list(found["index"].values())[-1]
    served = json.loads(FRONTEND_RESULT.read_text(encoding="utf-8"))["medians"]["paced c=256"]["ours"]
    return {
        "serve": served["frontend_us_per_token"]["median"] * ANSWER_TOKENS,
        "route": found["hashing_us"] + costs["dynamo_decision_us"] + costs["dynamo_end_us"] + costs["record_us"],
        "replica": costs["replica_us"],
        "events": NEW_BLOCKS * (found["decoded_ns"] + largest["stored_ns"] + largest["removed_ns"]) / 1e3,
    }


def rate(costs: Mapping[str, float], frontends: int, *, remote: bool = False) -> float:
    """Return the requests per second at which the frontends, of one core each, are busy all the time.

    Each request is served and routed by one of them and reported to the others; its events reach all of them, or with `remote`
    indexers none.
    """
    own = costs["serve"] + costs["route"]
    each = own / frontends + costs["replica"] * (frontends - 1) / frontends + (0.0 if remote else costs["events"])
    return 1e6 / each


def frontends(found: Mapping[str, Any]) -> str:
    """Return the table of frontends."""
    costs, rows = request_costs(found), []
    for count in FRONTENDS:
        total = 1e6 / rate(costs, count)
        shares = [
            (costs["serve"] + costs["route"]) / count,
            costs["replica"] * (count - 1) / count,
            costs["events"],
        ]
        rows.append(
            [
                str(count),
                number(rate(costs, count)),
                number(rate(costs, count, remote=True)),
                *(f"{one / total:.0%}" for one in shares),
            ]
        )
    head = [
        "frontends",
        "requests/s",
        "requests/s with remote indexers",
        "own requests",
        "replicas' requests",
        "events",
    ]
    return table(head, rows)


def parts(found: Mapping[str, Any]) -> str:
    """Return the table of the parts of a request."""
    costs = request_costs(found)
    rows = [
        [f"serving {ANSWER_TOKENS} tokens at real speed, at the frontend that has the client", number(costs["serve"])],
        ["hashing, look-up, decision, records over 1,024 workers, at the same", number(costs["route"])],
        ["the request of another frontend (`--router-replica-sync`)", number(costs["replica"])],
        [f"events of {NEW_BLOCKS} blocks stored and removed, at every frontend", number(costs["events"])],
    ]
    return table(["part of a request", "µs"], rows).replace("|---:|---:|", "|---|---:|")


def metrics(found: Mapping[str, Any]) -> str:
    """Return the table of metrics."""
    rows = [
        [f"{int(workers):,}", number(costs["render_ms"]), number(costs["page_kb"]), number(costs["record_us"])]
        for workers, costs in found["workers"].items()
    ]
    return table(["workers", "a scrape, ms", "page, kB", "record of a decision, µs"], rows)


def joins(found: Mapping[str, Any]) -> str:
    """Return the table of discovery."""
    seen = found["joins"]
    rows = [
        ["workers that join", f"{seen['workers']:,}"],
        ["frontends", f"{seen['frontends']}"],
        ["first to last registration, s", number(seen["registered_s"])],
        ["first registration until every frontend routes to all, s", number(seen["noticed_s"])],
        ["first removal until no frontend routes to them, s", number(seen["dropped_s"])],
        ["processor time of one frontend while they join, s", number(seen["processor_s"])],
        ["longest other request to a frontend meanwhile, ms", number(seen["request_ms"])],
    ]
    is_met = seen["noticed_s"] <= JOIN_S
    average, cores = found["machine"]["load_average"], found["machine"]["cores"]
    verdict = f"The aim is that every frontend routes to all of them {JOIN_S:g} s after the first registered: "
    verdict += "met." if is_met else f"missed in this run, with a load average of {average} on {cores} cores."
    return table(["", ""], rows).replace("|---:|---:|", "|---|---:|") + "\n\n" + verdict


def run(found: Mapping[str, Any]) -> str:
    """Return a line about the run."""
    machine = found["machine"]
    return (
        f"One run of `python -m benchmarks.scale` on {machine['date']}: {machine['cores']} cores ({machine['processor']}), of which other "
        f"programs used {machine['other_cores']} (load average {machine['load_average']}), commit `{machine['commit']}`. Times are "
        "processor time of the thread, unless the table states otherwise."
    )


def tables() -> dict[str, str]:
    """Return the generated parts of the page by name."""
    found = result()
    makers = (decisions, index, parts, frontends, metrics, joins, run)
    return {f"scale {make.__name__}": make(found) for make in makers}


def plot(title: str, x_name: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG plot with logarithmic axes that is legible on light and dark pages."""
    points = [point for line in lines.values() for point in line]
    low_x, high_x = (math.log10(pick(x for x, _ in points)) for pick in (min, max))
    low_y, high_y = (
        math.floor(math.log10(min(y for _, y in points))),
        math.ceil(math.log10(max(y for _, y in points))),
    )
    high_y = max(high_y, low_y + 1)

    def at_x(x: float) -> float:
        return LEFT_PX + (math.log10(x) - low_x) / (high_x - low_x) * (WIDTH_PX - LEFT_PX - RIGHT_PX)

    def at_y(y: float) -> float:
        return HEIGHT_PX - FOOT_PX - (math.log10(y) - low_y) / (high_y - low_y) * (HEIGHT_PX - FOOT_PX - TOP_PX)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{HEIGHT_PX}" viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" role="img"',
        '     font-family="ui-sans-serif, system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328">',
        f"  <title>{title}</title>",
        f'  <rect x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{HEIGHT_PX - 1}" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
        f'  <text x="18" y="26" font-weight="600">{title}</text>',
    ]
    for exponent in range(low_y, high_y + 1):
        y = at_y(10.0**exponent)
        out.append(f'  <line x1="{LEFT_PX}" x2="{WIDTH_PX - RIGHT_PX}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>')
        out.append(
            f'  <text x="{LEFT_PX - 8}" y="{y + 4:.1f}" text-anchor="end" font-size="12">{10.0**exponent:,g}</text>'
        )
    for x in sorted({x for x, _ in points}):
        name = power(x) if x >= 1e5 else f"{x:,g}"
        out.append(
            f'  <text x="{at_x(x):.1f}" y="{HEIGHT_PX - FOOT_PX + 18}" text-anchor="middle" font-size="12">{name}</text>'
        )
    out.append(
        f'  <text x="{WIDTH_PX - RIGHT_PX}" y="{HEIGHT_PX - 12}" text-anchor="end" font-size="12">{x_name}</text>'
    )
    left = 18
    for color, (name, line) in zip(COLORS, lines.items(), strict=False):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line)
        out.append(f'  <polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'  <circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{color}"/>' for x, y in line]
        out.append(f'  <rect x="{left}" y="40" width="11" height="11" fill="{color}"/>')
        out.append(f'  <text x="{left + 17}" y="50">{name}</text>')
        left += 60 + 7 * len(name)
    return "\n".join([*out, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """Return the plots by path."""
    found = result()
    workers = {int(count): costs for count, costs in found["workers"].items()}
    sizes = {int(size): costs for size, costs in found["index"].items()}
    costs = request_costs(found)

    def over(cases: Mapping[int, Mapping[str, float]], name: str) -> list[tuple[float, float]]:
        return [(size, one[name]) for size, one in cases.items()]

    return {
        PICTURES / "scale_decision.svg": plot(
            "Processor time of a routing decision, µs",
            "workers",
            {policy: over(workers, f"{policy}_decision_us") for policy in ("dynamo", "balanced")},
        ),
        PICTURES / "scale_index.svg": plot(
            "Processor time of an event, ns a block",
            "blocks in the index",
            {"stored": over(sizes, "stored_ns"), "removed": over(sizes, "removed_ns")},
        ),
        PICTURES / "scale_frontends.svg": plot(
            "Requests per second with one core for each frontend",
            "frontends",
            {
                "local indexes": [(count, rate(costs, count)) for count in FRONTENDS],
                "remote indexers": [(count, rate(costs, count, remote=True)) for count in FRONTENDS],
            },
        ),
        PICTURES / "scale_metrics.svg": plot(
            "Processor time of a scrape of the metrics, ms", "workers", {"scrape": over(workers, "render_ms")}
        ),
    }
