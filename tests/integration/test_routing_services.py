"""Routers as separate processes: two pools behind a global router, and slot trackers that replicate their load."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.corpus import bench_model
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

BLOCK = ("--block-size", "16", "--speedup-ratio", "0")
POOLS = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["short", "long"],
    "agg_pool_selection_strategy": {
        "isl_min": 0,
        "isl_max": 200,
        "isl_resolution": 2,
        "ttft_min_ms": 1,
        "ttft_max_ms": 1000,
        "ttft_resolution": 1,
        "itl_min_ms": 1,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "agg_pool_mapping": [[[0]], [[1]]],
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "pools.json").write_text(json.dumps(POOLS))
    with Cluster(tmp_path, "--namespace", "front") as made:
        yield made


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_request_is_routed_to_the_pool_of_its_length_and_to_a_worker_there(cluster: Cluster) -> None:
    model = bench_model()
    for pool in ("short", "long"):
        cluster.run("mocker", "--model-path", model, "--model-name", "m", "--namespace", pool, *BLOCK)
        cluster.run("router", "--endpoint", f"{pool}.backend.generate", "--router-block-size", "16")
    port = free_port()
    cluster.run(
        "global_router", "--config", str(cluster.folder / "pools.json"), "--model-name", "m", "--model-path", model,
        "--namespace", "front", DYN_SYSTEM_PORT=str(port), DYN_SYSTEM_HOST="127.0.0.1",
    )  # fmt: skip

    def answered(words: int) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello " * words}], "max_tokens": 3}
        try:
            return cluster.http.post("/v1/chat/completions", json=body).status_code
        except httpx.TransportError:
            return 0

    wait_until(lambda: answered(3) == 200, "no answer through the global router")
    wait_until(lambda: answered(300) == 200, "no answer from the other pool")
    shown = metrics(port)
    for pool in ("short", "long"):
        assert f'dynamo_global_router_requests_total{{stage="agg",pool_namespace="{pool}"}}' in shown, shown


class Tracker:
    """Slot tracker in a process of its own."""

    def __init__(self, *argv: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen([sys.executable, "-m", "dynamo.slot_tracker", "--port", str(self.port), *argv])

    def send_request(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def is_up(self) -> bool:
        try:
            self.send_request("GET", "/health")
        except OSError:
            return False
        return True

    def load(self) -> tuple[int, int]:
        row = self.send_request("GET", "/loads")[0]
        return row["active_prefill_tokens"], row["active_decode_blocks"]


def test_slot_trackers_replicate_load() -> None:
    ports = free_port(), free_port()
    one, other = (
        Tracker("--replica-sync-port", str(ports[mine]), "--replica-sync-peers", f"tcp://127.0.0.1:{ports[1 - mine]}")
        for mine in (0, 1)
    )
    try:
        for tracker in (one, other):
            wait_until(tracker.is_up, "a slot tracker does not answer")
            worker = {"worker_id": 1, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
            tracker.send_request("POST", "/register", worker)
        added = {
            "worker_id": 1, "dp_rank": 0, "sequence_hashes": [1, 2], "new_isl_tokens": 8, "model_name": "m",
        }  # fmt: skip
        count = 0

        def is_received() -> bool:
            nonlocal count
            count += 1  # The first ones may arrive before the other one subscribes.
            one.send_request("POST", "/add", {"request_id": f"r{count}", **added})
            return other.load()[1] > 0

        wait_until(is_received, "the other tracker never heard of a request")
        for number in range(1, count + 1):
            one.send_request("POST", "/prefill_complete", {"request_id": f"r{number}", "model_name": "m"})
        wait_until(lambda: other.load()[0] == 0, "the other tracker never heard of the first tokens")
        for number in range(1, count + 1):
            one.send_request("POST", "/free", {"request_id": f"r{number}", "model_name": "m"})
        wait_until(lambda: other.load() == (0, 0), "the other tracker never heard of the ends")
    finally:
        for tracker in (one, other):
            tracker.process.terminate()
            assert tracker.process.wait(timeout=30) == 0
