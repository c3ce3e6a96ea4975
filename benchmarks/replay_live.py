"""Replay against live: request overhead beyond the simulated engine, fitted on one load and checked on another.

    python -m benchmarks.replay_live [--requests 400] [--workers 4]

A frontend in KV mode and mockers at real speed receive a light load over HTTP; the same load is simulated. The
difference of the median times to first token is the overhead (`dynamo replay --request-overhead-ms`). A second load
with other lengths at twice the rate gives the error of the simulation without and with it. Only a quiet machine gives
an overhead that applies to other machines: the result contains the load average.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.corpus import bench_model
from benchmarks.report import machine, print_line, table, write_result
from benchmarks.stacks import Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.replay.config import ReplayConfig
from dynamo.replay.main import run_online
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario

FIGURES = (
    "median_ttft_ms",
    "p90_ttft_ms",
    "median_tpot_ms",
    "p90_tpot_ms",
    "median_e2e_latency_ms",
    "p90_e2e_latency_ms",
)
BLOCK = 64
BATCH_TOKENS = 8192
LOADS = (
    ("--input-tokens=2048", "--output-tokens=64", "--request-rate=4"),
    ("--input-tokens=4096", "--output-tokens=128", "--request-rate=8"),
)
"""The load of the fit, and that of the check."""
COMMON = ("--shared-prefix-ratio=0.5", "--num-prefix-groups=16", f"--trace-block-size={BLOCK}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBench:
    """Options of the program."""

    requests: int = option(400, "--requests", None, "Requests of each load")
    workers: int = option(4, "--workers", None, "Mockers")
    quick: bool = option(False, "--quick", None, "40 requests, and no result file")


def figures(outcome: RunOutcome) -> dict[str, float]:
    """Return medians and p90 in milliseconds."""
    found = summary_of(outcome, rows_of(outcome.flights))
    return {name: float(found[name]) for name in FIGURES}


def simulated(config: ReplayConfig, overhead_ms: float) -> dict[str, float]:
    """Return the figures of a load in virtual time."""
    (scenario,) = config.scenarios(config.source()).values()
    assert isinstance(scenario, Scenario)
    return figures(replace(scenario, overhead_ms=overhead_ms).run())


def configs(shape: tuple[str, ...], bench: LiveBench, url: str) -> tuple[ReplayConfig, ReplayConfig]:
    """Return the settings of a live run and of its simulation."""
    common = [*shape, *COMMON, f"--request-count={40 if bench.quick else bench.requests}"]
    live = load(ReplayConfig, [*common, "--replay-mode=online", f"--url={url}", "--prompt-token-ids=10-200"])
    engine = f'{{"block_size": {BLOCK}, "max_num_batched_tokens": {BATCH_TOKENS}}}'
    flags = [f"--num-workers={bench.workers}", "--router-mode=kv", f"--extra-engine-args={engine}"]
    return live, load(ReplayConfig, [*common, *flags])


def main() -> int:
    """Run both loads live, fit the overhead to the first, print the errors on both, and write the result file."""
    bench = load(LiveBench, sys.argv[1:])
    recipe = Recipe(
        name="live",
        frontend=ours(),
        engine=ours(),
        speedup=1.0,
        workers=bench.workers,
        router_mode="kv",
        engine_flags=("--block-size", f"{BLOCK}", "--max-num-batched-tokens", f"{BATCH_TOKENS}"),
    )
    rows, result = [], dict[str, Any]()
    overhead_ms = 0.0
    for name, shape in zip(("fit", "check"), LOADS, strict=True):
        with Stack(recipe, bench_model()) as stack:  # Empty caches for each load, as in the simulation.
            live_config, config = configs(shape, bench, f"http://127.0.0.1:{stack.port}")
            live = figures(run_online(live_config, live_config.source(), None))
        plain = simulated(config, 0.0)
        if name == "fit":
            overhead_ms = max(0.0, live["median_ttft_ms"] - plain["median_ttft_ms"])
        fitted = simulated(config, overhead_ms)
        result[name] = {"live": live, "simulated": plain, "with_overhead": fitted}
        for figure in FIGURES:
            errors = [f"{100 * (one[figure] / live[figure] - 1):+.1f} %" for one in (plain, fitted)]
            rows.append([f"{name}: {figure}", f"{live[figure]:.2f}", *errors])
    print_line(f"overhead: {overhead_ms:.2f} ms (--request-overhead-ms)")
    print_line(table(["", "live", "simulated", "with overhead"], rows))
    whole = {"machine": machine(), "overhead_ms": overhead_ms, "requests": bench.requests, **result}
    print_line(write_result("replay_live", whole, is_whole=not bench.quick))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
