"""Replay against live: this stack and the released one at real speed, compared with the simulation of the same load.

    python -m benchmarks.replay_live [--engine-types vllm,sglang,trtllm] [--stacks ours,theirs] [--requests 2000]

A frontend in KV mode and mockers at real speed receive a trace over HTTP, from the same client; the same trace is simulated: random
arrivals, prompts and answers of random lengths, common prefixes (`replay_peer.write_trace`). A light load gives the overhead of a request beyond the engine, as the difference of the median times to first token
(`dynamo replay --request-overhead-ms`). A second load at a higher rate gives the error of the simulation
without and with it. The KV router breaks ties at random: the median of 200 requests differs by 0.7 to 1 ms between runs, so that the fit has
three times as many, and the simulated figures are means over several seeds. Only a quiet machine gives an overhead that applies to other
machines: every entry of the result contains the load average. A run of one stack and one engine type takes four minutes and replaces its
entry only; one that fails is named at its end, and the others run.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.corpus import bench_model
from benchmarks.replay_peer import write_trace
from benchmarks.report import OURS, RESULTS, THEIRS, guarded, implementations, machine, print_line, table, write_result
from benchmarks.stacks import Implementation, Recipe, Stack, StackFailed
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
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
ENGINES = ("vllm", "sglang", "trtllm")
LIGHT_RATE, BUSY_RATE = 6.0, 20.0
"""Requests per second of the load of the fit, and of that of the check."""
LIGHT_REQUESTS = 600
SEEDS = range(42, 50)
"""Seeds of the simulations."""
QUICK_SHARE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBench:
    """Options of the program."""

    engine_types: list[str] = option([*ENGINES], "--engine-types", None, "Simulated engines: vllm, sglang, trtllm")
    stacks: list[str] = option([OURS, THEIRS], "--stacks", None, "Live systems: ours, theirs")
    requests: int = option(2000, "--requests", None, "Requests of the second load")
    workers: int = option(4, "--workers", None, "Mockers")
    quick: bool = option(False, "--quick", None, "A tenth of the requests, one engine, and no result file")

    def __post_init__(self) -> None:
        for flag, values, allowed in (
            ("--engine-types", self.engine_types, ENGINES),
            ("--stacks", self.stacks, (OURS, THEIRS)),
        ):
            if unknown := set(values) - {*allowed}:
                raise ConfigError(f"{flag} {min(unknown)}: must be among {', '.join(allowed)}")

    def count(self, requests: int) -> int:
        """Return the requests of a load."""
        return max(1, requests // QUICK_SHARE) if self.quick else requests


def figures(outcome: RunOutcome) -> dict[str, float]:
    """Return medians and 90th percentiles in milliseconds. Raise `RuntimeError` if a request failed."""
    if outcome.unfinished:
        raise RuntimeError(f"{outcome.unfinished} requests failed: {outcome.failures.most_common(1)}")
    found = summary_of(outcome, rows_of(outcome.flights))
    return {name: float(found[name]) for name in FIGURES}


def simulated(config: ReplayConfig, overhead_ms: float = 0.0) -> dict[str, float]:
    """Return the figures of a load in virtual time: means over the seeds."""
    (scenario,) = config.scenarios(config.source()).values()
    assert isinstance(scenario, Scenario)
    runs = [figures(replace(scenario, overhead_ms=overhead_ms, seed=seed).run()) for seed in SEEDS]
    return {name: fmean(run[name] for run in runs) for name in FIGURES}


def live(recipe: Recipe, trace: str) -> dict[str, float]:
    """Return the figures of a load in real time, with new processes and hence empty caches, as in the simulation."""
    with Stack(recipe, bench_model()) as stack:
        target = ["--replay-mode=online", f"--url=http://127.0.0.1:{stack.port}", "--prompt-token-ids=10-200"]
        config = load(ReplayConfig, [trace, *target])
        return figures(run_online(config, config.source(), None))


def compare(bench: LiveBench, system: Implementation, engine: str) -> dict[str, Any]:
    """Run both loads on a live system and in the simulation."""
    recipe = Recipe(
        name=f"live-{system.name}",
        frontend=system,
        engine=system,
        speedup=1.0,
        workers=bench.workers,
        router_mode="kv",
        engine_flags=(
            *("--engine-type", engine),
            *("--block-size", f"{BLOCK}"),
            *("--max-num-batched-tokens", f"{BATCH_TOKENS}"),
        ),
    )
    described = {"engine_type": engine, "block_size": BLOCK, "max_num_batched_tokens": BATCH_TOKENS}
    flags = [f"--num-workers={bench.workers}", "--router-mode=kv", f"--extra-engine-args={json.dumps(described)}"]
    with tempfile.TemporaryDirectory() as folder:
        light, busy = os.path.join(folder, "light.jsonl"), os.path.join(folder, "busy.jsonl")
        write_trace(light, bench.count(LIGHT_REQUESTS), LIGHT_RATE, seed=1)
        write_trace(busy, bench.count(bench.requests), BUSY_RATE, seed=2)
        fit_live, fit_simulated = live(recipe, light), simulated(load(ReplayConfig, [light, *flags]))
        overhead_ms = max(0.0, fit_live["median_ttft_ms"] - fit_simulated["median_ttft_ms"])
        check = load(ReplayConfig, [busy, *flags])
        checked = {
            "live": live(recipe, busy),
            "simulated": simulated(check),
            "with_overhead": simulated(check, overhead_ms),
        }
    return {
        "overhead_ms": overhead_ms,
        "fit": {"live": fit_live, "simulated": fit_simulated},
        "check": checked,
        "machine": machine(),
        "requests": bench.count(bench.requests),
        "workers": bench.workers,
    }


def rows(engine: str, stack: str, found: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows of one entry: live values, and the simulation's errors in percent."""
    check = found["check"]
    return [
        [
            f"{engine}, {stack}: {figure}",
            f"{check['live'][figure]:.2f}",
            *(f"{100 * (check[kind][figure] / check['live'][figure] - 1):+.1f}" for kind in ("simulated", "with_overhead")),
        ]
        for figure in FIGURES
    ]  # fmt: skip


def kept_entries() -> dict[str, dict[str, Any]]:
    """Return the entries of the result file by engine type and stack."""
    path = Path(RESULTS, "replay_live.json")
    return dict(json.loads(path.read_bytes())["engines"]) if path.exists() else {}


def main() -> int:
    """Run the requested stacks, print the errors, and replace their entries in the result file."""
    bench = load(LiveBench, sys.argv[1:])
    systems = implementations()
    engines = bench.engine_types[:1] if bench.quick else bench.engine_types
    entries = {} if bench.quick else kept_entries()
    failed: list[str] = []
    for engine in engines:
        for stack in bench.stacks:
            if stack not in systems:
                failed.append(f"{engine}, {stack}: not installed")
                continue
            try:
                found = compare(bench, systems[stack], engine)
            except (StackFailed, ConnectionError, RuntimeError) as error:
                failed.append(f"{engine}, {stack}: {error}")
                continue
            entries.setdefault(engine, {})[stack] = found
            print_line(f"{engine}, {stack}: overhead {found['overhead_ms']:.2f} ms (--request-overhead-ms)")
            print_line(table(["", "live", "simulated, %", "with overhead, %"], rows(engine, stack, found)))
            print_line(write_result("replay_live", {"engines": entries}, is_whole=not bench.quick))
    for line in failed:
        print_line(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
