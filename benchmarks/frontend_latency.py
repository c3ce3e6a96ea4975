"""Frontend latency: TTFT of a single request, and token pace of 1,000 streams on one core, against the released
frontend.

    python -m benchmarks.frontend_latency [--quick]

*First token*: one request at a time, with the implementation's own mocker without simulated delays: the result is the
time of frontend, transport and mocker. *Pace*: the frontend's processes may use one core; 1,000 streams of 128 tokens
come from the metronome (`metronome.py`, the same engine for both), as from eight engines of 125 streams each. The
interval between two tokens is set for each frontend so that the core is about half busy and no token is late. The
frontend's overhead is the time between tokens at the client, less that between the engine's own ticks, at the 99th
percentile. The load generator and the engine share the other cores; their delays are included.
"""

import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.corpus import bench_model, read_prompts
from benchmarks.loadgen import Load, Report, build_requests, measure, quantiles
from benchmarks.metronome import Beat, read_beats
from benchmarks.report import OURS, THEIRS, guarded, implementations, number, print_line, ratio, table, write_result
from benchmarks.stacks import ENGINE, FRONTEND, HOST, MODEL_NAME, Implementation, Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

METRONOME = os.path.join(os.path.dirname(os.path.abspath(__file__)), "metronome.py")
PROMPT_TOKENS = 512
FIRST_OUTPUT_TOKENS = 16
STREAM_TOKENS = 128
PHASES = 8
INTERVAL_FIRST_MS = 40.0
INTERVAL_MS = (5.0, 400.0)
HALF, HALF_SPREAD = 0.5, 0.07  # Target share of the core, and its tolerance.
IN_STEP, OUT_OF_STEP_FACTOR = 0.93, 1.6
TRIES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """Latency that our frontend and the released one add."""

    quick: bool = option(False, "--quick", None, "Shorter windows, and no results file: under two minutes")
    streams: int = option(1000, "--streams", None, "Streams on the one core")
    reps: int = option(3, "--reps", None, "Turns that both take for the first token")

    def __post_init__(self) -> None:
        if self.streams < PHASES or self.reps < 1:
            raise ConfigError(f"--streams: expected at least {PHASES}; --reps: at least 1")


@dataclass(frozen=True, slots=True)
class Pace:
    """Results of one frontend with all streams on one core."""

    interval_ms: float
    busy: float
    """Share of the core that the frontend used."""
    offered_per_s: float
    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    beat_p99_ms: float
    """99th percentile of the time between two ticks of the engine."""
    noise: float

    @property
    def added_p99_ms(self) -> float:
        return self.itl_p99_ms - self.beat_p99_ms

    @property
    def keeps_step(self) -> bool:
        """Whether the tokens arrived at the rate of the engine."""
        return self.tokens_per_s >= self.offered_per_s * IN_STEP

    @property
    def is_half(self) -> bool:
        return self.keeps_step and abs(self.busy - HALF) <= HALF_SPREAD


def beat_gaps_s(beats: Sequence[Beat], since_s: float, until_s: float) -> list[float]:
    """Return the times between ticks of each phase within a window, once for each stream that had a token at them."""
    last: dict[int, float] = {}
    gaps: list[float] = []
    for beat in beats:
        before = last.get(beat.phase)
        if before is not None and since_s <= beat.written_s <= until_s:
            gaps += [beat.written_s - before] * beat.streams
        last[beat.phase] = beat.written_s
    return gaps


def next_interval(pace: Pace) -> float:
    """Return the interval at which the core should be half busy; a frontend that fell behind needs more than it used."""
    low, high = INTERVAL_MS
    factor = pace.busy / HALF if pace.keeps_step else max(pace.busy / HALF, OUT_OF_STEP_FACTOR)
    return min(max(pace.interval_ms * factor, low), high)


@contextlib.contextmanager
def only_on(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this process to some cores during the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Bench:
    """Prompts, systems and loads of the benchmark."""

    def __init__(self, config: LatencyConfig, systems: Mapping[str, Implementation]) -> None:
        self.config = config
        self.systems = systems
        self.model = bench_model()
        self.prompts = read_prompts(self.model, PROMPT_TOKENS)
        self.cores = sorted(os.sched_getaffinity(0))

    def first_tokens(self) -> dict[str, dict[str, float]]:
        """Return the time to first token in milliseconds: medians of the rounds."""
        seen: dict[str, list[Report]] = {name: [] for name in self.systems}
        with contextlib.ExitStack() as opened:
            stacks = {
                name: opened.enter_context(
                    Stack(Recipe(name=name, frontend=implementation, engine=implementation), self.model)
                )
                for name, implementation in self.systems.items()
            }
            for rep in range(self.config.reps):
                names = list(stacks) if rep % 2 == 0 else list(reversed(stacks))
                for name in names:
                    window_s = 1.5 if self.config.quick else 4.0
                    report = self._measure(stacks[name], 1, FIRST_OUTPUT_TOKENS, 0.0, 1.0, window_s)
                    seen[name].append(report)
                    print_line(f"  first token, turn {rep + 1}, {name}: {number(report.ttft_ms['p50'])} ms")
        return {
            name: {
                quantile: statistics.median(report.ttft_ms[quantile] for report in reports)
                for quantile in ("p50", "p90", "p99")
            }
            for name, reports in seen.items()
        }

    def pace(self, name: str, implementation: Implementation) -> list[Pace]:
        """Return all attempts of one frontend; the last one is the closest to half load."""
        found: list[Pace] = []
        interval_ms = INTERVAL_FIRST_MS
        while not found or not (found[-1].is_half or len(found) == (1 if self.config.quick else TRIES_MAX)):
            found.append(self._pace(name, implementation, interval_ms))
            interval_ms = next_interval(found[-1])
        return found

    def _pace(self, name: str, implementation: Implementation, interval_ms: float) -> Pace:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
            beats = os.path.join(folder, "beats")
            core, others = self.cores[0], self.cores[1:] or self.cores
            flags = ["--interval-ms", f"{interval_ms:g}", "--phases", str(PHASES), "--beats", beats]
            recipe = Recipe(
                name=name,
                frontend=implementation,
                engine=ours(),
                program=METRONOME,
                engine_flags=flags,
                cores={FRONTEND: [core], ENGINE: others},
            )
            stack = opened.enter_context(Stack(recipe, self.model))
            opened.enter_context(only_on(others))
            ramp_s = STREAM_TOKENS * interval_ms / 1e3  # Length of a response: later streams begin and end evenly.
            window_s = 3.0 if self.config.quick else 8.0
            began = time.perf_counter()
            report = self._measure(stack, self.config.streams, STREAM_TOKENS, ramp_s, ramp_s + 1.0, window_s)
            since = began + ramp_s + 1.0
            gaps = quantiles(beat_gaps_s(list(read_beats(beats)), since, since + window_s))
        found = Pace(
            interval_ms=interval_ms,
            busy=report.costs[FRONTEND].cores,
            offered_per_s=self.config.streams / interval_ms * 1e3,
            tokens_per_s=report.tokens_per_s,
            itl_p50_ms=report.itl_ms["p50"],
            itl_p99_ms=report.itl_ms["p99"],
            beat_p99_ms=gaps["p99"],
            noise=report.noise,
        )
        print_line(
            f"  {self.config.streams} streams, {name}: a token every {interval_ms:.0f} ms, core {found.busy:.0%} busy,"
            f" ITL p99 {number(found.itl_p99_ms)} ms, engine {number(found.beat_p99_ms)} (noise: {found.noise:.2f} cores)"
        )
        return found

    def _measure(
        self, stack: Stack, streams: int, tokens: int, ramp_s: float, warmup_s: float, window_s: float
    ) -> Report:
        work = Load(
            host=HOST,
            port=stack.port,
            concurrency=streams,
            ramp_s=ramp_s,
            warmup_s=warmup_s,
            window_s=window_s,
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=tokens,
        )
        requests = build_requests(work, MODEL_NAME, self.prompts.texts, self.prompts.words)
        requests.count = random.randrange(2**31)
        report = measure(work, requests, stack.pids)
        if report.bad:
            raise ConnectionError(f"{report.bad} bad answers: {report.bad_example}\n{stack.logs()}")
        return report


def markdown(first: Mapping[str, Mapping[str, float]], paces: Mapping[str, Sequence[Pace]], streams: int) -> str:
    """Return both tables, with the ratio of ours to theirs."""
    rows = [[name, *(number(value) for value in seen.values())] for name, seen in first.items()]
    if OURS in first and THEIRS in first:
        rows.append(["**ours/theirs**", *(ratio(first[OURS][which], first[THEIRS][which]) for which in first[OURS])])
    head = ["first token, one at a time", "p50 ms", "p90 ms", "p99 ms"]
    parts = [table(head, rows)]
    rows = []
    for name, tries in paces.items():
        one = tries[-1]
        rows.append(
            [
                name, number(one.interval_ms), number(one.tokens_per_s), f"{one.busy:.0%}", number(one.itl_p50_ms),
                number(one.itl_p99_ms), number(one.beat_p99_ms), number(one.added_p99_ms),
            ]
        )  # fmt: skip
    if OURS in paces and THEIRS in paces:
        mine, other = paces[OURS][-1], paces[THEIRS][-1]
        rate, added = ratio(mine.tokens_per_s, other.tokens_per_s), ratio(mine.added_p99_ms, other.added_p99_ms)
        rows.append(["**ours/theirs**", "", rate, "", "", "", "", added])
    head = [
        f"{streams:,} streams on a core", "interval ms", "tokens/s", "core busy", "ITL p50 ms", "ITL p99 ms",
        "engine's p99 ms", "added p99 ms",
    ]  # fmt: skip
    return "\n\n".join([*parts, table(head, rows)])


def main() -> int:
    config = load(LatencyConfig, sys.argv[1:], prog="python -m benchmarks.frontend_latency")
    systems = implementations()
    bench = Bench(config, systems)
    first = bench.first_tokens()
    paces = {name: bench.pace(name, implementation) for name, implementation in systems.items()}
    whole = not config.quick and THEIRS in systems
    found = {
        "first_token_ms": first,
        "streams": config.streams,
        "paces": {
            name: [asdict(one) | {"added_p99_ms": one.added_p99_ms} for one in tries] for name, tries in paces.items()
        },
    }
    path = write_result("frontend_latency", found, is_whole=whole)
    print_line(f"\n{markdown(first, paces, config.streams)}\n\nwritten to {path}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
