"""What scaling policies are worth: loads under static worker counts, upstream's planner presets and ours, in virtual time.

    python -m benchmarks.planner_quality [--trace conversation.jsonl.gz] [--full] [--tune] [--seeds N] [--jobs N]

Every contender drives the same simulated engines through the production router and, where it scales, `PlannerCore`. Goodput is
the output tokens per second of requests that meet both objectives (TTFT 2 s, ITL 50 ms), over the duration of the load. GPU-hours
include starting and draining replicas. The constants of `forecast` are chosen on `TUNING` loads (`--tune` runs only those) and
judged on the others: another kind of load, or another half of the trace. Default: a subset of a few minutes of each load.
"""

import argparse
import json
import math
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.planner_oracle import KnownDemand, OraclePlanner
from benchmarks.report import RESULTS, number, print_line, table, write_result
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.protocols.planner import Planner
from dynamo.replay.core_planner import CorePlanner
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.report import Objectives, rows_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.trace import read

TTFT_MS, ITL_MS = 2000.0, 50.0
STARTUP_S = 30.0
SEEDS = 5
"""Seeds of the results file."""
WORKERS_MAX, WORKERS_AT_START = 8, 4
ENGINE = EngineArgs(startup_time=STARTUP_S)
PROMPT_TOKENS, OUTPUT_TOKENS, SIGMA = 10_000, 350, 0.7
"""Means and spread of the log-normal lengths of generated loads: those of the conversation trace, without shared prefixes."""
BLOCK = 512

SLA = {"optimization_target": "sla", "mode": "agg", "ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "max_gpu_budget": WORKERS_MAX}
PRESETS: dict[str, dict[str, Any]] = {
    "throughput_180_5": {"enable_throughput_scaling": True, "enable_load_scaling": False},
    "hybrid_180_5": {"enable_throughput_scaling": True, "enable_load_scaling": True},
    "load_180_10": {
        "enable_throughput_scaling": False,
        "enable_load_scaling": True,
        "load_adjustment_interval_seconds": 10,
    },
}
"""Upstream's presets, with its predictor and sensitivity defaults."""
FORECAST = "forecast"
KNOWING = {"oracle": STARTUP_S + 5.0, "known rate": 0.0}
"""Planners that know the arrivals: those of the start-up time and one interval, or only the present ones."""
UPSTREAM_SHARE = 0.9
"""Fraction of the static maximum's goodput that an upstream preset must reach to be compared with."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner-forecast.md"
BEGIN, END = "<!-- figures: python -m benchmarks.planner_quality --docs -->", "<!-- end of figures -->"

Rate = Callable[[float, float, random.Random], Callable[[float], float]]


def sine(seconds: float, _: float, rng: random.Random) -> Callable[[float], float]:
    return lambda at: 6 - 5 * math.cos(2 * math.pi * at / 450)


def step(seconds: float, _: float, rng: random.Random) -> Callable[[float], float]:
    return lambda at: 10.0 if seconds / 3 <= at < 2 * seconds / 3 else 2.0


def bursts(seconds: float, _: float, rng: random.Random) -> Callable[[float], float]:
    begins, at = list[float](), 60.0
    while at < seconds:
        begins.append(at)
        at += 45 + rng.expovariate(1 / 150)
    return lambda at: 9.0 if any(begin <= at < begin + 45 for begin in begins) else 2.0


def ramp(seconds: float, _: float, rng: random.Random) -> Callable[[float], float]:
    return lambda at: 1 + 11 * at / seconds


GENERATED: dict[str, Rate] = {"sine": sine, "bursts": bursts, "step x5": step, "slow ramp": ramp}
TRACED = {"conversation x1": 1.0, "conversation x2": 2.0}
TUNING = ("conversation x1", "sine", "bursts")
"""Loads on which the constants of `forecast` are chosen; x1 is the first half of the trace, x2 the second."""
PEAK = 12.0


@dataclass(frozen=True, slots=True)
class QualityCell:
    """One run."""

    load: str
    seed: int
    contender: str
    seconds: float
    trace: str | None


@dataclass(frozen=True, slots=True)
class QualityRow:
    """Figures of one run."""

    load: str
    seed: int
    contender: str
    goodput: float
    sla_met: float
    gpu_hours: float
    goodput_per_gpu: float
    mean_ttft_ms: float
    mean_tpot_ms: float
    events: int


def generated(kind: str, seconds: float, seed: int) -> list[ReplaySession]:
    """Arrivals of a Poisson process whose rate varies, by thinning."""
    rng = random.Random(seed)
    rate = GENERATED[kind](seconds, 0.0, rng)
    found, at, block = list[ReplaySession](), 0.0, 0
    while (at := at + rng.expovariate(PEAK)) < seconds:
        if rng.random() * PEAK > rate(at):
            continue
        prompt, output = (
            max(1, int(rng.lognormvariate(math.log(size) - SIGMA**2 / 2, SIGMA)))
            for size in (PROMPT_TOKENS, OUTPUT_TOKENS)
        )
        prompt = min(prompt, 100_000)
        blocks = -(-prompt // BLOCK)
        turn = Turn(f"r{len(found)}", prompt, output, range(block, block + blocks), at * 1000)
        found.append(ReplaySession(f"s{len(found)}", [turn]))
        block += blocks
    return found


def traced(path: str, speedup: float, seconds: float) -> list[ReplaySession]:
    """A window of the trace: from its start at native rate, from its middle at double rate."""
    sessions = read([path])
    times = [session.turns[0].at_ms or 0.0 for session in sessions]
    begin = 0.0 if speedup == 1 else max(times) / 2
    end = min(begin + seconds * 1000 * speedup, max(times) / 2 if speedup == 1 else math.inf)
    found = []
    for session, at_ms in zip(sessions, times, strict=True):
        if begin <= at_ms < end:
            turn = session.turns[0]
            moved = Turn(
                turn.request_id, turn.input_tokens, turn.output_tokens, turn.hash_ids, (at_ms - begin) / speedup
            )
            found.append(ReplaySession(session.session_id, [moved]))
    return found


def planner_of(contender: str, sessions: Sequence[ReplaySession]) -> Callable[[], Planner] | None:
    """The planner of a contender; None for a static one."""
    if contender.startswith("static"):
        return None
    if contender in KNOWING:
        return lambda: OraclePlanner(
            KnownDemand(sessions, ENGINE), KNOWING[contender], ITL_MS, WORKERS_MAX, name=contender
        )
    policy = {"scaling_policy": "forecast"} if contender == FORECAST else PRESETS[contender]
    config = parse({**SLA, **policy})
    return lambda: CorePlanner(config, {EngineRole.AGGREGATED: ENGINE}, name=contender)


def run(cell: QualityCell) -> QualityRow:
    """Simulate one run."""
    if cell.load in TRACED:
        assert cell.trace is not None
        sessions = traced(cell.trace, TRACED[cell.load], cell.seconds)
    else:
        sessions = generated(cell.load, cell.seconds, 1000 + cell.seed)
    is_static = cell.contender.startswith("static")
    outcome = Scenario(
        sessions=sessions,
        workers=int(cell.contender.split()[1]) if is_static else WORKERS_AT_START,
        router_mode="kv_router",
        engine=ENGINE,
        planner=planner_of(cell.contender, sessions),
        seed=cell.seed,
    ).run()
    rows = rows_of(outcome.flights)
    objectives = Objectives(TTFT_MS, ITL_MS)
    good = sum(row.output_length for row in rows if objectives.are_met(row))
    span_s = max(session.turns[0].at_ms or 0.0 for session in sessions) / 1000
    latencies = [row.itl_ms for row in rows if row.itl_ms is not None]
    return QualityRow(
        cell.load,
        cell.seed,
        cell.contender,
        good / span_s,
        sum(map(objectives.are_met, rows)) / len(rows),
        outcome.worker_ms / 3_600_000,
        good * 1000 / outcome.worker_ms,
        mean(row.ttft_ms for row in rows),
        mean(latencies),
        len(outcome.planner.scaling_events) if outcome.planner else 0,
    )


FIGURES = ("goodput", "sla_met", "gpu_hours", "goodput_per_gpu", "mean_ttft_ms", "mean_tpot_ms", "events")


def averaged(rows: Sequence[QualityRow]) -> dict[str, dict[str, dict[str, float]]]:
    """Means over the seeds: load → contender → figure."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load, contender in dict.fromkeys((row.load, row.contender) for row in rows):
        of = [row for row in rows if (row.load, row.contender) == (load, contender)]
        found.setdefault(load, {})[contender] = {
            name: mean(float(getattr(row, name)) for row in of) for name in FIGURES
        }
    return found


def verdict(figures: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Ratios of the forecast policy on one load."""
    best = figures[f"static {WORKERS_MAX}"]["goodput"]
    mine = figures[FORECAST]
    able = [name for name in PRESETS if name in figures and figures[name]["goodput"] >= UPSTREAM_SHARE * best]
    static = [name for name in figures if name.startswith("static") and figures[name]["goodput"] >= 0.97 * best]
    rival = max(able, key=lambda name: figures[name]["goodput_per_gpu"], default=None)
    lean = max(static, key=lambda name: figures[name]["goodput_per_gpu"])
    return {
        "goodput_share": mine["goodput"] / best,
        "rival": rival,
        "per_gpu_ratio": mine["goodput_per_gpu"] / figures[rival]["goodput_per_gpu"] if rival else None,
        "best_static": lean,
        "per_gpu_over_best_static": mine["goodput_per_gpu"] / figures[lean]["goodput_per_gpu"],
        "mean_tpot_ms": mine["mean_tpot_ms"],
    }


def documented(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The table of docs/planner-forecast.md."""
    rows = []
    for load, figures in found.items():
        one = verdict(figures)
        best = figures[f"static {WORKERS_MAX}"]["goodput"]
        upstream = max(PRESETS, key=lambda name: figures[name]["goodput"])
        rows.append(
            [
                f"{load} ({'tuning' if load in TUNING else 'judging'})",
                f"{100 * one['goodput_share']:.1f} %",
                *(f"{100 * figures[name]['goodput'] / best:.1f} %" for name in KNOWING),
                f"none (best: {100 * figures[upstream]['goodput'] / best:.0f} %)"
                if one["rival"] is None
                else f"{one['per_gpu_ratio']:.2f} (`{one['rival']}`)",
                f"{one['per_gpu_over_best_static']:.2f} ({one['best_static']})",
                f"{figures[FORECAST]['goodput_per_gpu'] / figures['oracle']['goodput_per_gpu']:.2f}",
                f"{one['mean_tpot_ms']:.1f} ms",
            ]
        )
    head = (
        "load",
        "goodput of static 8",
        "of it: oracle",
        "of it: known rate",
        "per GPU over upstream",
        "per GPU over best static with 97 %",
        "per GPU over oracle",
        "mean TPOT",
    )
    return table(head, rows)


def write_docs() -> None:
    """Replace the table of the documentation with that of the results file."""
    saved = json.loads((Path(RESULTS) / "planner_quality.json").read_text())
    found = averaged([QualityRow(**row) for row in saved["rows"]])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{documented(found)}\n{END}{after}")


def printed(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Print a table per load, and the ratios."""
    head = ("", "goodput tok/s", "SLA met", "GPU-hours", "goodput per GPU", "TTFT ms", "TPOT ms", "events")
    for load, figures in found.items():
        print_line(f"\n{load} ({'tuning' if load in TUNING else 'judging'})\n")
        print_line(table(head, [[name, *(number(one[figure]) for figure in FIGURES)] for name, one in figures.items()]))
    print_line(
        "\nforecast: goodput over static 8; goodput per GPU over the best upstream preset with 90 % of it; over the best static\n"
    )
    lines = []
    for load, figures in found.items():
        one = verdict(figures)
        ratio = "-" if one["per_gpu_ratio"] is None else f"{one['per_gpu_ratio']:.2f} ({one['rival']})"
        static = f"{one['per_gpu_over_best_static']:.2f} ({one['best_static']})"
        lines.append([load, f"{100 * one['goodput_share']:.1f} %", ratio, static, f"{one['mean_tpot_ms']:.1f}"])
    print_line(table(("load", "goodput", "per GPU, upstream", "per GPU, static", "TPOT ms"), lines))


def cells_of(given: argparse.Namespace) -> list[QualityCell]:
    """The runs that the flags select."""
    loads = [*(TRACED if given.trace else ()), *GENERATED]
    loads = [load for load in loads if (not given.tune or load in TUNING) and (not given.load or load in given.load)]
    sizes = range(1, WORKERS_MAX + 1) if given.full else (2, 3, 4, 6, WORKERS_MAX)
    contenders = [*(f"static {size}" for size in sizes), *PRESETS, *KNOWING, FORECAST]
    contenders = [name for name in contenders if not given.contender or name in given.contender]
    seconds = given.seconds or (1800.0 if given.full else 600.0)
    found = []
    for load in loads:
        for seed in range(1 if load in TRACED else given.seeds or (5 if given.full else 1)):
            found += [QualityCell(load, seed, contender, seconds, given.trace) for contender in contenders]
    return found


def main() -> None:
    """Run the selected cells and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="the Mooncake conversation trace; without it only the generated loads")
    parser.add_argument("--full", action="store_true", help="half an hour of each load, five seeds, static 1 to 8")
    parser.add_argument("--tune", action="store_true", help="only the loads on which constants are chosen")
    parser.add_argument("--load", action="append", default=[], help="only this load; repeatable")
    parser.add_argument("--contender", action="append", default=[], help="only this contender; repeatable")
    parser.add_argument("--seconds", type=float, help="duration of each load")
    parser.add_argument("--seeds", type=int, help=f"seeds of generated loads; the results file has {SEEDS}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="only write the table of the results file into docs/")
    given = parser.parse_args()
    if given.docs:
        write_docs()
        return
    cells = cells_of(given)
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        rows = pool.map(run, cells, chunksize=1)
    found = averaged(rows)
    if given.contender:
        for row in rows:
            print_line(
                " ".join(
                    f"{key}={value if isinstance(value, str) else number(value)}" for key, value in asdict(row).items()
                )
            )
        return
    printed(found)
    path = write_result(
        "planner_quality",
        {"rows": [asdict(row) for row in rows], "verdicts": {load: verdict(one) for load, one in found.items()}},
        is_whole=bool(given.trace)
        and given.seeds == SEEDS
        and not (given.full or given.tune or given.load or given.seconds),
    )
    print_line(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
