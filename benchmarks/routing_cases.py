"""Two cases of the routing benchmark that are not loads of a shape and a strength: a ladder of prefixes, and scaling by load.

ladder    150 prefixes of 6,144 tokens that fill nine tenths of all caches together; 44 and 52 requests per second, outputs of 200 tokens
scaling   one worker at the start, `--scale-load on`, 18 requests per second with long-context outliers
"""

import random
from typing import Any

from benchmarks.report import table
from benchmarks.routing_loads import WORKERS, Prompts, Sessions, arrivals, outliers, single, small
from dynamo.replay.policies import load_thresholds
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario

BLOCKS = 2048
"""Cache blocks of a worker in the ladder."""
LADDER_RATES = (44, 52)
"""Requests per second. With 44, the 600,000 tokens of the run take 68.5 s to arrive, so no policy can exceed 8,758 tokens per second."""
FIGURES = (
    "output_throughput_tok_s",
    "mean_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "mean_e2e_latency_ms",
    "prefix_cache_reused_ratio",
)
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "kv default": ("kv_router", {}),
    "kv tuned": ("kv_router", {"prefill_load_scale": 32}),
    "preble": ("preble", {}),
    "balanced": ("balanced", {}),
}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "kv default": ("kv_router", {}),
    "balanced, no queue": ("balanced", {"queue_threshold": None}),
    "balanced": ("balanced", {}),
}


def ladder(rate: float, seed: int, count: int) -> Sessions:
    """Return requests of 150 equally likely groups, each with one block of its own."""
    rng, prompts = random.Random(seed), Prompts(12)
    found = Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind = rng.randrange(150)
        found.append(single(f"k{kind}.{at}", (*prompts.prefix(kind), *prompts.own(1)), 6144 + 60, 200, at_ms))
    return found


def cases() -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of both cases by policy."""
    found: dict[str, dict[str, dict[str, float]]] = {"scaling": {}}
    for rate in LADDER_RATES:
        ladders = found[f"ladder, {rate} requests per second"] = {}
        for name, (mode, settings) in MODES.items():
            outcome = Scenario(
                sessions=ladder(rate, 0, 3000),
                workers=WORKERS,
                router_mode=mode,
                router_settings=settings,
                engine=small(BLOCKS),
            ).run()
            summary = summary_of(outcome, rows_of(outcome.flights))
            ladders[name] = {figure: summary[figure] for figure in FIGURES}
    for name, (mode, settings) in SCALED.items():
        outcome = Scenario(
            sessions=outliers(18, 0, 1200),
            router_mode=mode,
            router_settings=settings,
            planner=lambda: load_thresholds("on"),
            seed=0,
        ).run()
        assert outcome.planner is not None
        summary = summary_of(outcome, rows_of(outcome.flights))
        first_s = outcome.planner.scaling_events[0]["at_s"]
        found["scaling"][name] = {"first_scale_up_s": first_s} | {figure: summary[figure] for figure in FIGURES}
    return found


def case_tables(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a table of each case."""
    parts = []
    for case, policies in found.items():
        names = list(next(iter(policies.values())))
        rows = [
            [policy, *(f"{one[name]:,.4g}" if one[name] < 1 else f"{one[name]:,.0f}" for name in names)]
            for policy, one in policies.items()
        ]
        parts += [f"### Case: {case}", "", table(["", *names], rows), ""]
    return "\n".join(parts)
