"""Latency of an ideal cluster on the loads of the routing benchmark: how much any choice of workers could gain.

    python -m benchmarks.routing_bound [--trace TRACE] [--seeds 3] [--requests 600]

The ideal cluster has the same engines, and none of what routing decides. A prefix is computed once and then cached by every worker; a
prompt never waits; the time of its tokens (not of starting a prefill) delays the answers of all workers equally; requests move between
workers at no cost, so that all workers always read equally many tokens. Equal shares are the best ones for requests of similar length; where lengths differ much, separating long
from short requests is better, and a policy may come closer than the table suggests. The last column has an ideal cluster in which starting a
prefill delays the answers too, as if each prompt had a step of its own. Loads with host memory, split loads and the
one with workers of several speeds are left out.
"""

import heapq
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, print_line, table, write_result
from benchmarks.routing_loads import BLOCK, WORKERS, Load, Sessions, loads
from benchmarks.routing_quality import STRENGTHS
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.mocker.simulation.rules import RankLimits
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.replay.load import OpenLoop, ReplaySession

STRIDE = 8.0
"""Tokens over which the duration of a step is taken as constant."""


SEEDS, REQUESTS = 3, 600


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundBench:
    """Options of the program."""

    trace: str | None = option(None, "--trace", None, "Recorded trace in Mooncake's format: one more load")
    seeds: int = option(SEEDS, "--seeds", None, "Seeds of each load")
    requests: int = option(REQUESTS, "--requests", None, "Requests of each load")


@dataclass(slots=True)
class IdealCluster:
    """Processor sharing: every answer grows by one token per step, and all workers' steps take equally long."""

    limits: RankLimits
    timing: StepTimes
    now_ms: float = 0.0
    done_tokens: float = 0.0
    """Tokens that an answer has grown by since the start."""
    offset: float = 0.0
    """Context tokens of all answers, less `done_tokens` for each."""
    stall_ms: float = 0.0
    """Prefill that each worker has yet to do before it goes on decoding."""
    ends: list[tuple[float, int, float, ReplaySession, int, float]] = field(default_factory=list)
    """Growth at the end, number, offset, session, turn and arrival of each answer."""

    def step_ms(self) -> float:
        """Return the duration of a step."""
        context = (self.offset + len(self.ends) * self.done_tokens) / WORKERS
        capacity = self.limits.num_blocks * self.limits.block_tokens
        return self.timing.decode_ms(round(context), capacity, -(-len(self.ends) // WORKERS))

    def advance(self, until_ms: float) -> bool:
        """Advance to the next end of an answer or to `until_ms`; return whether an answer ends."""
        while self.ends:
            stalled_ms = min(self.stall_ms, until_ms - self.now_ms)
            self.stall_ms -= stalled_ms
            self.now_ms += stalled_ms
            tokens = min(STRIDE, self.ends[0][0] - self.done_tokens)
            step_ms = self.step_ms()
            if self.now_ms + tokens * step_ms > until_ms:
                self.done_tokens += max(0.0, until_ms - self.now_ms) / step_ms
                break
            self.now_ms += tokens * step_ms
            self.done_tokens += tokens
            if self.done_tokens >= self.ends[0][0]:
                return True
        self.stall_ms = self.stall_ms if self.ends else 0.0
        self.now_ms = max(self.now_ms, until_ms)
        return False

    def prefill_ms(self, tokens: int) -> float:
        """Return the duration of a prefill, in full batches."""
        full, rest = divmod(tokens, self.limits.max_num_batched_tokens)
        return full * self.timing.prefill_ms(self.limits.max_num_batched_tokens) + self.timing.prefill_ms(rest)


def ideal(sessions: Sessions, shape: Load, *, has_starts: bool = False) -> tuple[float, float]:
    """Return the mean end-to-end latency and the mean time to first token, in ms.

    `has_starts`: whether starting a prefill delays answers as well.
    """
    source = OpenLoop(sessions)
    cluster = IdealCluster(shape.engine.limits(), shape.engine.timing())
    start_ms = 0.0 if has_starts else cluster.prefill_ms(1)
    known, e2e, ttft, number = set[int](), list[float](), list[float](), 0
    timed: list[tuple[float, int, ReplaySession, int, float]] = []
    """Time, number, session, turn, and arrival of a computed prompt; the arrival of a new one is -1."""
    for at_ms, session, turn in source.first():
        number += 1
        heapq.heappush(timed, (at_ms, number, session, turn, -1.0))
    while timed or cluster.ends:
        number += 1
        if cluster.advance(timed[0][0] if timed else float("inf")):
            _, _, offset, session, turn, arrived_ms = heapq.heappop(cluster.ends)
            cluster.offset -= offset
            e2e.append(cluster.now_ms - arrived_ms)
            for at_ms, following, place in source.after(session, turn, cluster.now_ms):
                heapq.heappush(timed, (at_ms, number, following, place, -1.0))
            continue
        now_ms, _, session, turn, arrived_ms = heapq.heappop(timed)
        one = session.turns[turn]
        if arrived_ms < 0:
            prefixes = list(accumulate(one.hash_ids, lambda before, name: hash((before, name))))
            cached = next((at for at, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))
            known.update(prefixes)
            ttft.append(cluster.prefill_ms(max(1, one.input_tokens - cached * BLOCK)))
            cluster.stall_ms += max(0.0, ttft[-1] - start_ms) / WORKERS
            heapq.heappush(timed, (now_ms + ttft[-1], number, session, turn, now_ms))
        else:
            offset = one.input_tokens - cluster.done_tokens
            end = cluster.done_tokens + one.output_tokens - 1
            heapq.heappush(cluster.ends, (end, number, offset, session, turn, arrived_ms))
            cluster.offset += offset
    return mean(e2e), mean(ttft)


def rows(config: BoundBench, points: Mapping[str, Any]) -> list[list[str]]:
    """Return the latencies above the ideal ones: of `balanced`, and of the best other policy for each load."""
    found = []
    for name, shape in loads(config.trace, is_training=False).items():
        if shape.prefill_workers or shape.speeds or shape.engine.num_host_blocks:
            continue
        for strength, share in STRENGTHS.items():
            made = [shape.make(shape.rate * share, seed, config.requests) for seed in range(config.seeds)]
            e2e, ttft = (mean(each) for each in zip(*(ideal(sessions, shape) for sessions in made), strict=True))
            started = mean(ideal(sessions, shape, has_starts=True)[0] for sessions in made)
            row = [f"{name}, {strength}", f"{e2e:,.0f} ({ttft:,.0f})"]
            policies = points.get(f"{name}, {strength}, lag 0", {})
            others = [
                mean(one["e2e"][: config.seeds])
                for policy, one in policies.items()
                if policy != "balanced" and len(one["e2e"]) >= config.seeds
            ]
            if others:
                own = mean(policies["balanced"]["e2e"][: config.seeds])
                row += [f"{own / e2e - 1:+.1%}", f"{min(others) / e2e - 1:+.1%}", f"{e2e / min(others) - 1:+.1%}"]
                row.append(f"{started / min(others) - 1:+.1%}")
            found.append(row)
    return found


def main() -> int:
    """Print the table and write it."""
    config = load(BoundBench, sys.argv[1:])
    committed = json.loads((Path(RESULTS) / "routing_quality.json").read_text())
    heads = [
        "load",
        "ideal e2e (TTFT), ms",
        "balanced / ideal",
        "best other / ideal",
        "ideal / best other",
        "with starts",
    ]
    found = rows(config, committed["points"]["held_out"])
    print_line(table(heads, found))
    is_whole = bool(config.trace) and (config.seeds, config.requests) == (SEEDS, REQUESTS)
    print_line(write_result("routing_bound", {"heads": heads, "rows": found}, is_whole=is_whole))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_config_error(main))
