"""Replay scale: time and memory of a replay of many copies of a trace on many workers.

    python -m benchmarks.replay_scale --trace conversation.jsonl.gz [--copies 10 --workers 64] [--router-mode kv_router]

The copies share no prefix and begin a moment apart; all requests arrive within the duration of one trace.
"""

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.report import write_result
from dynamo.replay.load import ReplaySession
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.trace import read

APART_MS = 307.0  # Not a divisor of the trace's own 3 s.
CASES = ((1, 8), (5, 32), (10, 64))
"""Copies and workers."""


def copied(trace: str, copies: int) -> list[ReplaySession]:
    """Return the sessions of all copies."""
    whole = read([trace])
    apart = 1 + max(name for session in whole for turn in session.turns for name in turn.hash_ids)
    found = []
    for copy in range(copies):
        for session in whole:
            turns = [
                replace(
                    turn,
                    request_id=f"{turn.request_id}.{copy}",
                    hash_ids=tuple(name + copy * apart for name in turn.hash_ids),
                    at_ms=(turn.at_ms or 0.0) + copy * APART_MS,
                )
                for turn in session.turns
            ]
            found.append(ReplaySession(f"{session.session_id}.{copy}", turns))
    return found


def measure(trace: str, copies: int, workers: int, router_mode: str) -> dict[str, Any]:
    """Replay once and return the figures. Call in a process of its own: `peak_mb` is that of the process."""
    base_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sessions = copied(trace, copies)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    outcome = Scenario(sessions=sessions, workers=workers, router_mode=router_mode).run()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    found = summary_of(outcome, rows_of(outcome.flights))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "router": router_mode, "copies": copies, "workers": workers, "requests": len(outcome.flights),
        "simulated_s": outcome.duration_ms / 1000, "cpu_s": cpu_s, "wall_s": wall_s,
        "base_mb": base_mb, "peak_mb": peak_mb, "kb_per_request": (peak_mb - base_mb) * 1024 / len(outcome.flights),
        "ttft_ms": found["mean_ttft_ms"], "tpot_ms": found["mean_tpot_ms"], "reuse": found["prefix_cache_reused_ratio"],
    }  # fmt: skip


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--copies", type=int, help="default: 1 on 8 workers, 5 on 32, then 10 on 64")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--router-mode", default="kv_router")
    parser.add_argument("--quick", action="store_true", help="one copy, and no result file")
    given = parser.parse_args()
    cases = CASES[:1] if given.quick else CASES
    if given.copies or given.workers:
        cases = ((given.copies or 1, given.workers or 8),)
    print(
        "| router | copies | workers | requests | simulated s | CPU s | wall s | base MB | peak MB | KB/request | TTFT ms | TPOT ms | reuse |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for copies, workers in cases:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(measure, given.trace, copies, workers, given.router_mode).result()
        shown = [f"{value:,.3f}" if isinstance(value, float) else f"{value}" for value in found.values()]
        print(f"| {' | '.join(shown)} |", flush=True)
        print(write_result(f"replay_scale_{workers}x{copies}", found, is_whole=not given.quick))


if __name__ == "__main__":
    main()
