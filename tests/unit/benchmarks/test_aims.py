"""Figures of the committed result files, and their limits."""

import json
from pathlib import Path

import pytest
from benchmarks.aims import AIMS, LEAST, Aim, at, figures_of
from benchmarks.report import RESULTS
from benchmarks.suite import PROGRAMS

UNNAMED = {"replay_scale_8x1", "replay_scale_64x10"}
"""Files of a program with several."""


@pytest.mark.parametrize("name", [name for name in AIMS if Path(RESULTS, f"{name}.json").exists()])
def test_committed_result_has_figures(name: str) -> None:
    assert figures_of(name, json.loads(Path(RESULTS, f"{name}.json").read_text(encoding="utf-8")))


def test_aims_are_those_of_programs() -> None:
    assert set(AIMS) - UNNAMED <= {one.name for one in PROGRAMS}


def test_missing_figure_is_left_out() -> None:
    assert figures_of("frontend_memory", {"ours": {"start": 50.0}}) == []
    (start,) = figures_of("frontend_memory", {"ours": {"start": 60.0}, "theirs": {"start": 100.0}})
    assert (start.value, start.aim, start.verdict) == (0.6, "≤ 0.5", "missed")


def test_aim_may_be_a_least_value() -> None:
    assert Aim("x", at("x"), 2.0, LEAST).limit_text == "≥ 2"
