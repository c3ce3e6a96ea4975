"""Routing on loads that no constant was tuned on, light to heavy: simulated workers, every policy, in virtual time.

    python -m benchmarks.routing_unseen [--seeds 3] [--requests 800]

agents    sessions of four turns, instructions of 4,096 tokens in common with others of their kind
bursts    twelve requests at once, 24 kinds of prefixes
tenants   a hundred prefixes of 6,144 tokens, chosen by Zipf's law
ladder    150 prefixes of 5,632 tokens, all equally likely: more than one worker's cache, less than all caches

Arrivals are Poisson processes; the rates go from an idle to a busy cluster of eight workers. The policies are the router's own code.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.report import machine, say, table, write_result
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario

BLOCK = 512
WORKERS = 8
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "least-loaded": ("least_loaded", {}),
    "kv default": ("kv_router", {}),
    "kv tuned": ("kv_router", {"prefill_load_scale": 32}),
    "balanced": ("balanced", {}),
}
BASE, OURS = "least-loaded", "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenBench:
    """Options of the program."""

    seeds: int = option(3, "--seeds", None, "Seeds of each load; figures are means")
    requests: int = option(800, "--requests", None, "Requests of each load")
    quick: bool = option(False, "--quick", None, "One seed, 200 requests, and no result file")


class Prompts:
    """Block names of prompts: shared prefixes by kind, and blocks of one prompt alone."""

    def __init__(self, prefix_blocks: int) -> None:
        self._prefix_blocks = prefix_blocks
        self._next = 1_000_000

    def of(self, kind: int, tokens: int) -> tuple[int, ...]:
        """Return the names of a new prompt's blocks, of which the first are those of its kind."""
        own = max(0, -(-tokens // BLOCK) - self._prefix_blocks)
        first = self._next
        self._next += own
        shared = range(kind * self._prefix_blocks, (kind + 1) * self._prefix_blocks)
        return (*shared, *range(first, first + own))


def single(name: str, prompt: tuple[int, ...], tokens: int, output: int, at_ms: float) -> ReplaySession:
    """Return a session of one request."""
    return ReplaySession(name, [Turn(name, tokens, output, prompt, at_ms)])


def output_of(rng: random.Random) -> int:
    """Return a number of output tokens."""
    return max(20, int(rng.expovariate(1 / 200)))


def agents(rate: float, seed: int, count: int) -> list[ReplaySession]:
    """Return sessions of four turns; `rate` is requests per second."""
    rng, prompts, at_ms, found = random.Random(seed), Prompts(8), 0.0, []
    for number in range(count // 4):
        at_ms += rng.expovariate(rate / 4) * 1000
        tokens, turns = 8 * BLOCK, []
        blocks = prompts.of(min(int(rng.expovariate(0.5)), 7), tokens)
        for turn in range(4):
            tokens += rng.randrange(200, 1500)
            blocks = (*blocks, *prompts.of(0, tokens)[8:][: -(-tokens // BLOCK) - len(blocks)])
            times = (at_ms, None) if turn == 0 else (None, 800.0)
            turns.append(Turn(f"a{number}.{turn}", tokens, output_of(rng), blocks, *times))
        found.append(ReplaySession(f"a{number}", turns))
    return found


def bursts(rate: float, seed: int, count: int) -> list[ReplaySession]:
    """Return requests of which twelve arrive at once."""
    rng, prompts, at_ms, found = random.Random(seed), Prompts(6), 0.0, []
    for number in range(count):
        at_ms += rng.expovariate(rate / 12) * 1000 if number % 12 == 0 else 0.0
        tokens = 6 * BLOCK + rng.randrange(100, 2500)
        found.append(single(f"b{number}", prompts.of(rng.randrange(24), tokens), tokens, output_of(rng), at_ms))
    return found


def tenants(rate: float, seed: int, count: int) -> list[ReplaySession]:
    """Return requests of a hundred tenants, the first of which sends most."""
    rng, prompts, at_ms, found = random.Random(seed), Prompts(12), 0.0, []
    weights = [1 / (place + 1) for place in range(100)]
    for number in range(count):
        at_ms += rng.expovariate(rate) * 1000
        tokens = 12 * BLOCK + rng.randrange(100, 1500)
        kind = rng.choices(range(100), weights)[0]
        found.append(single(f"t{number}", prompts.of(kind, tokens), tokens, output_of(rng), at_ms))
    return found


def ladder(rate: float, seed: int, count: int) -> list[ReplaySession]:
    """Return requests of 150 groups with equal shares."""
    rng, prompts, at_ms, found = random.Random(seed), Prompts(11), 0.0, []
    for number in range(count):
        at_ms += rng.expovariate(rate) * 1000
        found.append(single(f"l{number}", prompts.of(rng.randrange(150), 6000), 6000, 100, at_ms))
    return found


LOADS: dict[str, tuple[Callable[[float, int, int], list[ReplaySession]], tuple[float, ...]]] = {
    "agents": (agents, (4, 14, 40)),
    "bursts": (bursts, (4, 14, 30)),
    "tenants": (tenants, (5, 20, 40)),
    "ladder": (ladder, (10, 25, 50)),
}
"""Each load with its rates in requests per second."""


def run(sessions: list[ReplaySession], policy: str, seed: int) -> dict[str, float]:
    """Return the figures of one simulation, in milliseconds."""
    mode, settings = POLICIES[policy]
    outcome = Scenario(
        sessions=sessions, workers=WORKERS, router_mode=mode, router_settings=settings, seed=seed
    ).run()  # fmt: skip
    found = summary_of(outcome, rows_of(outcome.flights))
    return {
        "e2e": found["mean_e2e_latency_ms"],
        "ttft": found["mean_ttft_ms"],
        "ttft_p99": found["p99_ttft_ms"],
        "tpot": found["mean_itl_ms"],
        "reuse": found["prefix_cache_reused_ratio"],
    }


def main() -> int:
    """Simulate every load under every policy, print a table and write the result file."""
    config = load(UnseenBench, sys.argv[1:])
    seeds, count = (1, 200) if config.quick else (config.seeds, config.requests)
    means: dict[str, dict[str, dict[str, float]]] = {}
    for name, (make, rates) in LOADS.items():
        for rate in rates:
            point = f"{name}, {rate:g}/s"
            print(f"{point} …", file=sys.stderr, flush=True)
            runs = {
                policy: [run(make(rate, seed, count), policy, seed) for seed in range(seeds)] for policy in POLICIES
            }
            means[point] = {
                policy: {figure: mean(one[figure] for one in made) for figure in made[0]}
                for policy, made in runs.items()
            }
    rows = []
    for point, found in means.items():
        best = min(one["e2e"] for policy, one in found.items() if policy != OURS)
        latencies = [f"{one['e2e']:,.0f} ({one['ttft']:,.0f})" for one in found.values()]
        rows.append([point, *latencies, f"{100 * (found[OURS]['e2e'] / best - 1):+.1f} %"])
    say(table(["mean latency (first token), ms", *POLICIES, "balanced against the best other"], rows))
    result = {"machine": machine(), "seeds": seeds, "requests": count, "means": means}
    say(write_result("routing_unseen", result, is_whole=not config.quick))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
