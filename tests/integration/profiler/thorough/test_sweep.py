"""Thorough profiling of a mocker whose step times and cache are known."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.processes import wait_until

import dynamo.cpu
from dynamo.mocker.profile import fixed

pytestmark = pytest.mark.integration

PREFILL_MS, DECODE_MS = 60.0, 25.0
MODEL = str(Path(dynamo.cpu.__file__).parent / "demo_model")
SPEC: dict[str, Any] = {
    "model": MODEL,
    "backend": "vllm",
    "image": "r/dynamo-planner:1",
    "searchStrategy": "thorough",
    "hardware": {"gpuSku": "h100_sxm", "totalGpus": 4, "numGpusPerNode": 8},
    "workload": {"isl": 256, "osl": 100},
    "sla": {"ttft": 500, "itl": 40},
}


def command(directory: Path, worker: str, *more: str) -> list[str]:
    found = [sys.executable, "-m", "dynamo.profiler", "--config", json.dumps(SPEC), "--output-dir", str(directory)]
    found += ["--local-worker", worker, "--decode-interpolation-granularity", "2", "--deployment-timeout", "60"]
    return [*found, *more]


def profile(directory: Path, worker: str, *more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(directory, worker, *more), capture_output=True, text=True, timeout=240, check=False)


def mocker(folder: Path) -> str:
    """Return the command of a mocker whose step times and cache are known."""
    (folder / "truth.json").write_text(fixed(PREFILL_MS, DECODE_MS))
    return (
        f"python -m dynamo.mocker --model-path {{model}} --planner-profile-data {folder / 'truth.json'} "
        "--num-gpu-blocks-override 56 --block-size 64 --max-num-seqs 64"
    )


def measurements(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of the journal, without the sizes of caches."""
    path = directory / "measurements.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["kind"] != "cache"]


def test_measured_capacity_is_that_of_the_mocker_and_finished_points_are_not_measured_again(tmp_path: Path) -> None:
    worker = mocker(tmp_path)
    done = profile(tmp_path / "out", worker)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = measurements(tmp_path / "out")
    prefill = next(one for one in measured if one["kind"] == "prefill")
    single, full = [one for one in measured if one["kind"] == "decode"]
    assert full["concurrency"] == 56 // 6
    assert single["itl_ms"] == pytest.approx(DECODE_MS, rel=0.05)
    assert full["tok_s"] == pytest.approx(1000 * full["concurrency"] / DECODE_MS, rel=0.05)
    assert PREFILL_MS - 5 < prefill["ttft_ms"] < 5 * PREFILL_MS  # One request: a busy machine delays it.
    graph = yaml.safe_load((tmp_path / "out" / "final_config.yaml").read_text())
    assert {one["type"] for one in graph["spec"]["components"]} == {"frontend", "prefill", "decode"}

    again = profile(tmp_path / "out", worker)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "3 measurements are finished" in again.stderr
    assert "all measurements are finished" in again.stderr
    assert measurements(tmp_path / "out") == measured


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_continues_where_it_ended(tmp_path: Path, number: signal.Signals) -> None:
    worker, out = mocker(tmp_path), tmp_path / "out"
    with open(tmp_path / "log", "wb") as log:
        first = subprocess.Popen(command(out, worker), stdout=log, stderr=log)
    try:
        wait_until(lambda: len(measurements(out)) >= 2, "nothing was measured")
        first.send_signal(number)
        code = first.wait(60)
    finally:
        first.kill()
        first.wait()
    kept = measurements(out)
    if number == signal.SIGINT:
        assert code == 130
        status = yaml.safe_load((out / "profiler_status.yaml").read_text())
        assert (status["status"], status["error"]) == ("failed", "interrupted; finished measurements are kept")
    wait_until(lambda: not processes_with(str(tmp_path)), "processes are left")

    again = profile(out, worker)
    assert again.returncode == 0, again.stderr[-2000:]
    assert f"{len(kept)} measurements are finished" in again.stderr
    found = measurements(out)
    assert found[: len(kept)] == kept
    assert [(one["kind"], one["concurrency"]) for one in found] == [("prefill", 1), ("decode", 1), ("decode", 9)]


def processes_with(text: str) -> list[str]:
    """Return the command lines of running processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if text in line]


def test_worker_that_cannot_start_fails_with_the_reason(tmp_path: Path) -> None:
    done = profile(tmp_path / "out", "python -m dynamo.mocker --no-such-flag")
    assert done.returncode == 1
    assert "candidate tp1 dropped: worker ended with exit code 2" in done.stderr
    status = yaml.safe_load((tmp_path / "out" / "profiler_status.yaml").read_text())
    assert (status["status"], status["phase"]) == ("failed", "SweepingPrefill")
    assert "no candidate could be measured" in status["error"]
