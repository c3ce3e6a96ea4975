"""Thorough profiling of a mocker whose step times and cache are known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import dynamo.cpu
from dynamo.mocker.profile import fixed

pytestmark = pytest.mark.integration

PREFILL_MS, DECODE_MS = 60.0, 15.0
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


def profile(directory: Path, worker: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dynamo.profiler", "--config", json.dumps(SPEC), "--output-dir", str(directory)]
    command += ["--local-worker", worker, "--decode-interpolation-granularity", "2", "--deployment-timeout", "60"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_measured_capacity_is_that_of_the_mocker_and_finished_points_are_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "truth.json").write_text(fixed(PREFILL_MS, DECODE_MS))
    worker = (
        f"python -m dynamo.mocker --model-path {{model}} --planner-profile-data {tmp_path / 'truth.json'} "
        "--num-gpu-blocks-override 56 --block-size 64 --max-num-seqs 64"
    )
    done = profile(tmp_path / "out", worker)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = [json.loads(line) for line in (tmp_path / "out" / "measurements.jsonl").read_text().splitlines()]
    prefill = next(one for one in measured if one["kind"] == "prefill")
    single, full = [one for one in measured if one["kind"] == "decode"]
    assert full["concurrency"] == 56 // 6
    assert single["itl_ms"] == pytest.approx(DECODE_MS, rel=0.05)
    assert full["tok_s"] == pytest.approx(1000 * full["concurrency"] / DECODE_MS, rel=0.05)
    assert prefill["ttft_ms"] == pytest.approx(PREFILL_MS, abs=25)
    graph = yaml.safe_load((tmp_path / "out" / "final_config.yaml").read_text())
    assert {one["type"] for one in graph["spec"]["components"]} == {"frontend", "prefill", "decode"}

    again = profile(tmp_path / "out", worker)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "3 measurements are finished" in again.stderr
    assert len((tmp_path / "out" / "measurements.jsonl").read_text().splitlines()) == 3


def test_worker_that_cannot_start_fails_with_the_reason(tmp_path: Path) -> None:
    done = profile(tmp_path / "out", "python -m dynamo.mocker --no-such-flag")
    assert done.returncode == 1
    assert "candidate tp1 dropped: worker ended with exit code 2" in done.stderr
    status = yaml.safe_load((tmp_path / "out" / "profiler_status.yaml").read_text())
    assert (status["status"], status["phase"]) == ("failed", "SweepingPrefill")
    assert "no candidate could be measured" in status["error"]
