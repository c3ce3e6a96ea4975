"""Suite: run the benchmark programs one after the other, each in a process of its own with a time limit.

    python -m benchmarks.suite [--quick] [--only frontend_cpu,floods]

Without `--quick` every program writes `benchmarks/results/<program>.json`. With it the programs take less than ten minutes in
all and write into the cache; what does not fit into that time on a slow machine is listed as not run. A program that fails or takes too long does not stop the others; the exit status is then 1.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.corpus import ROOT
from benchmarks.report import machine, print_line
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


PROGRAMS = (
    Program("frontend_cpu", ("--same-engine", "--bare"), 2700.0, ("--quick", "--reps", "1", "--same-engine"), 240.0),
    Program("floods", (), 1800.0, ("--quick",), 240.0),
    Program("frontend_latency", (), 600.0, None),
    Program("frontend_memory", (), 900.0, None),
    Program("start", (), 300.0, ("--quick",), 60.0),
    Program("long_context", (), 300.0, ("--quick",), 90.0),
    Program("gateway_overhead", (), 600.0, None),
    Program("router", (), 1200.0, ("--quick",), 240.0),
    Program("block_hashing"),
    Program("router_churn", (), 900.0, None),
    Program("routing_quality", (), 3600.0, None),
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
    Program("replay_scale", (), 900.0, None),
    Program("replay_live", (), 900.0, None),
    Program("planner_quality", (), 1800.0, None),
    Program("planner_tick", (), 300.0, None),
    Program("engine_accuracy", (), 900.0, None),
    Program("recommend_search", (), 2400.0, None),
    Program("disagg_ttft", (), 900.0, None),
    Program("kv_tiers", (), 900.0, None),
    Program("kv_transfer"),
    Program("kubernetes_discovery", (), 900.0, None),
    Program("operator_scale", (), 1200.0, None),
    Program("console_cost", (), 300.0, None),
    Program("discovery", (), 300.0, ("--quick", "--workers", "200", "--idle-s", "2"), 60.0),
    Program("tracing"),
    Program("scale", (), 600.0, ("--quick",), 180.0),
)


QUICK_S = 600.0
LEFT_S_MIN = 15.0  # No program of the quick suite ends sooner.


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteConfig:
    """Run the benchmark programs."""

    quick: bool = option(False, "--quick", None, "Short runs of most programs, in ten minutes, without result files")
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
            return [(one, one.whole, one.whole_s) for one in chosen]
        return [(one, one.quick, one.quick_s) for one in chosen if one.quick is not None]

    def limit_s(self, most_s: float, elapsed_s: float) -> float:
        """Return the time limit of a program that starts after so many seconds; 0 if it is too late in the quick suite."""
        if not self.quick:
            return most_s
        left_s = QUICK_S - elapsed_s
        return min(most_s, left_s) if left_s >= LEFT_S_MIN else 0.0


def run(program: Program, arguments: Sequence[str], limit_s: float) -> str:
    """Run one program; return an empty text, or why it failed."""
    command = [sys.executable, "-m", f"benchmarks.{program.name}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # The programs close what they have started.
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"not done after {limit_s:.0f} s"
    return f"exit status {status}" if status else ""


def main() -> int:
    config = load(SuiteConfig, sys.argv[1:], prog="python -m benchmarks.suite")
    print_line(f"{machine()}")
    lines, failed = [], 0
    started = time.monotonic()
    for program, arguments, most_s in config.runs():
        limit_s = config.limit_s(most_s, time.monotonic() - started)
        if limit_s <= 0:
            lines.append(f"{program.name:18} {'':6}    not run: the {QUICK_S / 60:.0f} minutes are over")
            continue
        print_line(f"\n== {program.name} {' '.join(arguments)} (load average {os.getloadavg()[0]:.1f})")
        began = time.monotonic()
        reason = run(program, arguments, limit_s)
        failed += bool(reason)
        lines.append(f"{program.name:18} {time.monotonic() - began:6.0f} s  {reason or 'done'}")
    print_line("\n" + "\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    exit_on_config_error(main)
