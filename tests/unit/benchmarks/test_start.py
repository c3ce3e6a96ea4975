"""Evaluation of samples in the start benchmark."""

import pytest
from benchmarks.start import Loaded, StartConfig, Started, markdown, summarise

from dynamo.core.errors import ConfigError


def test_start_figures_are_medians_and_the_table_ends_with_their_ratios() -> None:
    ours = summarise(
        [Started(0.2, 0.1, 40.0), Started(0.9, 0.1, 40.0), Started(0.3, 0.1, 40.0)], Loaded(80.0, 90.0), 500
    )
    theirs = summarise([Started(0.6, 0.2, 80.0)], Loaded(160.0, 180.0), 250)
    assert (ours["ready_s"], ours["ready_s_min"]) == (0.3, 0.2)
    last = markdown({"ours": ours, "theirs": theirs}).splitlines()[-1]
    assert last == "| **ours/theirs** | **0.50** | **0.33** | **0.50** | **0.50** | **0.50** | **0.50** | **2.00** |"


def test_start_table_of_one_system_has_no_ratios() -> None:
    one = summarise([Started(0.2, 0.1, 40.0)], Loaded(80.0, 90.0), 500)
    assert "ours/theirs" not in markdown({"ours": one})


def test_start_repeats_less_often_when_quick() -> None:
    assert StartConfig(quick=True).repetitions < StartConfig().repetitions
    assert StartConfig(reps=5).repetitions == 5
    with pytest.raises(ConfigError):
        StartConfig(reps=-1)
