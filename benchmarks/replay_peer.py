"""Offline replay compared with the released one: the same traces and arguments, for each engine type.

    python -m benchmarks.replay_peer [--requests 2000] [--cases sglang,disaggregated]

Both simulations run in virtual time, so that the machine's load has no influence. Round-robin runs are determined by the
trace; the KV router breaks ties at random, hence its rows are means over several traces. Printed are the differences of ours
in percent; the result file has both values.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.corpus import ROOT
from benchmarks.peer import PeerMissing, ensure_peer
from benchmarks.report import OURS, THEIRS, print_line, table, write_result
from dynamo.core.config import environ, exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

PROGRAM = os.path.join(ROOT, "benchmarks", "replay_peer_run.py")
RUN_S = 900.0
PROMPT_BLOCK = 512
"""Tokens of a block of the trace."""
ENGINES = ("vllm", "sglang", "trtllm")
LOADS = {"light": 4.0, "near": 20.0, "over": 60.0}
"""Requests per second for four workers; the last one is beyond saturation."""
BLOCKS = {"enough": 16_384, "few": 1_200}
"""Blocks of 64 tokens for each worker; with the second number, blocks are evicted and requests preempted."""
ROLES = ("prefill", "decode")
TRANSFER_GB_S, BYTES_PER_TOKEN = 64.0, 131_072
"""KV transfer between two prefill and two decode workers, of an 8B model; by default the released replay has no delay."""
SEEDS = 3
"""Traces of each case with the KV router."""
FIGURES = (
    "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p90_itl_ms", "p99_itl_ms", "median_e2e_latency_ms",
    "p90_e2e_latency_ms", "p99_e2e_latency_ms", "output_throughput_tok_s", "prefix_cache_reused_ratio",
)  # fmt: skip
HEADS = ("TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "e2e p50", "p90", "p99", "tok/s", "reuse")


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    engine: str
    load: str
    router: str = "round_robin"
    blocks: str = "enough"
    seed: int = 1
    is_disaggregated: bool = False

    @property
    def name(self) -> str:
        """The case without its seed."""
        more = (", few blocks" if self.blocks == "few" else "") + (", disaggregated" if self.is_disaggregated else "")
        return f"{self.engine}, {self.load}, {self.router}{more}"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `run_trace_replay`."""
        engine = {"backend": self.engine, "block_size": 64, "num_gpu_blocks": BLOCKS[self.blocks]}
        if self.is_disaggregated:
            transfer = {"kv_transfer_bandwidth": TRANSFER_GB_S, "kv_bytes_per_token": BYTES_PER_TOKEN}
            roles = {role: json.dumps({"engine": {**engine, **transfer, "worker_type": role}}) for role in ROLES}
            return {
                "num_prefill_workers": 2,
                "num_decode_workers": 2,
                "router_mode": self.router,
                **{f"{role}_engine_args": described for role, described in roles.items()},
            }
        return {
            "num_workers": 4,
            "router_mode": self.router,
            "extra_engine_args": json.dumps({"engine": engine}),
        }


def cases(engines: Sequence[str] = ENGINES) -> list[Case]:
    """Return all comparisons."""
    found = []
    for engine in engines:
        found += [Case(engine, one) for one in LOADS]
        found += [Case(engine, "near", blocks="few")]
        found += [Case(engine, one, is_disaggregated=True) for one in LOADS]
        found += [Case(engine, one, "kv_router", seed=seed) for one in LOADS for seed in range(1, SEEDS + 1)]
        found += [Case(engine, "near", "kv_router", seed=seed, is_disaggregated=True) for seed in range(1, SEEDS + 1)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPeerBench:
    """Options of the program."""

    requests: int = option(2000, "--requests", None, "Requests of each trace")
    cases: list[str] = option(
        [], "--cases", None, "Only the cases whose names contain all of these, and no result file"
    )
    quick: bool = option(False, "--quick", None, "200 requests, one engine, and no result file")

    def chosen(self) -> list[Case]:
        """Return the comparisons to run. Raise `ConfigError` if there are none."""
        found = [
            case
            for case in cases(ENGINES[:1] if self.quick else ENGINES)
            if all(part in case.name for part in self.cases)
        ]
        if not found:
            raise ConfigError(f"--cases {','.join(self.cases)}: no case has all of these in its name")
        return found


def write_trace(path: str, requests: int, rate: float, seed: int) -> None:
    """Write a trace in Mooncake's format: random arrivals and lengths, 24 prefixes of one to five blocks."""
    rng = random.Random(seed)
    at_ms, unused = 0, 10_000
    with open(path, "w", encoding="ascii") as file:
        for _ in range(requests):
            length = min(max(64, int(2000 * rng.lognormvariate(0, 0.6))), 30_000)
            answer = min(max(1, int(100 * rng.lognormvariate(0, 0.5))), 2000)
            blocks, prefix = -(-length // PROMPT_BLOCK), rng.randrange(24)
            shared = min(blocks - 1, 1 + prefix % 5)
            names = [*(prefix * 100 + at for at in range(shared)), *range(unused, unused + blocks - shared)]
            unused += blocks - shared
            row = {"timestamp": at_ms, "input_length": length, "output_length": answer, "hash_ids": names}
            file.write(json.dumps(row) + "\n")
            at_ms += 1 + int(rng.expovariate(rate) * 1000)  # Never two at the same time: their order is not defined.


def simulate(python: str, found: Sequence[Case], folder: str, requests: int) -> dict[Case, dict[str, Any]]:
    """Return the summaries of one implementation. Raise `RuntimeError` if a replay fails."""
    wanted = []
    for case in found:
        path = os.path.join(folder, f"{case.load}-{case.seed}.jsonl")
        if not os.path.exists(path):
            write_trace(path, requests, LOADS[case.load], case.seed)
        wanted.append({"name": case.name, "trace": path, "arguments": case.arguments()})
    variables = {name: value for name, value in environ().items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(
        [python, PROGRAM],
        input=json.dumps(wanted),
        env=variables | {"DYN_LOG": "error"},
        cwd=folder,
        timeout=RUN_S,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if done.returncode or len(lines) != len(found):
        raise RuntimeError(f"replay with {python}: {done.stderr[-500:]}")
    return {case: line["summary"] for case, line in zip(found, lines, strict=True)}


def compare(peer: str, found: Sequence[Case], requests: int) -> dict[Case, dict[str, dict[str, float]]]:
    """Return the figures of both for each case: means over its seeds."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: simulate(python, found, folder, requests) for name, python in ((OURS, sys.executable), (THEIRS, peer))}  # fmt: skip
    groups: dict[Case, list[Case]] = {}
    for case in found:
        groups.setdefault(replace(case, seed=1), []).append(case)
    return {
        key: {
            figure: {name: fmean(run[case][figure] for case in group) for name, run in runs.items()}
            for figure in FIGURES
        }
        for key, group in groups.items()
    }


def difference(values: dict[str, float]) -> float:
    """Return the relative difference of ours."""
    return values[OURS] / values[THEIRS] - 1


def main() -> int:
    """Print the table, and write the result file."""
    bench = load(ReplayPeerBench, sys.argv[1:])
    try:
        peer = ensure_peer()
    except PeerMissing as error:
        print_line(f"the peer is missing: {error}")
        return 1
    requests = 200 if bench.quick else bench.requests
    found = compare(peer, bench.chosen(), requests)
    rows = [
        [case.name, *(f"{100 * difference(one[figure]):+.1f}" for figure in FIGURES)] for case, one in found.items()
    ]
    print_line(table(["%", *HEADS], rows))
    kept = {"requests": requests, "cases": {case.name: figures for case, figures in found.items()}}
    print_line(write_result("replay_peer", kept, is_whole=not (bench.quick or bench.cases)))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
