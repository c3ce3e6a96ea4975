"""A recommendation is tried on a machine without GPUs: its graph with simulated engines is served."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.cluster.processes import wait_until

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration


def test_recommended_deployment_is_served_with_simulated_engines(tmp_path: Path) -> None:
    load = ["--request-rate", "4", "--isl", "300", "--osl", "20", "--requests", "20", "--ttft", "500", "--itl", "30"]
    command = [sys.executable, "-m", "dynamo.cli"]
    out = tmp_path / "out"
    found = subprocess.run(
        [*command, "recommend", str(DEMO_MODEL), "--gpu", "l4", "--gpus", "2", *load, "--output-dir", str(out)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    checked = subprocess.run(
        [*command, "deploy", "validate", str(out / "graph.yaml"), str(out / "rehearsal.yaml")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "2 checked, 0 problems" in checked.stdout, checked.stdout + checked.stderr

    variables = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
    }
    log = tmp_path / "serve.log"
    served = ["serve", "-f", str(out / "rehearsal.yaml"), "--http-host", "127.0.0.1", "--http-port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *served], stdout=file, stderr=file, env=variables)
    try:
        wait_until(lambda: re.search(r"http://localhost:\d+/v1", log.read_text()) is not None, "it is not served")
        address = re.search(r"http://localhost:(\d+)/v1", log.read_text())
        assert address is not None
        answer = httpx.post(
            f"http://127.0.0.1:{address[1]}/v1/chat/completions",
            json={"model": str(DEMO_MODEL), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        process.terminate()
        process.wait(60)
