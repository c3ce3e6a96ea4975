"""Replay scale: time and memory of a replay of many copies of a trace on many workers.

    python -m benchmarks.replay_scale --trace conversation.jsonl.gz [--copies 10] [--workers 64] [--router-mode kv_router]

The copies share no prefix and begin a moment apart; all requests arrive within the duration of one trace.
"""

import argparse
import resource
import time
from dataclasses import replace

from benchmarks.report import write_result
from dynamo.replay.load import ReplaySession
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.trace import read

APART_MS = 307.0  # Not a divisor of the trace's own 3 s.


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


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--router-mode", default="kv_router")
    parser.add_argument("--quick", action="store_true", help="no result file")
    given = parser.parse_args()
    sessions = copied(given.trace, given.copies)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    outcome = Scenario(sessions=sessions, workers=given.workers, router_mode=given.router_mode).run()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    found = summary_of(outcome, rows_of(outcome.flights))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        "| router | copies | workers | requests | simulated s | CPU s | wall s | peak MB | TTFT ms | ITL ms | reuse |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {given.router_mode} | {given.copies} | {given.workers} | {len(outcome.flights):,} | {outcome.duration_ms / 1000:,.0f} "
        f"| {cpu_s:.0f} | {wall_s:.0f} | {peak_mb:.0f} | {found['mean_ttft_ms']:.0f} | {found['mean_itl_ms']:.2f} "
        f"| {found['prefix_cache_reused_ratio']:.3f} |"
    )
    kept = {
        "router": given.router_mode, "copies": given.copies, "workers": given.workers, "requests": len(outcome.flights),
        "simulated_s": outcome.duration_ms / 1000, "cpu_s": cpu_s, "wall_s": wall_s, "peak_mb": peak_mb,
        "ttft_ms": found["mean_ttft_ms"], "tpot_ms": found["mean_tpot_ms"], "reuse": found["prefix_cache_reused_ratio"],
    }  # fmt: skip
    print(write_result(f"replay_scale_{given.workers}x{given.copies}", kept, is_whole=not given.quick))


if __name__ == "__main__":
    main()
