"""aiperf, the load generator of upstream's own benchmarks, against `dynamo serve` with the bundled model."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.processes import wait_until
from tests.integration.clients import environments
from tests.integration.clients.test_clients import finished, in_its_own

from dynamo.cpu.config import DEMO_MODEL

pytestmark = [pytest.mark.integration, pytest.mark.clients]

MODEL, EMBEDDER = "demo", "e"
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 12, 64, 16
STREAMED = ("chat", "completions", "responses", "messages")


@dataclass
class Served:
    """A `dynamo serve` with its models."""

    url: str

    def sees(self, *models: str) -> bool:
        listed = httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"]
        return {model["id"] for model in listed} == set(models)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One `dynamo serve`, and an embedding worker that joins it."""
    folder = tmp_path_factory.mktemp("aiperf")
    environment = {**os.environ, "DYN_FILE_KV": str(folder / "kv"), "DYN_TCP_RPC_HOST": "127.0.0.1"}
    commands = (
        ("dynamo.cli", "serve", "--http-host", "127.0.0.1", "--http-port", "0", "--model-name", MODEL, "--enable-anthropic-api"),
        ("dynamo.cpu", "--model-name", EMBEDDER, "--embedding-worker"),
    )  # fmt: skip
    processes = []
    try:
        for number, (module, *argv) in enumerate(commands):
            with open(folder / str(number), "wb") as log:
                command = [sys.executable, "-m", module, *argv]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        output = folder / "0"
        wait_until(lambda: re.search(r"at http://localhost:\d+", output.read_text()) is not None, "it never served")
        found = re.search(r"at (http://localhost:\d+)", output.read_text())
        assert found is not None
        served = Served(found[1])
        wait_until(lambda: served.sees(MODEL, EMBEDDER), "not all models appeared")
        yield served
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@in_its_own("aiperf")
@pytest.mark.parametrize("kind", [*STREAMED, "embeddings"])
def test_aiperf_measures_without_an_error(served: Served, tmp_path: Path, kind: str) -> None:
    command = [
        str(environments.HOME / "aiperf" / "bin" / "aiperf"), "profile",
        "--model", MODEL if kind in STREAMED else EMBEDDER, "--tokenizer", DEMO_MODEL,
        "--url", served.url, "--endpoint-type", kind, "--request-count", str(REQUESTS), "--concurrency", "3",
        "--isl", str(PROMPT_TOKENS), "--artifact-dir", str(tmp_path), "--ui", "none", "--workers-max", "1",
        "--no-gpu-telemetry", "--no-server-metrics",
    ]  # fmt: skip
    if kind in STREAMED:
        command += ["--streaming", "--osl", str(ANSWER_TOKENS)]
    finished(command)
    measured: Any = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == REQUESTS
    assert measured["error_summary"] == [] and not measured["was_cancelled"]
    if kind in STREAMED:
        assert measured["time_to_first_token"]["avg"] > 0
        assert 0 < measured["output_sequence_length"]["avg"] <= ANSWER_TOKENS + 1
