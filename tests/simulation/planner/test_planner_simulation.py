"""The planner keeps its invariants under the faults of every seed."""

import os

import pytest
from tests.simulation.planner.mutants import MUTANTS
from tests.simulation.planner.scenario import FAULT_KINDS, drawn
from tests.simulation.planner.simulation import check, describe

SEEDS = int(os.environ.get("PLANNER_SEEDS", "24"))


def test_planner_keeps_its_invariants_under_every_seed() -> None:
    failures = [
        f"SEED={seed} python -m tests.simulation.planner  # {found[0]}"
        for seed in range(SEEDS)
        if (found := check(seed))
    ]
    assert failures == [], "\n" + "\n".join(failures)


def test_seeds_of_the_test_contain_every_fault() -> None:
    drawn_kinds = {fault.kind for seed in range(SEEDS) for fault in drawn(seed).faults}
    assert drawn_kinds == set(FAULT_KINDS)


def test_seed_determines_every_decision() -> None:
    assert describe(7)[0] == describe(7)[0]


@pytest.mark.parametrize("name", MUTANTS)
def test_introduced_bug_is_detected(name: str) -> None:
    with MUTANTS[name]():
        assert any(check(seed) for seed in range(30))
