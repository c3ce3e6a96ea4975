"""Regret of routing policies on random shapes of load: how far each policy is from the best of all on each shape.

    python -m benchmarks.routing_regret [--shapes 40] [--requests 400] [--jobs 1]
    python -m benchmarks.routing_regret --tables     write the tables of the committed result file into docs/balanced.md

`benchmarks/routing_shapes.py` has the distribution of the shapes. Each runs at the three strengths of `routing_quality`. The regret of a
policy at a point is its figure over the lowest of all policies there. No policy has a regret of zero everywhere, because the best one is
another one from point to point: a policy is good if its regret is small on average, and never large. Constants of `balanced` were
not chosen on these shapes.
"""

import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from benchmarks.report import RESULTS, number, print_line, table, write_result
from benchmarks.routing_quality import PAGE, POLICIES, STRENGTHS, figures, write_between
from benchmarks.routing_shapes import RandomShape
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

NAMES = ("round-robin", "least-loaded", "kv default", "kv tuned", "preble", "balanced")
OURS = "balanced"
FIGURES = {"e2e": "mean latency", "ttft": "mean first token", "ttft_p99": "p99 of the first token"}
SHAPES, REQUESTS = 40, 400
WORST_SHOWN = 5
BEGIN, END = "<!-- tables of benchmarks/results/routing_regret.json -->", "<!-- end of the tables of random shapes -->"

Point = Mapping[str, Mapping[str, float]]
"""Figures of each policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretBench:
    """Options of the program."""

    shapes: int = option(SHAPES, "--shapes", None, "Number of random shapes")
    first: int = option(1, "--first", None, "Number of the first one")
    requests: int = option(REQUESTS, "--requests", None, "Requests of each load")
    jobs: int = option(1, "--jobs", None, "Processes")
    policies: list[str] = option(list(NAMES), "--policies", None, "Policies to compare")
    tables: bool = option(
        False, "--tables", None, "Write the tables of the committed result file into docs/balanced.md"
    )
    quick: bool = option(False, "--quick", None, "Four shapes of 200 requests, and no result file")

    def __post_init__(self) -> None:
        if self.shapes < 1 or self.requests < 1 or self.jobs < 1:
            raise ConfigError("--shapes, --requests and --jobs: must be at least 1")
        if unknown := set(self.policies) - {*POLICIES}:
            raise ConfigError(f"--policies {min(unknown)}: must be among {', '.join(POLICIES)}")

    @property
    def is_whole(self) -> bool:
        """Whether the result is that of the documentation."""
        options = (self.shapes, self.first, self.requests, tuple(self.policies))
        return not self.quick and options == (SHAPES, 1, REQUESTS, NAMES)


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """One shape to run, in a process."""

    number: int
    requests: int
    policies: Sequence[str]

    def points(self) -> dict[str, Any]:
        """Return the shape's description, its saturated rate, and the figures of every policy by strength."""
        shape = RandomShape.of(self.number)
        rate = shape.saturated_rate(self.requests)
        strengths: dict[str, dict[str, dict[str, float]]] = {}
        for strength, share in STRENGTHS.items():
            point = strengths.setdefault(strength, {})
            for policy in self.policies:
                mode, settings = POLICIES[policy]
                point[policy] = figures(shape.scenario(mode, settings, rate * share, 1, self.requests).run())
        return {"description": shape.description, "rate": float(f"{rate:.4g}"), "strengths": strengths}


def points_of(run: ShapeRun) -> tuple[int, dict[str, Any]]:
    """Run one shape."""
    return run.number, run.points()


def regrets(result: Mapping[str, Any], policy: str, figure: str, strength: str) -> dict[str, float]:
    """Return a policy's figure over the lowest of all policies, by shape."""
    found = {}
    for name, shape in result["shapes"].items():
        point: Point = shape["strengths"][strength]
        found[name] = point[policy][figure] / min(one[figure] for one in point.values())
    return found


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the regrets of all policies for each figure, and one of the worst shapes of `balanced`."""
    policies = list(next(iter(result["shapes"].values()))["strengths"]["light"])
    for figure, title in FIGURES.items():
        head = [title, *(f"{strength}: {kind}" for strength in STRENGTHS for kind in ("mean", "p90", "worst"))]
        rows = []
        for policy in policies:
            cells = []
            for strength in STRENGTHS:
                found = sorted(regrets(result, policy, figure, strength).values())
                geometric = exp(mean(map(log, found)))
                p90 = quantiles(found, n=10, method="inclusive")[8] if len(found) > 1 else found[0]
                cells += [percent(geometric), percent(p90), percent(found[-1])]
            rows.append([policy, *cells])
        yield table(head, rows)
        yield ""
    if OURS in policies:
        yield from worst(result)


def worst(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the points on which the latency of `balanced` is farthest above the lowest."""
    found = [
        (ratio, name, strength)
        for strength in STRENGTHS
        for name, ratio in regrets(result, OURS, "e2e", strength).items()
    ]
    rows = []
    for ratio, name, strength in sorted(found, reverse=True)[:WORST_SHOWN]:
        shape = result["shapes"][name]
        point = shape["strengths"][strength]
        best = min(point, key=lambda one: point[one]["e2e"])
        first = percent(point[OURS]["ttft"] / point[best]["ttft"])
        rows.append([f"{name}, {strength}", percent(ratio), best, first, shape["description"]])
    yield table(["shape", "latency", "over", "first token over the same", "parameters"], rows, words=5)


def percent(ratio: float) -> str:
    """Return a ratio as a difference in percent."""
    return f"{100 * (ratio - 1):+.1f} %"


def main() -> int:
    """Run the shapes, print the tables and write the result file."""
    config = load(RegretBench, sys.argv[1:], prog="python -m benchmarks.routing_regret")
    if config.tables:
        committed = json.loads(Path(RESULTS, "routing_regret.json").read_text(encoding="utf-8"))
        write_between(PAGE, BEGIN, END, "\n".join(tables(committed)))
        return 0
    count, requests = (4, 200) if config.quick else (config.shapes, config.requests)
    runs = [ShapeRun(at, requests, config.policies) for at in range(config.first, config.first + count)]
    found: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(config.jobs) as pool:
        for at, shape in pool.imap_unordered(points_of, runs):
            found[str(at)] = shape
            ratios = {s: regrets({"shapes": {"": shape}}, config.policies[-1], "e2e", s)[""] for s in STRENGTHS}
            shown = ", ".join(f"{strength} {percent(ratio)}" for strength, ratio in ratios.items())
            print_line(
                f"{at} ({len(found)} of {count}), {number(shape['rate'])}/s: {config.policies[-1]} {shown}; {shape['description']}"
            )
    result = {"requests": requests, "shapes": dict(sorted(found.items(), key=lambda one: int(one[0])))}
    print_line("\n" + "\n".join(tables(result)))
    print_line(write_result("routing_regret", result, is_whole=config.is_whole))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
