"""Load and throughput scaling compared with the released planner's on the same random sequences of ticks."""

import random
from collections import Counter
from typing import Any

import pytest
from tests.conformance.planner_cases import LinearSteps, is_close, random_step, released, step

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.load_scaling import propose_load
from dynamo.planner.core.scaling import ScalingState, Traffic, WorkerCapabilities
from dynamo.planner.core.throughput_scaling import propose_throughput
from dynamo.protocols.planner import EngineCapabilities, FpmObservations, WorkerCounts

pytestmark = pytest.mark.conformance

MODES = ["disagg", "agg", "prefill", "decode"]
RULES = 5
"""Kinds of difference that occur; see `justified`."""


def scaling_case(rng: random.Random) -> dict[str, Any]:
    """Return a configuration, a step model, capacities and a sequence of ticks."""
    mode, target = rng.choice(MODES), rng.choice(["sla", "sla", "sla", "throughput", "latency", "load"])
    runs_load = target != "sla" or rng.random() < 0.7
    runs_throughput = target == "sla" and (not runs_load or rng.random() < 0.6)
    config: dict[str, Any] = {
        "mode": mode,
        "optimization_target": target,
        "ttft_ms": rng.choice([100.0, 500.0, 2000.0]),
        "itl_ms": rng.choice([10.0, 50.0]),
        "max_gpu_budget": rng.choice([-1, 8, 16, 40]),
        "min_gpu_budget": rng.choice([-1, -1, -1, 4]),
        "min_endpoint": rng.choice([1, 1, 2]),
        "load_scaling_down_sensitivity": rng.choice([80, 100, 30]),
        "load_min_observations": rng.choice([1, 5]),
        "max_throughput_scaling_replicas": rng.choice([8, 2]),
        "prefill_scale_up_queue_tokens": 4000,
        "prefill_scale_down_queue_tokens": 100,
        "decode_scale_up_kv_rate": 70,
        "decode_scale_down_kv_rate": 30,
    }
    if target == "sla":
        config |= {"enable_load_scaling": runs_load, "enable_throughput_scaling": runs_throughput}
    gpus = {"prefill": rng.choice([1, 2]), "decode": rng.choice([1, 1, 2])}
    capabilities = {
        role: {
            "num_gpu": gpus[role],
            "max_num_batched_tokens": rng.choice([None, 2048]),
            "max_num_seqs": 64,
            "context_length": rng.choice([4096, 4096, None]),
            "max_kv_tokens": rng.choice([100_000, 100_000, None]),
        }
        for role in gpus
    }
    load = rng.choice([0.1, 1.0, 3.0])
    return {
        "config": config,
        "runs_load": runs_load,
        "coefficients": [0.004, rng.choice([1e-5, 1e-4]), rng.choice([0, 1e-4]), rng.choice([1e-7, 1e-6])],
        "capabilities": capabilities,
        "ticks": [tick(rng, config, gpus, load, runs_throughput=runs_throughput) for _ in range(rng.randint(1, 4))],
    }


def tick(
    rng: random.Random, config: dict[str, Any], gpus: dict[str, int], load: float, *, runs_throughput: bool
) -> dict[str, Any]:
    """Return worker counts within the budget, the steps of their ranks, and traffic."""
    least = config["min_endpoint"]
    budget = config["max_gpu_budget"] if config["max_gpu_budget"] >= 0 else 40
    most = max(least, budget // (gpus["prefill"] + gpus["decode"]))
    ready = {role: rng.randint(least, min(most, 6)) for role in gpus}
    counts: dict[str, Any] = {}
    for role, count in ready.items():
        if role not in {"disagg": ("prefill", "decode"), "agg": ("decode",)}.get(config["mode"], (config["mode"],)):
            continue
        missing = rng.choice([0, 0, 0, 0, 1])
        is_pending = bool(missing) and rng.random() < 0.6
        counts |= {
            f"ready_num_{role}": count,
            f"expected_num_{role}": count + missing,
            f"pending_num_{role}": missing if is_pending else 0,
        }
    reporting = {role: count - (rng.random() < 0.05) for role, count in ready.items()}
    rows = {role: [random_step(rng, str(worker), load) for worker in range(count)] for role, count in reporting.items()}
    traffic = None
    if runs_throughput and rng.random() < 0.8:
        traffic = {
            "duration_s": rng.choice([60.0, 180.0, 0.0]),
            "num_req": rng.choice([0.0, 10.0, 1000.0, 20_000.0]),
            "isl": rng.choice([0.0, 500.0, 3000.0]),
            "osl": rng.choice([1.0, 150.0, 1000.0]),
            "kv_hit_rate": rng.choice([None, 0.5]),
            "accept_length": rng.choice([None, 2.0]),
        }
    return {"counts": counts, "prefill": rows["prefill"], "decode": rows["decode"], "traffic": traffic}


def ours(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what our scaling state proposes, in the released planner's form."""
    config = parse(case["config"])
    capabilities = {role: EngineCapabilities(**values) for role, values in case["capabilities"].items()}
    state = ScalingState(config, WorkerCapabilities(**capabilities))
    for model in state.models.values():
        model.steps = LinearSteps(case["coefficients"])
    found = []
    for one in case["ticks"]:
        state.observe_workers(WorkerCounts(**one["counts"]))
        observed = FpmObservations(
            {(row[0], row[1]): step(row) for row in one["prefill"]},
            {(row[0], row[1]): step(row) for row in one["decode"]},
        )
        state.observe_steps(observed)
        traffic, duration_s, row = None, 0.0, {}
        if one["traffic"]:
            duration_s = one["traffic"]["duration_s"]
            traffic = Traffic(**{name: value for name, value in one["traffic"].items() if name != "duration_s"})
            made = propose_throughput(state, traffic, duration_s)
            row = {
                "throughput": made.decision and [made.decision.num_prefill, made.decision.num_decode],
                "throughput_reason": named(made.reason),
                "throughput_roles": [named(made.reason_prefill), named(made.reason_decode)],
                "rates": [made.engine_rps_prefill, made.engine_rps_decode],
            }
        if case["runs_load"]:
            load = propose_load(state, observed, traffic)
            row |= {
                "load": load.decision and [load.decision.num_prefill, load.decision.num_decode],
                "load_reason": named(load.reason),
                "load_roles": [named(load.reason_prefill), named(load.reason_decode)],
                "estimates": [load.estimated_ttft_ms, load.estimated_itl_ms],
            }
        row["bounds"] = [state.lower_bounds["prefill"], state.lower_bounds["decode"]]
        found.append(row)
    return found


def named(reason: str) -> str | None:
    """Return a reason as the released planner reports it: None if unset."""
    return None if reason == "unset" else str(reason)


def justified(name: str, found: Any, expected: Any, tick: dict[str, Any], row: dict[str, Any]) -> str | None:
    """Return the rule that explains a difference between our result and the released one; None: unexplained.

    All but the first concern ticks that decide nothing because workers start.
    """
    counts = tick["counts"]
    ready = [counts.get("ready_num_prefill"), counts.get("ready_num_decode")]
    is_starting = any(counts.get(f"pending_num_{role}") for role in ("prefill", "decode"))
    if name == "load" and found is None and not is_starting:
        is_repeated = all(one in (None, now) for one, now in zip(expected, ready, strict=True))
        return (
            "the released planner returns a decision for the present numbers; ours returns none"
            if is_repeated
            else None
        )
    if name != "load_reason" or not is_starting or row["load"] is not None:
        return None
    refused = "scale_down_refused_consolidation"
    return {
        ("insufficient_data", None): "ours names the reason that the released planner leaves unset",
        ("gpu_budget_reconcile", None): "ours names the reason that the released planner leaves unset",
        ("no_change", None): "ours names the reason that the released planner leaves unset",
        ("insufficient_data", refused): "ours reports the role without data, the released planner the other one",
        ("insufficient_data", "no_change"): "ours reports the role without data, the released planner the other one",
        (None, refused): "growth of one role is dropped: the released planner reports the other role",
        (None, "no_change"): "growth of one role is dropped: the released planner reports the other role",
        ("no_change", refused): "the released planner counts starting workers as candidates for removal; ours does not",
    }.get((found, expected))


def test_scaling_proposals_and_reasons_equal_the_released_ones() -> None:
    rng = random.Random(5)
    given = [scaling_case(rng) for _ in range(2000)]
    unexplained, rules = [], Counter[str]()
    for case, expected in zip(given, released("scaling", given), strict=True):
        for tick, row, other in zip(case["ticks"], ours(case), expected, strict=True):
            for name, found in row.items():
                if is_close(found, other[name]):
                    continue
                rule = justified(name, found, other[name], tick, row)
                if rule is None:
                    unexplained.append((case["config"], tick, name, found, other[name]))
                else:
                    rules[rule] += 1
    assert not unexplained, f"{len(unexplained)}: {unexplained[0]}"
    assert len(rules) == RULES, rules
