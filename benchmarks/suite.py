"""Suite: run the benchmark programs one after the other, each in a process of its own with a time limit.

    python -m benchmarks.suite [--quick] [--only frontend_cpu,floods]

Without `--quick` every program writes `benchmarks/results/<program>.json`. With it the programs take less than ten minutes in
all and write into the cache; what does not fit into that time on a slow machine is listed as not run. A program that fails or
takes too long does not stop the others, and what it leaves behind is removed; the exit status is then 1. The run ends with a
table of the main figures and their aims (`aims.py`).
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.aims import AIMS, Figure, figures_of
from benchmarks.corpus import cache_dir
from benchmarks.report import RESULTS, machine, number, print_line
from benchmarks.suite_process import Ended, adopt_descendants, run
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Program:
    """One program: its arguments in both cases, and its time limits in seconds."""

    name: str
    whole: Sequence[str] = ()
    whole_s: float = 900.0
    quick: Sequence[str] | None = ("--quick",)
    """None: not part of the quick suite."""
    quick_s: float = 120.0
    takes_trace: bool = False
    """Whether it has `--trace`."""
    needs_trace: bool = False
    """Whether it cannot run without."""


PROGRAMS = (
    Program("frontend_cpu", ("--same-engine", "--bare"), 2700.0, ("--quick", "--reps", "1", "--same-engine"), 240.0),
    Program("floods", (), 1800.0, ("--quick", "--limit-s", "180"), 240.0),
    Program("frontend_latency", (), 600.0, None),
    Program("frontend_memory", (), 900.0, None),
    Program("start", (), 300.0, ("--quick",), 60.0),
    Program("http_workers", (), 600.0, ("--quick",), 90.0),
    Program("long_context", (), 300.0, ("--quick",), 90.0),
    Program("gateway_overhead", (), 600.0, None),
    Program("router", (), 1200.0, ("--quick",), 240.0),
    Program("block_hashing"),
    Program("router_churn", (), 900.0, None),
    Program("routing_quality", (), 3600.0, None, takes_trace=True),
    Program("routing_regret", (), 1200.0, None),
    Program("routing_bound", (), 300.0, None),
    Program("epp_picks", (), 300.0, None),
    Program("guided"),
    Program("cpu_engine", (), 300.0, None),
    Program("lora_step", (), 300.0, ("--quick",), 60.0),
    Program("tokenizer", (), 300.0, ("--quick",), 120.0),
    Program("request_plane", (), 600.0, None),
    Program("response_frames", (), 300.0, ("--quick",), 60.0),
    Program("idle_streams", (), 300.0, None),
    Program("mocker_pace", (), 600.0, ("--quick",), 120.0),
    Program("mocker_fidelity", (), 600.0, None),
    Program("replay_peer", (), 600.0, ("--quick",), 60.0),
    Program("replay_fidelity", (), 600.0, ("--quick",), 120.0),
    Program("replay_scale", (), 900.0, None, takes_trace=True, needs_trace=True),
    Program("replay_live", (), 900.0, None),
    Program("planner_quality", ("--seeds", "5"), 7200.0, None, takes_trace=True),
    Program("planner_tick", (), 300.0, None),
    Program("engine_accuracy", (), 900.0, None),
    Program("recommend_search", (), 2400.0, None, takes_trace=True),
    Program("disagg_ttft", (), 900.0, None),
    Program("kv_tiers", (), 900.0, None),
    Program("kv_transfer"),
    Program("kubernetes_discovery", (), 900.0, None),
    Program("operator_scale", (), 1200.0, None),
    Program("console_cost", (), 600.0, None),
    Program("discovery", (), 300.0, ("--quick", "--workers", "200", "--idle-s", "2"), 60.0),
    Program("tracing"),
    Program("scale", (), 600.0, ("--quick",), 180.0),
)


QUICK_S = 600.0
LEFT_S_MIN = 15.0  # No program of the quick suite ends sooner.
HEAD = ["program", "seconds", "state", "figure", "value", "aim", "verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteConfig:
    """Run the benchmark programs."""

    quick: bool = option(False, "--quick", None, "Short runs of most programs, in ten minutes, without result files")
    trace: str | None = option(None, "--trace", None, "Mooncake's conversation trace, for the programs that use it")
    only: list[str] = option([], "--only", None, "Names of programs to run")

    def __post_init__(self) -> None:
        unknown = set(self.only) - {one.name for one in PROGRAMS}
        if unknown:
            raise ConfigError(
                f"--only {', '.join(sorted(unknown))}: must be among {', '.join(o.name for o in PROGRAMS)}"
            )

    def runs(self) -> list[tuple[Program, Sequence[str], float]]:
        """Return the programs to run, with their arguments and limits."""
        chosen = [one for one in PROGRAMS if not self.only or one.name in self.only]
        if not self.quick:
            traced = [] if self.trace is None else ["--trace", os.path.abspath(self.trace)]
            return [(one, [*one.whole, *(traced if one.takes_trace else [])], one.whole_s) for one in chosen]
        quick = [(one, one.quick, one.quick_s) for one in chosen if one.quick is not None]
        return sorted(
            quick, key=lambda run: run[2]
        )  # The shortest first: a slow machine leaves out one long program, not ten short ones.

    def limit_s(self, most_s: float, elapsed_s: float) -> float:
        """Return the time limit of a program that starts after so many seconds; 0 if it is too late in the quick suite."""
        if not self.quick:
            return most_s
        left_s = QUICK_S - elapsed_s
        return min(most_s, left_s) if left_s >= LEFT_S_MIN else 0.0


@dataclass(slots=True)
class Outcome:
    """One program of this run: its end, and the figures of the result that it wrote."""

    name: str
    ended: Ended | None = None
    """None: not run."""
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""
    """Why it was not run."""

    @property
    def state(self) -> str:
        """Return how it ended."""
        if self.ended is None:
            return f"not run: {self.reason}"
        left = f"; left {self.ended.left} processes" if self.ended.left else ""
        return (self.ended.reason or "done") + left

    @property
    def is_failed(self) -> bool:
        """Return whether it failed, or left processes."""
        return self.ended is not None and bool(self.ended.reason or self.ended.left)

    def rows(self) -> list[list[str]]:
        """Return its lines of the summary."""
        seconds = "" if self.ended is None else f"{self.ended.seconds:.0f}"
        shown = self.figures or [Figure("", math.nan, "", None, "")]
        rows = [["", "", "", one.name, number(one.value), one.aim, one.verdict] for one in shown]
        rows[0][:3] = [self.name, seconds, self.state]
        return rows


def written_figures(name: str, since: float) -> list[Figure]:
    """Return the figures of the result files that a program wrote since a time of the file system's clock."""
    found: list[Figure] = []
    for folder in (RESULTS, cache_dir()):
        for path in sorted(Path(folder).glob(f"{name}*.json")):
            if path.stem in AIMS and path.stat().st_mtime >= since:
                found += figures_of(path.stem, json.loads(path.read_text(encoding="utf-8")))
    return found


def run_program(program: Program, arguments: Sequence[str], limit_s: float) -> Outcome:
    """Run one program in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{program.name}", *arguments]
    since = time.time()
    ended = run(
        command, limit_s, lambda passed_s: print_line(f"   … {program.name}: {passed_s:.0f} of at most {limit_s:.0f} s")
    )
    return Outcome(program.name, ended, [] if ended.reason else written_figures(program.name, since))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all programs, and how many aims are met."""
    rows = [row for outcome in outcomes for row in outcome.rows()]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [HEAD, *rows]
    ]
    judged = [one.is_met for outcome in outcomes for one in outcome.figures if one.is_met is not None]
    failed = sum(outcome.is_failed for outcome in outcomes)
    seconds = sum(outcome.ended.seconds for outcome in outcomes if outcome.ended is not None)
    counts = f"{sum(judged)} of {len(judged)} aims met; {failed} of {len(outcomes)} programs failed; {seconds:.0f} s"
    return "\n".join([*lines, "", counts])


def main() -> int:
    config = load(SuiteConfig, sys.argv[1:], prog="python -m benchmarks.suite")
    adopt_descendants()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print_line(f"{machine()}")
    outcomes: list[Outcome] = []
    started, runs = time.monotonic(), config.runs()
    try:
        for place, (program, arguments, most_s) in enumerate(runs, 1):
            passed_s = time.monotonic() - started
            limit_s = config.limit_s(most_s, passed_s)
            if limit_s <= 0:
                outcomes.append(Outcome(program.name, reason="the time is over"))
                continue
            if program.needs_trace and config.trace is None:
                outcomes.append(Outcome(program.name, reason="needs --trace"))
                continue
            print_line(
                f"\n== {place} of {len(runs)}: {program.name} {' '.join(arguments)} "
                f"({passed_s:.0f} s so far, load average {os.getloadavg()[0]:.1f})"
            )
            outcomes.append(run_program(program, arguments, limit_s))
            print_line(f"   {program.name}: {outcomes[-1].state}")
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    finally:
        print_line(f"\n{summary(outcomes)}")
    return 1 if any(outcome.is_failed for outcome in outcomes) else 0


if __name__ == "__main__":
    exit_on_config_error(main)
