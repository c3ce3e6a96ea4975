"""`dynamo.sglang` and `dynamo.trtllm` end to end, over scripted packages in place of the real ones.

All of our parts are real: frontend, discovery, both planes, KV routing, and the worker process.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

import dynamo.cpu

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(Path(dynamo.cpu.__file__).parent / "demo_model")
BLOCK = 16
KINDS = ("sglang", "trtllm")


class AdapterCluster(Cluster):
    """A cluster of workers whose engines are scripted."""

    def engine(self, kind: str, *argv: str, mode: str = "agg", step_s: float = 0.001) -> "subprocess.Popen[bytes]":
        """One worker, once the frontend has discovered it."""
        before = self.workers()
        scripted = self.folder / "scripted"
        scripted.mkdir(exist_ok=True)
        process = self.run(
            kind,
            *(of_sglang(mode) if kind == "sglang" else of_trtllm(mode)),
            *argv,
            PYTHONPATH=os.pathsep.join((str(ROOT / "tests" / "scripted_packages"), str(ROOT))),
            SCRIPTED_FOLDER=str(scripted),
            SCRIPTED_STEP_S=str(step_s),
            DYN_ENGINE_HEALTH_CHECK_INTERVAL="0.1",
            DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0",
            DYN_PREFILL_DRAIN_TIMEOUT_S="0",
        )
        wait_until(lambda: self.workers() > before or process.poll() is not None, "the worker never appeared")
        assert process.poll() is None, "the worker ended at once"
        return process

    def noted(self, kind: str) -> list[str]:
        """Return the events that scripted engines recorded."""
        files = sorted((self.folder / "scripted").glob(f"*.{kind}"))
        return [line for file in files for line in file.read_text().splitlines()]

    def chat(self, number: int = 1, **fields: Any) -> dict[str, Any]:
        words = " ".join(f"{number} item {number * 1000 + word}" for word in range(30))
        body = {"model": "m", "messages": [{"role": "user", "content": words}], "max_tokens": 8, **fields}
        answer = self.post(body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def is_served(self) -> bool:
        return (
            self.post({"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2}).status_code
            == 200
        )


def of_sglang(mode: str) -> list[str]:
    events = json.dumps({"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}"})
    words = ["--model-path", MODEL, "--served-model-name", "m", "--page-size", str(BLOCK)]
    if mode == "prefill":
        words += ["--disaggregation-bootstrap-port", str(free_port())]
    if mode != "decode":
        words += ["--kv-events-config", events]
    return words + ([] if mode == "agg" else ["--disaggregation-mode", mode])


def of_trtllm(mode: str) -> list[str]:
    words = ["--model", MODEL, "--served-model-name", "m", "--kv-block-size", str(BLOCK), "--publish-kv-events"]
    return words + ([] if mode == "agg" else ["--disaggregation-mode", mode])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[AdapterCluster]:
    made = AdapterCluster(tmp_path, "--router-mode", "kv", "--router-temperature", "0")
    yield made
    made.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_router_sends_a_prefix_to_the_engine_that_published_it(cluster: AdapterCluster, kind: str) -> None:
    for _ in range(2):
        cluster.engine(kind)
    wait_until(cluster.is_served, "the model is not served")
    extra = {"nvext": {"extra_fields": ["routing", "timing"]}}
    for number in range(1, 5):
        first = cluster.chat(number)

        def is_known(number: int = number) -> bool:
            return bool(cluster.chat(number, **extra)["nvext"]["timing"]["kv_hit_rate"] > 0.9)

        wait_until(is_known, "the router never heard of the blocks")
        again = cluster.chat(number)
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_engines_respond_as_one_engine(tmp_path: Path, kind: str) -> None:
    def answers(cluster: AdapterCluster) -> list[str]:
        wait_until(cluster.is_served, "the model is not served")
        return [cluster.chat(number)["choices"][0]["message"]["content"] for number in range(1, 6)]

    reported = []
    for name, modes in (("whole", ["agg"]), ("halves", ["prefill", "decode", "prefill", "decode"])):
        (tmp_path / name).mkdir()
        with AdapterCluster(tmp_path / name, "--router-mode", "kv") as cluster:
            for mode in modes:
                cluster.engine(kind, mode=mode)
            reported.append(answers(cluster))
            if name == "halves":
                assert len(cluster.noted("fetched")) >= len(reported[0])
    assert reported[0] == reported[1]


@pytest.mark.parametrize("kind", KINDS)
def test_disconnected_client_ends_its_request_in_the_engine(cluster: AdapterCluster, kind: str) -> None:
    cluster.engine(kind, step_s=0.05)
    wait_until(cluster.is_served, "the model is not served")
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a b c d"}],
        "max_tokens": 3000,
        "stream": True,
    }
    client = cluster.connect(json.dumps(body).encode())
    assert client.recv(4096)
    client.close()
    wait_until(lambda: bool(cluster.noted("aborted")), "the engine goes on")
    assert cluster.is_served()


@pytest.mark.parametrize("kind", KINDS)
def test_dead_engine_ends_its_worker_and_others_continue(cluster: AdapterCluster, kind: str) -> None:
    dying, living = cluster.engine(kind), cluster.engine(kind)
    wait_until(cluster.is_served, "the model is not served")
    (child,) = (cluster.folder / "scripted" / f"{dying.pid}.child").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: dying.poll() is not None, "the worker lives on without its engine")
    assert dying.returncode == 1
    wait_until(lambda: cluster.workers() == 1, "the worker is still found")
    assert cluster.is_served()
    living.terminate()
    wait_until(lambda: living.poll() is not None, "the worker does not stop")
    assert living.returncode == 0


def test_sglang_worker_exits_on_sigquit_of_a_failed_child(cluster: AdapterCluster) -> None:
    worker = cluster.engine("sglang")
    wait_until(cluster.is_served, "the model is not served")
    worker.send_signal(signal.SIGQUIT)
    wait_until(lambda: worker.poll() is not None, "the worker lives on without its engine")
    assert worker.returncode == 1


@pytest.mark.parametrize("kind", KINDS)
def test_missing_engine_package_is_reported_with_the_install_command(tmp_path: Path, kind: str) -> None:
    model = "--model-path" if kind == "sglang" else "--model"
    done = subprocess.run(
        [sys.executable, "-m", f"dynamo.{kind}", model, MODEL], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "pip install" in line
