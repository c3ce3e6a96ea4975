"""Every program of the suite exists, and the quick one fits ten minutes."""

import importlib.util
from pathlib import Path

import pytest
from benchmarks import suite
from benchmarks.suite import PROGRAMS, SuiteConfig, run

from dynamo.core.errors import ConfigError

FOLDER = Path(suite.__file__).parent
PARTS = {
    "bare_writer", "epp_servers", "fake_openai", "floods_frontend", "floods_kserve", "floods_records",
    "loadgen", "metronome", "peer",
    "planner_peer", "replay_fit", "replay_peer_run", "router_cases", "suite",
}  # fmt: skip
"""Programs that others run, and those that prepare something."""


def test_programs_exist_and_are_named_once() -> None:
    names = [one.name for one in PROGRAMS]
    assert len(names) == len(set(names))
    assert [name for name in names if importlib.util.find_spec(f"benchmarks.{name}") is None] == []


def test_every_program_that_measures_is_in_the_suite_and_writes_a_result_file() -> None:
    names = {one.name for one in PROGRAMS}
    runnable = {path.stem: path.read_text() for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert set(runnable) - names <= PARTS, "add the program to benchmarks.suite.PROGRAMS"
    assert [name for name in sorted(names) if "write_result" not in runnable[name]] == []


def test_quick_suite_is_a_part_of_the_whole() -> None:
    whole, quick = SuiteConfig().runs(), SuiteConfig(quick=True).runs()
    assert {one.name for one, _, _ in quick} < {one.name for one, _, _ in whole}
    assert all("--quick" in arguments for _, arguments, _ in quick)


def test_quick_suite_ends_within_ten_minutes() -> None:
    quick = SuiteConfig(quick=True)
    assert [quick.limit_s(240.0, elapsed) for elapsed in (0.0, 400.0, 584.0, 590.0, 700.0)] == [
        240.0,
        200.0,
        16.0,
        0.0,
        0.0,
    ]
    assert SuiteConfig().limit_s(240.0, 10_000.0) == 240.0


def test_unknown_program_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--only nothing: must be among frontend_cpu"):
        SuiteConfig(only=["nothing"])


def test_failed_program_is_reported() -> None:
    (program,) = [one for one in PROGRAMS if one.name == "block_hashing"]
    assert run(program, ["--no-such-option"], 30.0).startswith("exit status")
