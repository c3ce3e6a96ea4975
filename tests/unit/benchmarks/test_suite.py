"""Every program of the suite exists, and the quick one fits ten minutes."""

import importlib.util

import pytest
from benchmarks.suite import PROGRAMS, SuiteConfig, run

from dynamo.core.errors import ConfigError


def test_programs_exist_and_are_named_once() -> None:
    names = [one.name for one in PROGRAMS]
    assert len(names) == len(set(names))
    assert [name for name in names if importlib.util.find_spec(f"benchmarks.{name}") is None] == []


def test_quick_suite_is_a_part_of_the_whole() -> None:
    whole, quick = SuiteConfig().runs(), SuiteConfig(quick=True).runs()
    assert {one.name for one, _, _ in quick} < {one.name for one, _, _ in whole}
    assert all("--quick" in arguments for _, arguments, _ in quick)


def test_unknown_program_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--only nothing: must be among frontend_cpu"):
        SuiteConfig(only=["nothing"])


def test_failed_program_is_reported() -> None:
    (program,) = [one for one in PROGRAMS if one.name == "block_hashing"]
    assert run(program, ["--no-such-option"], 30.0).startswith("exit status")
