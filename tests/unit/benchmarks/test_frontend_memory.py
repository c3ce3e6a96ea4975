"""Evaluation of samples in the memory benchmark."""

import pytest
from benchmarks.frontend_memory import Memory, MemoryConfig, markdown

from dynamo.core.errors import ConfigError


def memory(start, busy, early, end):
    return Memory(start=start, busy=busy, early=early, end=end, requests=1000, seconds=2.0)


def test_growth_is_measured_from_the_start_and_from_the_first_tenth():
    found = memory(100.0, 150.0, 120.0, 126.0)
    assert found.growth == pytest.approx(0.26)
    assert found.late_growth == pytest.approx(0.05)


def test_memory_table_ends_with_the_ratio():
    text = markdown({"ours": memory(50.0, 60.0, 50.0, 50.0), "theirs": memory(100.0, 120.0, 100.0, 110.0)})
    assert "| ours | 50.0 | 60.0 | 50.0 | +0% | +0% | 500 |" in text
    assert "| **ours/theirs** | **0.50** | **0.50** | **0.45** |  |  | **1.00** |" in text


def test_single_system_table_has_no_ratio():
    assert "ours/theirs" not in markdown({"ours": memory(50.0, 60.0, 50.0, 50.0)})


def test_quick_memory_run_sends_a_tenth_of_the_requests():
    assert MemoryConfig(quick=True).count == 10_000
    with pytest.raises(ConfigError):
        MemoryConfig(requests=1)
