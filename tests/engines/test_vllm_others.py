"""`dynamo.vllm` features that need a worker of their own: embeddings, and an engine that fails."""

import os
import signal
import subprocess
from collections.abc import Callable

import pytest
from tests.cluster.processes import wait_until
from tests.engines.conftest import ANSWER_S, EngineCluster

pytestmark = pytest.mark.engines


def test_embeddings_depend_on_the_text(serve: Callable[[str], EngineCluster]) -> None:
    servers = serve("embeddings")
    servers.frontend()
    servers.worker("embedding", "--embedding-worker")
    servers.until_ready()
    found = servers.post("/v1/embeddings", model="tiny", input=["one text", "another", "one text"])
    vectors = [one["embedding"] for one in found["data"]]
    assert [len(one) for one in vectors] == [256] * 3
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-2)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    assert found["usage"]["prompt_tokens"] > 3
    servers.stop()


def test_worker_with_a_dead_engine_deregisters_and_exits(serve: Callable[[str], EngineCluster]) -> None:
    servers = serve("death")
    servers.frontend()
    worker = servers.worker("worker")
    servers.until_ready()
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(worker.pid)], capture_output=True, text=True, check=False
    )
    children = [int(one) for one in listed.stdout.split()]
    assert children, "vLLM computes in a process of its own"
    for child in children:
        os.kill(child, signal.SIGKILL)
    assert worker.wait(90) == 1
    servers.processes.remove(worker)
    wait_until(lambda: servers.models() == [], "the dead worker is still found", ANSWER_S)
