"""Engines written for upstream's unified backend SDK serve real requests behind our frontend."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.scripts import EXAMPLES

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration

MODEL = "repeat"
PROMPT = "The frontend speaks HTTP"


class EngineCluster(Cluster):
    """A frontend and workers with engines of the SDK."""

    def engine(self, *flags: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Start the example engine and return when the frontend lists its instance."""
        before = self.workers()
        command = [sys.executable, str(EXAMPLES / "custom_engine/engine.py"), "--model", DEMO_MODEL, *flags]
        process = self.start(f"engine{len(self.processes)}", command, {"DYN_DISCOVERY_BACKEND": "file", **variables})
        self.wait_until(lambda: self.workers() > before, "the engine never appeared")
        return process

    def output(self, process: "subprocess.Popen[bytes]") -> str:
        """Return the log of a process."""
        return (self.folder / f"engine{self.processes.index(process)}.log").read_text(encoding="utf-8")

    def complete(self, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 100, **more})

    def wait_completed(self) -> httpx.Response:
        """Return the response once the model is ready."""
        wait_until(lambda: self.complete().status_code == 200, "the model never answered")
        return self.complete()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EngineCluster]:
    with EngineCluster(tmp_path, "--discovery-backend", "file") as made:
        wait_until(made.is_live, "the frontend never came up")
        yield made


def test_engine_streams_and_is_cleaned_up_after_its_last_request(cluster: EngineCluster) -> None:
    process = cluster.engine()
    assert cluster.wait_completed().json()["choices"][0] == {
        "text": PROMPT,
        "index": 0,
        "finish_reason": "length",
        "logprobs": None,
    }
    with cluster.http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": PROMPT * 3, "max_tokens": 100, "stream": True}
    ) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        first = json.loads(next(lines))["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]"]
    assert "".join([first, *rest]) == PROMPT * 3
    assert process.wait(DEADLINE_S) == 0
    assert f"serving {MODEL} as agg\n" in cluster.output(process)
    assert "cleaned up with 0 running requests" in cluster.output(process)
    assert "aborted" not in cluster.output(process)


def test_engine_aborts_a_request_whose_client_disconnects(cluster: EngineCluster) -> None:
    process = cluster.engine("--delay", "0.3")
    cluster.wait_completed()
    body = {"model": MODEL, "prompt": PROMPT * 20, "max_tokens": 200, "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())  # The other tokens take a minute or half of one.
    wait_until(lambda: "aborted a request" in cluster.output(process), "the request was not aborted")
    assert cluster.complete().status_code == 200


def test_prefill_and_decode_engines_compute_a_request_together(cluster: EngineCluster) -> None:
    decode = cluster.engine("--disaggregation-mode", "decode")
    prefill = cluster.engine("--disaggregation-mode", "prefill")
    assert cluster.wait_completed().json()["choices"][0]["text"] == PROMPT
    for process in (prefill, decode):
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        assert "cleaned up" in cluster.output(process)


def test_system_port_serves_controls_metrics_and_drain(cluster: EngineCluster) -> None:
    port = free_port()
    cluster.engine(DYN_SYSTEM_PORT=str(port), DYN_SYSTEM_HOST="127.0.0.1")
    cluster.wait_completed()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as system:
        assert system.post("/engine/control/set_delay", json={"seconds": 0}).json() == {"status": "ok"}
        assert system.get("/health").json()["status"] == "ready"
        metrics = system.get("/metrics").text
        assert 'dynamo_component_requests_total{dynamo_namespace="examples"' in metrics
        assert "dynamo_component_gpu_cache_usage_percent{" in metrics
        assert system.post("/engine/drain").json()["state"] == "draining"
        wait_until(lambda: cluster.complete().status_code != 200, "the drained worker still received requests")
        assert system.post("/engine/resume").json()["state"] == "serving"
        cluster.wait_completed()


def test_engine_that_fails_to_start_ends_the_process_with_its_error(tmp_path: Path, cluster: EngineCluster) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from engine import RepeatingEngine, run\n"
        "class Broken(RepeatingEngine):\n"
        "    async def start(self, worker_id):\n"
        "        raise RuntimeError('out of memory')\n"
        "run(Broken)\n"
    )
    command = [sys.executable, str(broken), str(EXAMPLES / "custom_engine"), "--model", DEMO_MODEL]
    process = cluster.start("broken", command, {"DYN_DISCOVERY_BACKEND": "file"})
    assert process.wait(DEADLINE_S) == 1
    output = (tmp_path / "broken.log").read_text()
    assert "RuntimeError: out of memory" in output
    assert "cleaned up" in output


def test_sample_engines_are_commands(cluster: EngineCluster) -> None:
    flags = ["--discovery-backend", "file"]
    cluster.run("common.backend.sample_main", "--model-name", DEMO_MODEL, "--max-tokens", "4", *flags)
    cluster.run("common.backend.sample_diffusion_main", *flags)
    names = {DEMO_MODEL, "sample-diffusion-model"}
    wait_until(
        lambda: {one["id"] for one in cluster.http.get("/v1/models").json()["data"]} == names, "a model is missing"
    )
    body = {"model": DEMO_MODEL, "prompt": PROMPT, "logprobs": 2}
    choice = cluster.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    image = {"model": "sample-diffusion-model", "prompt": "a cat", "n": 2}
    found = cluster.http.post("/v1/images/generations", json=image).json()["data"]
    assert [one["url"][:22] for one in found] == ["data:image/png;base64,"] * 2
