"""Arbitration compared with the released global planner's: the same sequences of requests, pools and times."""

import random
from typing import Any

import pytest
from tests.conformance.planner_cases import released

from dynamo.global_planner.arbitration import GpuArbiter, ReplicaPool, TotalGpuBand, apply_order
from dynamo.protocols.scaling import TargetReplica

pytestmark = pytest.mark.conformance
ROLES = ("prefill", "decode")


def arbitration_case(rng: random.Random) -> dict[str, Any]:
    """Return a band and a sequence of requests; the pools follow the approved ones or stay as they are."""
    names = [f"k/{name}" for name in "abcd"[: rng.randint(1, 4)]]
    pools = {
        name: {role: [rng.randint(0, 6), rng.choice([0, 1, 1, 2, 4])] for role in rng.sample(ROLES, rng.randint(1, 2))}
        for name in names
    }
    total = sum(count * gpus for roles in pools.values() for count, gpus in roles.values())
    low = rng.choice([-1, max(0, total - rng.randint(0, 6)), total])
    high = rng.choice([-1, total, total + rng.randint(0, 6)])
    requests = []
    at = 0.0
    for _ in range(rng.randint(1, 6)):
        at += rng.choice([1, 10, 60, 200])
        name = rng.choice(names)
        targets = [
            [role, max(0, pools[name].get(role, [2])[0] + rng.choice([-4, -2, -1, 0, 1, 2, 5]))]
            for role in rng.sample(ROLES, rng.randint(1, 2))
        ]
        requests.append([at, name, targets, rng.random() < 0.7])
    return {"pools": pools, "band": [low, high], "ttl": 120.0, "requests": requests}


def ours(case: dict[str, Any]) -> list[Any]:
    """Return the partners, rejection and apply order of each request."""
    arbiter = GpuArbiter(TotalGpuBand(*case["band"]), case["ttl"])
    state = {name: {role: [*pool] for role, pool in roles.items()} for name, roles in case["pools"].items()}
    found: list[Any] = []
    for at, name, given, is_applied in case["requests"]:
        pools: Any = {key: {role: ReplicaPool(*pool) for role, pool in roles.items()} for key, roles in state.items()}
        targets = [TargetReplica(sub_component_type=role, desired_replicas=n) for role, n in given]
        result = arbiter.decide(name, targets, pools, at)
        order = [] if result.rejection is not None else apply_order(name, targets, result.partners, pools)
        found.append(
            {
                "partners": [[*one.key, one.desired] for one in result.partners],
                "rejection": result.rejection,
                "order": [[key, [[t.sub_component_type, t.desired_replicas] for t in many]] for key, many in order],
            }
        )
        if is_applied:
            for key, many in order:
                for target in many:
                    if target.sub_component_type in state[key]:
                        state[key][target.sub_component_type][0] = target.desired_replicas
    return found


def test_arbitration_equals_the_released_one() -> None:
    rng = random.Random(11)
    cases = [arbitration_case(rng) for _ in range(4000)]
    differences = []
    for case, expected in zip(cases, released("arbitration", cases), strict=True):
        found = ours(case)
        differences += [(case, a, b) for a, b in zip(found, expected, strict=True) if a != b][:1]
    assert not differences, f"{len(differences)}: {differences[:2]}"


def test_cases_reach_every_outcome() -> None:
    rng = random.Random(11)
    found = [one for _ in range(500) for one in ours(arbitration_case(rng))]
    assert sum(bool(one["partners"]) for one in found) > 50
    assert sum(one["rejection"] is not None for one in found) > 100
    assert any(len(one["partners"]) > 1 for one in found)
