"""KV tiers with real processes: the router indexes the blocks of each tier, and a worker copies them from there."""

import re
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
from tests.cluster.worker import WorkerProcess

pytestmark = pytest.mark.integration

PROMPT = " ".join(f"worker {number} holds block {number * 7}" for number in range(16))


class PeeringCluster(Cluster):
    """Two workers of the bundled model that copy blocks from each other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--router-mode", "kv")
        variables = {
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "512", "DYN_KVBM_PEERS": "true",
            "DYN_KVBM_PEER_HOST": "127.0.0.1", "DYN_KVBM_ONBOARD_TIMEOUT_SECS": str(DEADLINE_S),
        }  # fmt: skip
        self.members = [WorkerProcess(self, module="cpu", **variables) for _ in range(2)]

    def chat(self, worker: int | None = None) -> tuple[str, dict[str, Any], int]:
        """Return the response, its routing data, and the number of prompt tokens that were not computed."""
        nvext: dict[str, Any] = {"extra_fields": ["routing"]}
        if worker is not None:
            nvext["backend_instance_id"] = worker
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 8,
            "temperature": 0,
            "nvext": nvext,
        }
        answer = self.http.post("/v1/chat/completions", json=body, headers={"x-dynamo-explain": "1"})
        assert answer.status_code == 200, answer.text
        reported = answer.json()
        cached = (reported["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return reported["choices"][0]["message"]["content"], reported["nvext"]["routing"], cached

    def held(self) -> dict[int, int]:
        """Return the number of blocks that each worker has published."""
        (router,) = self.http.get("/routing/state").json()["routers"]
        return {rank["worker_id"]: rank["held_blocks"] for rank in router["ranks"]}

    def of_workers(self, name: str) -> float:
        """Return the sum over both workers."""
        return sum(member.metric(name) for member in self.members)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PeeringCluster]:
    with PeeringCluster(tmp_path) as cluster:
        yield cluster


def test_blocks_cached_by_another_worker_are_copied(cluster: PeeringCluster) -> None:
    first, routing, _ = cluster.chat()
    holder, blocks = routing["worker_id"], routing["prompt_blocks"]
    assert blocks >= 5
    wait_until(
        lambda: len(held := cluster.held()) == 2 and held.get(holder, 0) >= blocks,
        "the router never heard of the blocks, or of the other worker",
    )
    other = next(worker for worker in cluster.held() if worker != holder)
    answer, routing, cached = cluster.chat(other)
    assert routing["worker_id"] == other
    assert answer == first
    assert cached >= (blocks - 1) * 16
    assert cluster.of_workers("kvbm_onboard_blocks_p2d") >= blocks - 1
    assert cluster.of_workers("kvbm_peer_failures") == 0
    status = cluster.members[0].request("POST", "/engine/kvbm", {})
    assert status.json()["tiers"]["host"]["stored"] >= blocks - 1


LONG = [" ".join(f"{at} follows {at * 97 + word * 13}" for word in range(14)) for at in range(8)]
CACHE_BLOCKS = 64


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--router-mode", "kv") as cluster:
        yield cluster


def test_late_frontend_counts_host_blocks_of_workers(alone: Cluster) -> None:
    alone.run(
        "cpu", "--model-name", "m", "--kv-cache-blocks", str(CACHE_BLOCKS), "--threads", "1",
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="512",
    )  # fmt: skip
    wait_until(lambda: alone.workers() == 1, "the worker never appeared")

    def send_request(http: httpx.Client, prompt: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    def held(http: httpx.Client) -> int:
        try:
            routers = http.get("/routing/state").json()["routers"]
        except httpx.TransportError:
            return 0
        return sum(int(rank["held_blocks"]) for router in routers for rank in router["ranks"])

    for prompt in LONG:
        send_request(alone.http, prompt)
    wait_until(lambda: held(alone.http) > CACHE_BLOCKS, "the router heard of no block below the device")
    port = free_port()
    alone.run("frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as late:
        wait_until(lambda: held(late) >= held(alone.http), "the late router was not told of all tiers")
        send_request(late, LONG[0])
    command = [sys.executable, "-m", "dynamo.cli", "route", "explain", "--url", f"http://127.0.0.1:{port}"]
    reported = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    found = re.search(r"→ \S+ +(\d+)\+(\d+)\+(\d+) ", reported)
    assert found is not None, reported
    assert int(found[2]) >= 3, reported
