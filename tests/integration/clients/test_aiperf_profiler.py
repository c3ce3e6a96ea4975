"""The thorough strategy with aiperf as its load generator, on a mocker of known step times and capacity."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.clients import environments
from tests.integration.clients.test_clients import in_its_own

from dynamo.cpu.config import DEMO_MODEL
from dynamo.mocker.profile import fixed

pytestmark = [pytest.mark.integration, pytest.mark.clients]

PREFILL_MS, DECODE_MS = 60.0, 25.0
SPEC: dict[str, Any] = {
    "model": str(DEMO_MODEL), "backend": "vllm", "image": "r/dynamo-planner:1", "searchStrategy": "thorough",
    "hardware": {"gpuSku": "h100_sxm", "totalGpus": 4, "numGpusPerNode": 8},
    "workload": {"isl": 256, "osl": 100}, "sla": {"ttft": 500, "itl": 40},
}  # fmt: skip


@in_its_own("aiperf")
def test_capacity_that_aiperf_measures_is_that_of_the_mocker(tmp_path: Path) -> None:
    (tmp_path / "truth.json").write_text(fixed(PREFILL_MS, DECODE_MS))
    worker = (
        f"python -m dynamo.mocker --model-path {{model}} --planner-profile-data {tmp_path / 'truth.json'} "
        "--num-gpu-blocks-override 56 --block-size 64 --max-num-seqs 64"
    )
    command = [
        sys.executable, "-m", "dynamo.profiler", "--config", json.dumps(SPEC), "--output-dir", str(tmp_path / "out"),
        "--local-worker", worker, "--decode-interpolation-granularity", "2", "--load-generator", "aiperf",
        "--aiperf", str(environments.HOME / "aiperf" / "bin" / "aiperf"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "out" / "measurements.jsonl").read_text().splitlines()
    measured = [one for one in map(json.loads, lines) if one["kind"] != "cache"]
    assert [(one["kind"], one["concurrency"]) for one in measured] == [("prefill", 1), ("decode", 1), ("decode", 9)]
    assert measured[0]["ttft_ms"] > 0.95 * PREFILL_MS
    full = measured[-1]
    assert full["tok_s"] == pytest.approx(1000 * full["concurrency"] / DECODE_MS, rel=0.05)
    found = {path.parent.name for path in (tmp_path / "out").rglob("profile_export_aiperf.json")}
    exports = sorted(
        name for name in found if name.startswith("aiperf_")
    )  # Newer releases add a folder for each phase.
    assert exports == [
        "aiperf_isl256_osl100_n1", "aiperf_isl256_osl100_n1_warmup", "aiperf_isl256_osl100_n9",
        "aiperf_isl256_osl100_n9_warmup", "aiperf_isl256_osl5_n1",
    ]  # fmt: skip
