"""Frontend CPU: processor time per output token of our frontend and of the released one, in one run.

    python -m benchmarks.frontend_cpu [--quick]

Each frontend runs with its own implementation's mocker and gets the same load: saturated, with a mocker without
simulated delays, and paced, with one as fast as a real engine; in round robin with one worker, and with the KV router
and two workers that publish every block. The systems alternate after each run; the figures are medians.

The extra cost of the KV router is its cost over round robin with the same two workers, in alternating windows: a second
worker alone raises the cost of a paced token, because each wake-up then serves half as many streams.

A third table splits our time for a request by stage, from the frontend's own metrics. Those are wall-clock times of
steps that do not wait, so on a busy machine they include some time of other processes; the rest is the remainder.
"""

import contextlib
import dataclasses
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.corpus import ROOT, Prompts, bench_model, cache_dir, read_prompts
from benchmarks.loadgen import Load, Report, build_requests, measure
from benchmarks.peer import VERSION, PeerMissing, ensure_peer
from benchmarks.report import OURS, THEIRS, guarded, machine, number, print_line, table, write_json
from benchmarks.report import RESULTS as RESULTS_DIR
from benchmarks.stacks import ENGINE, FRONTEND, HOST, MODEL_NAME, Implementation, Recipe, Stack, ours, theirs
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

RESULTS = os.path.join(RESULTS_DIR, "frontend_cpu.json")

OURS_ON_THEIRS = "ours+peer-mocker"
BARE = "bare writer"
BARE_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bare_writer.py")
SATURATED, PACED = "saturated", "paced"
ROUND_ROBIN, KV = "round-robin", "kv"
KV_WORKERS = 2  # A KV router with one worker would have no choice; one worker measures the frontend alone.
SPEEDUPS = {SATURATED: None, PACED: 1.0}

# A run during which other processes used more cores is repeated once, and marked if it happens again.
NOISE_CORES_MAX = 0.10
REPEATS_MAX = 6  # A busy machine is measured as it is: the systems alternate, which affects ratios least.
DRAIN_GUESS_S = {SATURATED: 0.5, PACED: 2.5}  # For the estimate that is printed first; no wait depends on it.


@dataclass(frozen=True, slots=True)
class Point:
    """One load on one speed of engine."""

    pace: str
    concurrency: int
    warmup_s: float
    window_s: float
    mode: str = ROUND_ROBIN
    workers: int = 1

    @property
    def label(self) -> str:
        name = f"{self.pace} c={self.concurrency}"
        if self.mode == ROUND_ROBIN:
            return name if self.workers == 1 else f"{name} on {self.workers} workers"
        return f"{name} {self.mode}"

    @property
    def seconds(self) -> float:
        return self.warmup_s + self.window_s + DRAIN_GUESS_S[self.pace]


FULL = (
    Point(SATURATED, 1, 1.0, 5.0),
    Point(SATURATED, 16, 1.0, 6.0),
    Point(SATURATED, 64, 1.5, 6.5),
    Point(SATURATED, 256, 2.0, 7.0),
    Point(SATURATED, 64, 1.5, 6.5, workers=KV_WORKERS),
    Point(SATURATED, 64, 1.5, 6.5, KV, KV_WORKERS),
    Point(SATURATED, 256, 2.0, 7.0, KV, KV_WORKERS),
    Point(PACED, 64, 3.0, 8.0),
    Point(PACED, 256, 4.0, 9.0),
    Point(PACED, 64, 3.0, 8.0, workers=KV_WORKERS),
    Point(PACED, 64, 3.0, 8.0, KV, KV_WORKERS),
)
QUICK = (
    Point(SATURATED, 1, 0.5, 2.0),
    Point(SATURATED, 64, 0.8, 2.2),
    Point(SATURATED, 64, 0.8, 2.2, KV, KV_WORKERS),
    Point(PACED, 64, 1.5, 2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Processor time per output token: our frontend against the released one."""

    quick: bool = option(False, "--quick", None, "Fewer points and shorter windows: under two minutes")
    reps: int = option(0, "--reps", None, "Repetitions of every point [3, quick 2]")
    same_engine: bool = option(False, "--same-engine", None, "Also drive our frontend with the released mocker")
    bare: bool = option(
        False, "--bare", None, "Also measure a program that only writes, at the pace of ours (paced loads)"
    )
    systems: list[str] = option([OURS, THEIRS], "--systems", None, "Which to measure: ours, theirs")
    paces: list[str] = option([SATURATED, PACED], "--paces", None, "Which speeds of engine: saturated, paced")
    modes: list[str] = option([ROUND_ROBIN, KV], "--router-modes", None, "Which router modes: round-robin, kv")
    concurrency: list[int] = option([], "--concurrency", None, "Only these numbers of streams")
    prompt_tokens: int = option(512, "--prompt-tokens", None, "Tokens of each prompt, template included")
    output_tokens: int = option(128, "--output-tokens", None, "Tokens of each answer")
    out: str = option("", "--out", None, "JSON file to write [benchmarks/results/frontend_cpu.json, in full runs]")

    def __post_init__(self) -> None:
        if self.reps < 0:
            raise ConfigError("--reps must be at least 1")
        for flag, given, known in (
            ("--systems", self.systems, (OURS, THEIRS)),
            ("--paces", self.paces, (SATURATED, PACED)),
            ("--router-modes", self.modes, (ROUND_ROBIN, KV)),
        ):
            if not given or not set(given) <= set(known):
                raise ConfigError(f"{flag} {','.join(given)}: expected some of {', '.join(known)}")

    @property
    def repetitions(self) -> int:
        return self.reps or (2 if self.quick else 3)

    def points(self) -> list[Point]:
        known = QUICK if self.quick else FULL
        points = [point for point in known if point.pace in self.paces and point.mode in self.modes]
        if self.concurrency:
            points = [point for point in points if point.concurrency in self.concurrency]
        if not points:
            raise ConfigError("no point is left to measure: widen --paces, --router-modes or --concurrency")
        return points

    def result_path(self) -> str:
        """Quick and partial runs do not replace the figures that the documentation cites."""
        is_whole = not self.quick and self.points() == list(FULL) and set(self.systems) == {OURS, THEIRS}
        return self.out or (RESULTS if is_whole else os.path.join(cache_dir(), "frontend_cpu.json"))


@dataclass(frozen=True, slots=True)
class Run:
    """One window of one system."""

    system: str
    point: Point
    rep: int
    report: Report
    stages: Mapping[str, float] = field(default_factory=dict)
    """Microseconds of a request in each stage, as the frontend itself counted; empty if it does not count."""

    @property
    def is_noisy(self) -> bool:
        return self.report.noise > NOISE_CORES_MAX


def recipes(
    systems: Sequence[str], peer: Implementation | None, *, is_same_engine: bool
) -> list[tuple[str, Implementation, Implementation]]:
    """Name, frontend and engine of each system to measure."""
    mine = ours()
    found = [(OURS, mine, mine)] if OURS in systems else []
    if peer is not None and THEIRS in systems:
        found.append((THEIRS, peer, peer))
    if peer is not None and is_same_engine:
        found.append((OURS_ON_THEIRS, mine, peer))
    return found


class Bench:
    """Points, stacks and the order in which they alternate."""

    def __init__(self, config: BenchConfig, peer: Implementation | None, print_line: Callable[[str], None]) -> None:
        self.config = config
        self.points = config.points()
        self.systems = recipes(config.systems, peer, is_same_engine=config.same_engine)
        self.print_line = print_line
        self.model = bench_model()
        self.prompts: Prompts = read_prompts(self.model, config.prompt_tokens)
        self.ready_s: dict[str, float] = {}
        self.repeats_left = REPEATS_MAX
        self.interval_ms: dict[Point, float] = {}
        """Time between two tokens of a stream of our frontend, for the bare writer."""

    def run(self) -> list[Run]:
        runs: list[Run] = []
        for pace, workers in dict.fromkeys((point.pace, point.workers) for point in self.points):
            here = [point for point in self.points if (point.pace, point.workers) == (pace, workers)]
            with contextlib.ExitStack() as open_stacks:
                stacks: dict[tuple[str, str], Stack] = {}
                for mode in dict.fromkeys(point.mode for point in here):
                    for name, frontend, engine in self.systems:
                        recipe = Recipe(
                            name=name,
                            frontend=frontend,
                            engine=engine,
                            speedup=SPEEDUPS[pace],
                            router_mode=mode,
                            workers=workers,
                        )
                        stack = stacks[name, mode] = open_stacks.enter_context(Stack(recipe, self.model))
                        load = f"{pace} {mode}" + (f" on {workers} workers" if workers > 1 else "")
                        self.ready_s[f"{name} {load}"] = round(stack.ready_s, 2)
                        self.print_line(f"{name} is ready ({load}, {stack.ready_s:.1f} s)")
                if self.config.bare and OURS in self.config.systems and (pace, workers) == (PACED, 1):
                    recipe = Recipe(
                        name="bare", frontend=ours(), engine=ours(), workers=0, frontend_program=BARE_PROGRAM,
                        frontend_flags=["--prompt-tokens", str(self.config.prompt_tokens)], variables={"PYTHONPATH": ROOT},
                    )  # fmt: skip
                    stacks[BARE, ROUND_ROBIN] = open_stacks.enter_context(Stack(recipe, self.model))
                runs += self._take_turns(here, stacks)
        return runs

    def _take_turns(self, points: Sequence[Point], stacks: Mapping[tuple[str, str], Stack]) -> Iterator[Run]:
        """Run every system at every point `reps` times, with a different first system each time."""
        for rep in range(self.config.repetitions):
            for index, point in enumerate(points):
                names = [name for name, _, _ in self.systems]
                for name in names if (rep + index) % 2 == 0 else reversed(names):
                    yield self._measure(name, stacks[name, point.mode], point, rep)
                if (BARE, point.mode) in stacks:
                    yield self._measure(BARE, stacks[BARE, point.mode], point, rep)

    def _measure(self, name: str, stack: Stack, point: Point, rep: int) -> Run:
        request_load = Load(
            host=HOST,
            port=stack.port,
            concurrency=point.concurrency,
            warmup_s=point.warmup_s,
            window_s=point.window_s,
            prompt_tokens=self.config.prompt_tokens,
            completion_tokens=self.config.output_tokens,
        )
        pace = {"interval_ms": round(self.interval_ms[point], 3)} if name == BARE else None
        requests = build_requests(request_load, MODEL_NAME, self.prompts.texts, self.prompts.words, pace)
        requests.count = random.randrange(2**31)  # No prompt of an earlier run may be in a prefix cache.

        def one() -> Run:
            if name == BARE:
                return Run(name, point, rep, measure(request_load, requests, stack.pids))
            before = stack.scrape()
            report = measure(request_load, requests, stack.pids)
            return Run(name, point, rep, report, stage_us(before, stack.scrape()) if name != THEIRS else {})

        run = one()
        if run.is_noisy and self.repeats_left:
            self.repeats_left -= 1
            run = min(run, one(), key=lambda each: each.report.noise)
        if name == OURS:
            self.interval_ms[point] = point.concurrency / run.report.tokens_per_s * 1e3
        self.print_line(progress(run))
        return run


def progress(run: Run) -> str:
    """Return one line for one run."""
    report, cost = run.report, run.report.costs[FRONTEND]
    line = (
        f"  {run.point.label:<19} rep {run.rep + 1} {run.system:<17} {cost.us_per_token:7.2f} us/token"
        f" {cost.us_per_request:8.0f} us/request {report.tokens_per_s:8.0f} tokens/s"
    )
    if report.bad or report.unanswered:
        line += f"  BAD {report.bad}, unanswered {report.unanswered}: {report.bad_example}"
    return line + (f"  (noise: {report.noise:.2f} cores)" if run.is_noisy else "")


# --- Stages of a request -------------------------------------------------------------------------------------------

STAGE = 'dynamo_frontend_stage_duration_seconds_{}{{stage="%s"}}'
STEPS = {
    "template": "dynamo_frontend_template_seconds_{}",
    "tokenize": "dynamo_frontend_tokenize_seconds_{}",
    "preprocess": STAGE % "preprocess",
    "route": STAGE % "route",
    "dispatch": STAGE % "dispatch",
    "queue": STAGE % "queue",
    "first token": STAGE % "transport_roundtrip",
}
"""Stages that our frontend counts: the last two are waits.

`preparing` includes template and tokens, `sending` the route.
"""
WORK = ("template", "tokenize", "prepare", "route", "send", "rest")
WAITS = ("queue", "first token")


def stage_us(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the microseconds of a request in each stage, between two scrapes of the metrics."""

    def mean_us(series: str) -> float:
        count = after.get(series.format("count"), 0.0) - before.get(series.format("count"), 0.0)
        total = after.get(series.format("sum"), 0.0) - before.get(series.format("sum"), 0.0)
        return total / count * 1e6 if count else 0.0

    found = {name: mean_us(series) for name, series in STEPS.items()}
    found["prepare"] = found.pop("preprocess") - found["template"] - found["tokenize"]
    found["send"] = found.pop("dispatch") - found["route"]
    return found


def stage_table(runs: Sequence[Run]) -> str:
    """Return medians of the stages of our frontend's requests; the rest is their responses."""
    rows = []
    for point, system in dict.fromkeys((run.point, run.system) for run in runs if run.stages):
        here = [run for run in runs if (run.point, run.system) == (point, system)]
        whole = statistics.median(run.report.costs[FRONTEND].us_per_request for run in here)
        value = {name: statistics.median(run.stages[name] for run in here) for name in here[0].stages}
        value["rest"] = whole - sum(value[name] for name in WORK if name != "rest")
        work = [number(value[name]) for name in WORK]
        rows.append([point.label, system, number(whole), *work, *(number(value[name] / 1e3) for name in WAITS)])
    head = ["load", "frontend", "CPU-µs per request", *(f"{name} µs" for name in WORK[:-1]), "answer and rest µs"]
    return table([*head, *(f"{name} ms, waited" for name in WAITS)], rows, 2)


# --- Output --------------------------------------------------------------------------------------------------------

METRICS: dict[str, Callable[[Report], float]] = {
    "frontend_us_per_token": lambda report: report.costs[FRONTEND].us_per_token,
    "frontend_us_per_request": lambda report: report.costs[FRONTEND].us_per_request,
    "frontend_kernel_us_per_token": lambda report: report.costs[FRONTEND].kernel_us_per_token,
    "frontend_cores": lambda report: report.costs[FRONTEND].cores,
    "frontend_rss_mib": lambda report: report.costs[FRONTEND].rss_mib,
    "engine_us_per_token": lambda report: report.costs[ENGINE].us_per_token if ENGINE in report.costs else math.nan,
    "engine_rss_mib": lambda report: report.costs[ENGINE].rss_mib if ENGINE in report.costs else math.nan,
    "tokens_per_s": lambda report: report.tokens_per_s,
    "requests_per_s": lambda report: report.requests_per_s,
    "tokens_per_receive": lambda report: report.tokens_per_receive,
    "ttft_ms_p50": lambda report: report.ttft_ms.get("p50", math.nan),
    "ttft_ms_p99": lambda report: report.ttft_ms.get("p99", math.nan),
    "itl_ms_p50": lambda report: report.itl_ms.get("p50", math.nan),
    "itl_ms_p99": lambda report: report.itl_ms.get("p99", math.nan),
    "load_us_per_token": lambda report: report.own_us_per_token,
    "noise_cores": lambda report: report.noise,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


Summary = dict[str, dict[str, dict[str, Spread]]]
"""Point, then system, then metric."""


def summarise(runs: Sequence[Run]) -> Summary:
    """Return medians over the repetitions; noisy ones count only if there is no other."""
    summary: Summary = {}
    for point in dict.fromkeys(run.point for run in runs):
        for system in dict.fromkeys(run.system for run in runs):
            here = [run for run in runs if run.point == point and run.system == system]
            reports = [run.report for run in here if not run.is_noisy] or [run.report for run in here]
            if reports:
                summary.setdefault(point.label, {})[system] = {
                    name: Spread.of([read(report) for report in reports]) for name, read in METRICS.items()
                }
    return summary


def ratios(summary: Summary) -> dict[str, dict[str, dict[str, float]]]:
    """Return the ratio of our median to theirs, for every point that both were measured at."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, systems in summary.items():
        for system, metrics in systems.items():
            if system != THEIRS and THEIRS in systems:
                base = systems[THEIRS]
                found.setdefault(label, {})[system] = {
                    name: spread.median / base[name].median for name, spread in metrics.items() if base[name].median
                }
    return found


def kv_over_round_robin(summary: Summary) -> dict[str, dict[str, float]]:
    """Return the cost of a token in KV mode over that in round robin with the same workers, by load and system."""
    found: dict[str, dict[str, float]] = {}
    for point in FULL:
        base = replace(point, mode=ROUND_ROBIN).label
        if point.mode != KV or point.label not in summary or base not in summary:
            continue
        for system, metrics in summary[point.label].items():
            if system in summary[base]:
                cost = metrics["frontend_us_per_token"].median / summary[base][system]["frontend_us_per_token"].median
                found.setdefault(point.label, {})[system] = cost
    return found


def markdown(summary: Summary) -> str:
    """Return two tables: the cost of the frontend, and the client's measurements."""
    spent = [
        "| load | frontend | CPU-µs per token | lowest–highest | of it kernel | CPU-µs per request | RSS MiB | ours/theirs per token |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    seen = [
        "| load | frontend | tokens/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | tokens per packet | engine CPU-µs per token |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    share = ratios(summary)
    for label, systems in summary.items():
        for system, metric in systems.items():
            value = {name: number(spread.median) for name, spread in metric.items()}
            token = metric["frontend_us_per_token"]
            ratio = share.get(label, {}).get(system, {}).get("frontend_us_per_token")
            spent.append(
                f"| {label} | {system} | {value['frontend_us_per_token']} | {number(token.low)}–{number(token.high)}"
                f" | {value['frontend_kernel_us_per_token']} | {value['frontend_us_per_request']}"
                f" | {value['frontend_rss_mib']}"
                f" | {'' if ratio is None else f'**{ratio:.2f}**'} |"
            )
            seen.append(
                f"| {label} | {system} | {value['tokens_per_s']} | {value['ttft_ms_p50']} / {value['ttft_ms_p99']}"
                f" | {value['itl_ms_p50']} / {value['itl_ms_p99']} | {value['tokens_per_receive']}"
                f" | {value['engine_us_per_token']} |"
            )
    return "\n".join([*spent, "", *seen])


def write_result(path: str, config: BenchConfig, bench: Bench, runs: Sequence[Run], peer_missing: str) -> None:
    """Write all runs and their medians."""
    summary = summarise(runs)
    medians = {
        label: {
            system: {name: dataclasses.asdict(spread) for name, spread in metrics.items()}
            for system, metrics in systems.items()
        }
        for label, systems in summary.items()
    }
    whole = {
        "machine": machine(),
        "peer": f"ai-dynamo {VERSION}" if not peer_missing else f"missing: {peer_missing}",
        "config": {
            "reps": config.repetitions,
            "prompt_tokens": config.prompt_tokens,
            "output_tokens": config.output_tokens,
            "quickack": True,
        },
        "ready_s": bench.ready_s,
        "ratios_to_theirs": ratios(summary),
        "kv_over_round_robin": kv_over_round_robin(summary),
        "medians": medians,
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    write_json(path, whole)


def estimate_s(points: Sequence[Point], reps: int, systems: int) -> float:
    """Return the duration of the windows, without process starts."""
    return sum(point.seconds for point in points) * reps * systems


def main() -> int:
    config = load(BenchConfig, sys.argv[1:], prog="python -m benchmarks.frontend_cpu")
    peer, missing = None, ""
    if THEIRS in config.systems or config.same_engine:
        try:
            peer = theirs(ensure_peer())
        except PeerMissing as error:
            missing = str(error)
            print_line(f"the released ai-dynamo {VERSION} is not measured: {missing}")
    print_line("preparing the model directory and the prompts (kept for the next run)")
    bench = Bench(config, peer, print_line)
    minutes = estimate_s(bench.points, config.repetitions, len(bench.systems)) / 60
    names = ", ".join(name for name, _, _ in bench.systems)
    print_line(
        f"measuring {names}: {len(bench.points)} points, {config.repetitions} repetitions, about {minutes:.0f} minutes"
    )
    runs = bench.run()
    path = config.result_path()
    write_result(path, config, bench, runs, missing)
    print_line(f"\n{markdown(summarise(runs))}\n\n{stage_table(runs)}")
    for load_label, systems in kv_over_round_robin(summarise(runs)).items():
        costs = ", ".join(f"{system} {cost:.2f}" for system, cost in systems.items())
        print_line(f"{load_label}: cost of a token over round robin with the same workers: {costs}")
    noisy = sum(run.is_noisy for run in runs)
    print_line(f"\n{len(runs)} runs, {noisy} with more than {NOISE_CORES_MAX} cores of other work; written to {path}")
    return 1 if any(run.report.bad or run.report.unanswered for run in runs) else 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
