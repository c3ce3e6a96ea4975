"""Every program of the suite exists, and the quick one fits ten minutes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import suite
from benchmarks.aims import Figure
from benchmarks.corpus import ROOT
from benchmarks.suite import PROGRAMS, Outcome, SuiteConfig, run_program, summary
from benchmarks.suite_process import Ended

from dynamo.core.errors import ConfigError

FOLDER = Path(suite.__file__).parent
PARTS = {
    "bare_writer", "epp_servers", "fake_openai", "floods.frontend", "floods.kserve", "floods.records",
    "loadgen", "metronome", "peer",
    "planner_peer", "replay_fit", "replay_peer_run", "router_cases", "suite",
}  # fmt: skip
"""Programs that others run, and those that prepare something."""


def test_programs_exist_and_are_named_once() -> None:
    names = [one.name for one in PROGRAMS]
    assert len(names) == len(set(names))
    assert [name for name in names if importlib.util.find_spec(f"benchmarks.{name}") is None] == []


def module_name(path: Path) -> str:
    """Return the name with which a program is run: `python -m benchmarks.NAME`."""
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")


def test_every_program_that_measures_is_in_the_suite_and_writes_a_result_file() -> None:
    names = {one.name for one in PROGRAMS}
    texts = {module_name(path): path.read_text() for path in FOLDER.rglob("*.py")}
    runnable = {name: text for name, text in texts.items() if 'if __name__ == "__main__":' in text}
    assert set(runnable) - names <= PARTS, "add the program to benchmarks.suite.PROGRAMS"
    assert [name for name in sorted(names) if "write_result" not in runnable[name]] == []


def test_quick_suite_is_a_part_of_the_whole() -> None:
    whole, quick = SuiteConfig().runs(), SuiteConfig(quick=True).runs()
    assert {one.name for one, _, _ in quick} < {one.name for one, _, _ in whole}
    assert all("--quick" in arguments for _, arguments, _ in quick)
    limits = [limit_s for _, _, limit_s in quick]
    assert limits == sorted(limits)


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


def test_trace_is_given_to_the_programs_that_use_it(tmp_path: Path) -> None:
    runs = {one.name: arguments for one, arguments, _ in SuiteConfig(trace=str(tmp_path / "trace.gz")).runs()}
    assert [name for name, arguments in runs.items() if "--trace" in arguments] == [
        "routing_quality", "replay_scale", "planner_quality", "recommend_search",
    ]  # fmt: skip


def test_unknown_program_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--only nothing: must be among frontend_cpu"):
        SuiteConfig(only=["nothing"])


def test_failed_program_is_reported_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [one for one in PROGRAMS if one.name == "block_hashing"]
    failed = run_program(program, ["--no-such-option"], 30.0)
    assert failed.is_failed
    done = Outcome(
        "tracing", Ended("", 2.0, 0), [Figure("memory", 0.4, "≤ 0.5", True, ""), Figure("time", 3.0, "≤ 2", False, "")]
    )
    lines = summary([failed, done, Outcome("scale", reason="needs --trace")]).splitlines()
    assert "exit status" in lines[1]
    assert [line.split()[-1] for line in lines[2:4]] == ["met", "missed"]
    assert "not run: needs --trace" in lines[4]
    assert lines[-1].startswith("1 of 2 aims met; 1 of 3 programs failed")


def test_processes_and_files_that_a_program_leaves_are_removed(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, tempfile; tempfile.mkdtemp();"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL);"
        f"open({str(tmp_path / 'found')!r}, 'w').write(f'{{child.pid}} {{tempfile.gettempdir()}}'); sys.exit(0)"
    )
    runner = (
        "import subprocess; from benchmarks import suite_process as one; one.adopt_descendants(); one.GRACE_S = 0.0;"
        "own = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL);"
        f"print(one.run([{sys.executable!r}, '-c', {program!r}], 30.0, print).left, own.poll()); own.kill()"
    )
    done = subprocess.run(
        [sys.executable, "-c", runner], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["1", "None"]  # A child from before is left alone.
    pid, folder = (tmp_path / "found").read_text().split()
    assert not Path("/proc", pid).exists()
    assert not Path(folder).exists()
