"""Invariants of production's frontends and workers for every seed, and detection of introduced bugs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.mutants import MUTANTS
from tests.simulation.runs import run
from tests.simulation.scenario import FAULTS
from tests.simulation.simulation import Simulation

SEEDS = int(os.environ.get("SEEDS", "200"))
MUTANT_SEEDS = 250  # Five seeds detect most of them.
ROOT = Path(__file__).resolve().parents[2]


def test_invariants_hold_under_every_seed() -> None:
    report = run(range(SEEDS))
    assert report.failures == [], "\n" + "\n".join(report.failures)
    if SEEDS >= 200:  # Seeds after which every kind of event has occurred.
        wanted = [*(f"fault: {kind}" for kind in FAULTS), "messages lost", "doubled", "held back", "clients that left"]
        wanted += ["prefills done", "prefills done again"]
        wanted += ["answers complete", "streams that moved", "answers 503", "answers 504", "answers 529"]
        assert [what for what in wanted if not report.seen[what]] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_introduced_bug_is_detected(name: str) -> None:
    with MUTANTS[name]():
        assert any(run([seed]).failures for seed in range(MUTANT_SEEDS))


def test_seed_determines_the_run_in_every_process() -> None:
    variables = {**os.environ, "SEED": "3", "PYTHONHASHSEED": "12345"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.simulation"], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    ).stdout
    for seed in (5, 3):
        simulation = Simulation(seed).run()
    assert output.splitlines()[-1] == f"{simulation.loop.callbacks} callbacks, digest {simulation.digest()[:16]}"
    assert "\n".join(simulation.events) in output
