"""Merge rules compared with the released planner's on the same random stage results."""

import random
from typing import Any

import pytest
from tests.conformance.planner_cases import released

from dynamo.planner.core.merge import PluginResult, merge_targets
from dynamo.planner.plugins.types import AcceptResult, ComponentTarget, OverrideResult, OverrideType, RejectResult

pytestmark = pytest.mark.conformance


def merge_case(rng: random.Random) -> dict[str, Any]:
    """Return the results of up to four plugins, and a baseline.

    Without SET targets (CONSTRAIN) no override is final: the pipeline ignores the flag there.
    """
    results = []
    allows_set = rng.random() < 0.7
    for number in range(rng.randint(0, 4)):
        kind = rng.choice(["override", "override", "override", "accept", "accept", "reject"])
        kind = kind if kind != "reject" or rng.random() < 0.3 else "override"
        targets = [
            [rng.choice(["prefill", "decode"]), rng.choice([0, 1, 2, 5, 9, None]), rng.choice([0, 0, 1, 2])]
            for _ in range(rng.randint(0, 3))
        ]
        is_final = allows_set and rng.random() < 0.15
        targets = [target for target in targets if not (is_final and target[1] is None)]
        results.append([f"p{number}", rng.randint(0, 3), kind, targets, is_final])
    roles = ["prefill", "decode"]
    return {
        "results": results,
        "baseline": {role: rng.randint(0, 8) for role in roles},
        "set_allowed": allows_set,
    }


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """Return our merge in the released planner's form."""
    results = []
    for plugin_id, priority, kind, targets, final in case["results"]:
        made: Any = AcceptResult()
        if kind == "reject":
            made = RejectResult(reason="no")
        elif kind == "override":
            made = OverrideResult(
                targets=[
                    ComponentTarget(sub_component_type=role, replicas=count, type=OverrideType(of))
                    for role, count, of in targets
                ]
            )
        results.append(PluginResult(plugin_id, priority, made, final))
    found = merge_targets(results, case["baseline"], allows_set=case["set_allowed"])
    return {
        "targets": found.proposal and {one.sub_component_type: one.replicas for one in found.proposal.targets},
        "rejected": found.is_rejected,
        "final": found.final_from,
        "dropped": sorted(found.dropped_sets),
    }


def test_merged_targets_equal_the_released_ones() -> None:
    rng = random.Random(9)
    given = [merge_case(rng) for _ in range(4000)]
    differences = [
        (case, ours(case), expected)
        for case, expected in zip(given, released("merge", given), strict=True)
        if ours(case) != {name: value for name, value in expected.items() if name != "clamped"}
    ]
    assert not differences, f"{len(differences)}: {differences[0]}"
