"""Cost of a call and of a token on the request plane: ours against the released bindings, in one run.

    python -m benchmarks.request_plane [--calls 2000] [--streams 64] [--tokens 256] [--rounds 3]

One program, written against the Python API that both packages have, is run under each: two processes over loopback TCP.
Then the same between the two implementations, and our own engines' path without async generators
(`benchmarks.response_frames`).
"""

import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import response_frames
from benchmarks.plane import Party, pair, pythons
from benchmarks.report import write_result
from dynamo.core.config import exit_on_config_error, load, option

WARM_UP_CALLS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlaneBench:
    """Calls, and tokens in streams."""

    calls: int = option(2000, "--calls", None, "Calls with one token each")
    concurrency: int = option(16, "--concurrency", None, "Calls at a time")
    streams: int = option(64, "--streams", None, "Streams at a time")
    tokens: int = option(256, "--tokens", None, "Tokens of each stream")
    rounds: int = option(3, "--rounds", None, "Turns that the systems take; figures are medians")
    quick: bool = option(False, "--quick", None, "One short round, and no results file")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one round of one pair."""

    calls_per_s: float
    caller_us_per_call: float
    worker_us_per_call: float
    tokens_per_s: float
    caller_us_per_token: float
    worker_us_per_token: float


def cost(caller: Party, worker: Party, calls: int, concurrency: int, tokens: int) -> tuple[float, float, float]:
    """Return seconds, and processor seconds of caller and worker, for that many calls."""
    before = caller.do("used")["cpu_s"], worker.do("used")["cpu_s"]
    elapsed_s = caller.do("run", calls=calls, concurrency=concurrency, tokens=tokens)["elapsed_s"]
    return elapsed_s, caller.do("used")["cpu_s"] - before[0], worker.do("used")["cpu_s"] - before[1]


def measure(caller: Party, worker: Party, config: RequestPlaneBench) -> Figures:
    caller.do("run", calls=WARM_UP_CALLS, concurrency=config.concurrency, tokens=1)
    calls_s, *calls_cpu = cost(caller, worker, config.calls, config.concurrency, 1)
    streams_s, *streams_cpu = cost(caller, worker, config.streams, config.streams, config.tokens)
    tokens = config.streams * config.tokens
    return Figures(
        calls_per_s=config.calls / calls_s,
        caller_us_per_call=calls_cpu[0] / config.calls * 1e6,
        worker_us_per_call=calls_cpu[1] / config.calls * 1e6,
        tokens_per_s=tokens / streams_s,
        caller_us_per_token=streams_cpu[0] / tokens * 1e6,
        worker_us_per_token=streams_cpu[1] / tokens * 1e6,
    )


def rounds(config: RequestPlaneBench) -> dict[str, list[Figures]]:
    """Run all pairs in turn, so that background load affects all of them."""
    python = pythons()
    pairs = {f"{caller} → {worker}": (python[caller], python[worker]) for caller in python for worker in python}
    figures: dict[str, list[Figures]] = {name: [] for name in pairs}
    for _ in range(config.rounds):
        for name, (caller_python, worker_python) in pairs.items():
            with pair(caller_python, worker_python) as (caller, worker):
                figures[name].append(measure(caller, worker, config))
    return figures


def median(figures: list[Figures]) -> Figures:
    return Figures(
        *(statistics.median(values) for values in zip(*(asdict(one).values() for one in figures), strict=True))
    )


def show(medians: dict[str, Figures]) -> dict[str, float]:
    """Print the table; return the ratio of ours to theirs."""
    print(
        f"{'caller → worker':<18}{'calls/s':>9}{'µs/call':>9}{'+ worker':>9}{'tokens/s':>10}{'µs/token':>10}{'+ worker':>9}"
    )
    for name, one in medians.items():
        print(
            f"{name:<18}{one.calls_per_s:>9.0f}{one.caller_us_per_call:>9.0f}{one.worker_us_per_call:>9.0f}"
            f"{one.tokens_per_s:>10.0f}{one.caller_us_per_token:>10.2f}{one.worker_us_per_token:>9.2f}"
        )
    ours, theirs = medians["ours → ours"], medians.get("theirs → theirs")
    if theirs is None:
        return {}
    ratios = {
        "calls_per_s": ours.calls_per_s / theirs.calls_per_s,
        "cpu_per_call": (ours.caller_us_per_call + ours.worker_us_per_call)
        / (theirs.caller_us_per_call + theirs.worker_us_per_call),
        "tokens_per_s": ours.tokens_per_s / theirs.tokens_per_s,
        "cpu_per_token": (ours.caller_us_per_token + ours.worker_us_per_token)
        / (theirs.caller_us_per_token + theirs.worker_us_per_token),
    }
    print("ours/theirs: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    return ratios


def frames(config: RequestPlaneBench) -> dict[str, float]:
    """Measure both framings with an engine that writes to its replies, without async generators."""
    found: dict[str, float] = {}
    for name, is_batched in (("batched", True), ("upstream", False)):
        worker, caller = response_frames.measure(is_batched, config.streams, config.tokens)
        found |= {f"{name}_worker_us_per_token": worker, f"{name}_caller_us_per_token": caller}
        print(f"engine to engine, {name} frames: {worker:.2f} µs a token in the worker, {caller:.2f} in the caller")
    return found


def main() -> int:
    config = load(RequestPlaneBench, sys.argv[1:], prog="python -m benchmarks.request_plane")
    if config.quick:
        config = RequestPlaneBench(calls=500, streams=16, tokens=64, rounds=1, quick=True)
    figures = rounds(config)
    ratios = show({name: median(all_rounds) for name, all_rounds in figures.items()})
    engines = frames(config)
    result: dict[str, Any] = {
        "medians": {name: asdict(median(all_rounds)) for name, all_rounds in figures.items()},
        "ratios": ratios,
        "engines": engines,
        "rounds": {name: [asdict(one) for one in all_rounds] for name, all_rounds in figures.items()},
    }
    kept = {"settings": asdict(config), "figures": result}
    print(f"written to {write_result('request_plane', kept, is_whole=not config.quick)}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
