"""A frontend killed or stopped: its workers release its requests, and another frontend keeps serving."""

import time
from pathlib import Path

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.cluster.worker import WorkerProcess
from tests.integration.faults.injection import CHAT, Freeze, Kill, RequestThread, failures, serving

pytestmark = pytest.mark.integration

PACED = ("--speedup-ratio", "0.3")  # 300 tokens take six seconds, within which the frontend is stopped.
SLOW = ("--speedup-ratio", "0.1")  # 2000 tokens take twice as long as tests wait.


def start_frontend(cluster: Cluster, port: int) -> None:
    cluster.run("frontend", "--http-host", "127.0.0.1", "--http-port", str(port))


def test_killed_frontend_cancels_its_streams_and_a_restarted_one_serves_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *SLOW)
        streams = [cluster.connect(b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":2000,"stream":true}')
                   for _ in range(4)]  # fmt: skip
        for stream in streams:
            assert b"200 OK" in stream.recv(65536)
        assert worker.inflight == 4

        killed = Kill(cluster.frontend)
        wait_until(lambda: worker.inflight == 0, "the worker continues an abandoned request")
        print(f"frontend killed: the worker let go after {time.monotonic() - killed.at:.3f} s")
        wait_until(lambda: worker.metric("dynamo_component_cancellation_total") == 4, "not all of them were cancelled")
        for stream in streams:
            stream.close()

        start_frontend(cluster, cluster.port)
        wait_until(cluster.is_live, "the frontend never came back")
        assert cluster.post(CHAT).status_code == 200, "it accepts requests before it knows whom to ask"
        wait_until(lambda: worker.is_idle, "something is left over")


def test_paused_frontend_does_not_affect_others_and_resumes_its_streams(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        streams = [RequestThread(cluster, max_tokens=300) for _ in range(4)]
        wait_until(lambda: all(one.has_begun for one in streams), "not all streams began")

        frozen = Freeze(cluster.frontend)
        port = free_port()
        start_frontend(cluster, port)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as other:
            wait_until(lambda: is_up(other), "the other frontend never came up")
            for _ in range(3):
                assert other.post("/v1/chat/completions", json=CHAT).status_code == 200
        frozen.verify()
        wait_until(lambda: worker.is_idle, "the worker waits for a frontend that does not read")
        assert not any(one.is_over for one in streams)

        frozen.thaw()
        assert failures(streams) == []
        assert cluster.post(CHAT).status_code == 200


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False
