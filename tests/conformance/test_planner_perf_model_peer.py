"""Performance models compared with the released planner's: fits, latencies and capacities on the same random steps."""

import random
from typing import Any

import pytest
from tests.conformance.planner_cases import LinearSteps, is_close, random_step, released, step

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.perf_model import CapacityQuery, EngineModel
from dynamo.planner.core.regression import StepLoad, StepRegression
from dynamo.protocols.planner import EngineCapabilities

pytestmark = pytest.mark.conformance

ROLES = [role.value for role in EngineRole]


def regression_case(rng: random.Random) -> dict[str, Any]:
    """Return steps whose times are linear with noise, sometimes with a negative slope, and queries."""
    slopes = [rng.choice([1e-5, 1e-6, 0, -1e-7]), rng.choice([1e-4, 0, -1e-5]), rng.choice([1e-7, 1e-6])]
    rows = []
    for _ in range(rng.randint(3, 60)):
        row = random_step(rng)
        if row[2]:
            row[2] = 0.01 + slopes[0] * row[4] + slopes[1] * row[5] + slopes[2] * row[6] + rng.uniform(0, 1e-3)
        rows.append(row)
    return {
        "role": rng.choice(ROLES),
        "samples": rng.choice([8, 16, 64]),
        "min": rng.choice([1, 5]),
        "buckets": rng.choice([1, 4, 16]),
        "steps": rows,
        "queries": [[rng.randint(0, 4000), rng.randint(0, 64), rng.randint(0, 100_000)] for _ in range(3)],
    }


def test_step_regression_equals_the_released_models() -> None:
    rng = random.Random(7)
    given = [regression_case(rng) for _ in range(2000)]
    differences, rejected = [], 0
    for case, expected in zip(given, released("regression", given), strict=True):
        model = StepRegression(EngineRole(case["role"]), case["samples"], case["buckets"], case["min"])
        model.add_all(step(row) for row in case["steps"])
        found = [model.seconds(StepLoad(1, tokens, requests, kv)) for tokens, requests, kv in case["queries"]]
        seconds = None if None in found else found
        rejected += seconds is None
        if model.is_ready != expected["ready"] or not is_close(seconds, expected["seconds"]):
            differences.append((case, seconds, expected))
    assert not differences, f"{len(differences)}: {differences[0]}"
    assert 50 < rejected < 1500


def engine_case(rng: random.Random) -> dict[str, Any]:
    """Return a linear step model, observed steps, a current step and a capacity query."""
    capabilities = {
        "max_num_batched_tokens": rng.choice([None, 512, 2048, 8192, 0]),
        "max_num_seqs": rng.choice([None, 8, 256]),
        "max_kv_tokens": rng.choice([None, 20_000, 500_000]),
    }
    return {
        "role": rng.choice(ROLES),
        "coefficients": [
            rng.uniform(0.001, 0.02),
            rng.choice([1e-5, 1e-4]),
            rng.choice([0, 1e-4]),
            rng.choice([1e-7, 1e-6]),
        ],
        "window": rng.choice([2, 64]),
        "capabilities": capabilities,
        "observed": [[random_step(rng)] for _ in range(rng.randint(0, 6))],
        "now": random_step(rng),
        "scale": rng.choice([1.0, 2.0, 1.5, 4 / 3]),
        "query": {
            "isl": rng.choice([rng.uniform(0.5, 6000), 0.0, -1.0, 3000.0]),
            "osl": rng.choice([rng.uniform(0.5, 1000), 0.0, 1.0, 150.0]),
            "ttft_sla_ms": rng.choice([None, 50.0, 500.0]),
            "itl_sla_ms": rng.choice([None, 5.0, 20.0, 50.0]),
            "kv_hit_rate": rng.choice([None, 0.0, 0.3, 0.99, 1.5, -1.0]),
            "accept_length": rng.choice([1.0, 0.5, 2.5]),
        },
    }


def test_engine_model_equals_the_released_one_in_latency_and_capacity() -> None:
    rng = random.Random(11)
    given = [engine_case(rng) for _ in range(2000)]
    differences = []
    for case, expected in zip(given, released("engine", given), strict=True):
        model = EngineModel(
            EngineRole(case["role"]),
            LinearSteps(case["coefficients"]),
            case["window"],
            EngineCapabilities(**case["capabilities"]),
        )
        for rows in case["observed"]:
            model.observe({(row[0], row[1]): step(row) for row in rows})
        query = case["query"]
        capacity = model.capacity(
            CapacityQuery(
                isl=query["isl"],
                osl=query["osl"],
                ttft_s=query["ttft_sla_ms"] and query["ttft_sla_ms"] / 1000,
                itl_s=query["itl_sla_ms"] and query["itl_sla_ms"] / 1000,
                kv_hit_rate=query["kv_hit_rate"],
                accept_length=query["accept_length"],
            )
        )
        now, scale = step(case["now"]), case["scale"]
        ms = [None if one is None else one * 1000 for one in (capacity.ttft_s, capacity.itl_s)] if capacity else []
        found = {
            "capacity": capacity and [capacity.rps, *ms, capacity.is_eligible],
            "ttft": model.ttft_s(now, kv_hit_rate=query["kv_hit_rate"]),
            "ttft_scaled": model.ttft_s(now, queue_scale=scale, decode_scale=scale, with_queued_decode=True),
            "itl": model.itl_s(now),
            "itl_scaled": model.itl_s(now, decode_scale=scale, with_queued_prefill=True),
        }
        wrong = [name for name in found if not is_close(found[name], expected[name])]
        if wrong:
            differences.append((wrong, case, found, expected))
    assert not differences, f"{len(differences)}: {differences[0]}"
