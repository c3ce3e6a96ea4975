"""Sweep: the same load under every combination of some knobs, on all cores, and the flags of the best one.

    dynamo replay sweep TRACE --knob num_workers=4,8 --knob prefill_load_scale=1,32 --sla-ttft-ms 2000

A knob is the number of workers, the router mode, a field of the engine args or a setting of the router. Combinations in
the results file are not run again. The best one needs the fewest workers of those that meet the objectives for enough
requests; without objectives, it has the lowest latency. The front contains the Pareto-optimal combinations of workers
and latency.
"""

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.config import as_flags, build_parser, environ, exit_on_config_error, from_namespace, option
from dynamo.core.errors import ConfigError
from dynamo.replay.charts import plot
from dynamo.replay.config import ReplayConfig
from dynamo.replay.page import small_page
from dynamo.replay.sweep_processes import run, run_in_processes, tuned

COMBINATIONS_MAX = 10_000  # More would take days and are probably a mistake.


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """Runs a load under every combination of some knobs."""

    knob: list[str] = option(
        [],
        "--knob",
        None,
        "NAME=VALUE,VALUE: num_workers (num_prefill_workers, num_decode_workers), router_mode, engine args, router settings",
        metavar="KNOB",
    )
    jobs: int = option(1, "--jobs", None, "Processes")
    results: str | None = option(
        None, "--results", None, "File of finished runs, one per line; these are not run again"
    )
    sla_share: float = option(0.99, "--sla-share", None, "Share of requests that must meet the objectives, 0 to 1")

    def __post_init__(self) -> None:
        if not self.knob:
            raise ConfigError("--knob is missing: pass at least one NAME=VALUE,VALUE")
        if self.jobs < 1:
            raise ConfigError(f"--jobs {self.jobs}: expected 1 or more")
        if not 0 <= self.sla_share <= 1:
            raise ConfigError(f"--sla-share {self.sla_share:g}: expected a number from 0 to 1")

    def combinations(self) -> list[dict[str, Any]]:
        """Return all combinations. Raise `ConfigError` for an invalid knob or too many combinations."""
        names, values = [], []
        for words in joined(self.knob):
            name, equals, text = words.partition("=")
            if not equals or not text:
                raise ConfigError(f"--knob {words}: expected NAME=VALUE,VALUE")
            names.append(name)
            values.append([_value(part) for part in text.split(",")])
        found = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
        if len(found) > COMBINATIONS_MAX:
            raise ConfigError(f"{len(found)} combinations: must be at most {COMBINATIONS_MAX}")
        return found


def joined(parts: Sequence[str]) -> list[str]:
    """Join list items that were split at commas: a part without `=` belongs to the knob before it."""
    found: list[str] = []
    for part in parts:
        if "=" in part or not found:
            found.append(part)
        else:
            found[-1] += f",{part}"
    return found


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def run_all(config: ReplayConfig, sweep: SweepConfig) -> list[dict[str, Any]]:
    """Return the rows of all combinations; those in the results file are read from it."""
    load_name = json.dumps([flag for flag in as_flags(config) if not flag.startswith("--report")])
    known: dict[str, dict[str, Any]] = {}
    path = None if sweep.results is None else Path(sweep.results)
    if path is not None and path.exists():
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        known = {json.dumps(row["knobs"]): row for row in kept if row.get("load") == load_name}
    wanted = sweep.combinations()
    missing = [(config, knobs) for knobs in wanted if json.dumps(knobs) not in known]
    for row in _mapped(missing, sweep.jobs):
        row["load"] = load_name
        known[json.dumps(row["knobs"])] = row
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return [known[json.dumps(knobs)] for knobs in wanted]


def _mapped(tasks: Sequence[tuple[ReplayConfig, dict[str, Any]]], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1 or len(tasks) < 2:
        yield from map(run, tasks)
        return
    yield from run_in_processes(tasks, jobs)


def front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the Pareto front of workers and latency, fewest workers first."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["workers"], row["summary"]["mean_e2e_latency_ms"])):
        if not found or row["summary"]["mean_e2e_latency_ms"] < found[-1]["summary"]["mean_e2e_latency_ms"]:
            found.append(row)
    return found


def best(rows: Sequence[dict[str, Any]], share: float) -> dict[str, Any] | None:
    """Return the best row; None if none meets the objectives."""
    if "sla_met_ratio" not in rows[0]["summary"]:
        return min(rows, key=lambda row: (row["summary"]["mean_e2e_latency_ms"], row["workers"]))
    kept = [row for row in rows if row["summary"]["sla_met_ratio"] >= share]
    return min(kept, key=lambda row: (row["workers"], row["summary"]["mean_e2e_latency_ms"]), default=None)


def table(rows: Sequence[dict[str, Any]], on_front: Sequence[dict[str, Any]]) -> str:
    """Return a table of all runs, lowest latency first; a star marks the front."""
    lines = [
        f"  {'workers':>7} {'TTFT ms':>9} {'TTFT p99':>9} {'ITL ms':>7} {'e2e ms':>9} {'tok/s':>8} {'SLA':>6}  knobs"
    ]
    for row in sorted(rows, key=lambda row: row["summary"]["mean_e2e_latency_ms"]):
        of = row["summary"]
        met = f"{100 * of['sla_met_ratio']:.1f}%" if "sla_met_ratio" in of else ""
        knobs = " ".join(f"{name}={value}" for name, value in row["knobs"].items())
        lines.append(
            f"{'*' if row in on_front else ' '} {row['workers']:>7} {of['mean_ttft_ms']:>9,.0f} {of['p99_ttft_ms']:>9,.0f} "
            f"{of['mean_itl_ms'] or 0.0:>7.2f} {of['mean_e2e_latency_ms']:>9,.0f} {of['output_throughput_tok_s']:>8,.0f} "
            f"{met:>6}  {knobs}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay.sweep") -> int:
    """Print the table, the front and the best flags; return 1 if no combination meets the objectives."""
    parser = build_parser(SweepConfig, ReplayConfig, variables=environ(), prog=prog)
    namespace = parser.parse_args(list(argv))
    sweep, config = from_namespace(SweepConfig, namespace), from_namespace(ReplayConfig, namespace)
    rows = run_all(config, sweep)
    on_front = front(rows)
    print(table(rows, on_front))
    if config.report_html:
        line = [(float(row["workers"]), row["summary"]["mean_e2e_latency_ms"]) for row in on_front]
        Path(config.report_html).write_text(
            small_page("Sweep", plot("Latency by workers, the front", {"mean e2e ms": line}, "workers"))
        )
    chosen = best(rows, sweep.sla_share)
    if chosen is None:
        print("\nNo combination meets the objectives.")
        return 1
    print(f"\nBest: {' '.join(map(shlex.quote, as_flags(tuned(config, chosen['knobs']))))}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
