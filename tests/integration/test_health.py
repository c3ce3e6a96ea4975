"""A worker's health as an operator sees it: ready, unhealthy when its canary fails, ready again."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def send_request(port: int, path: str = "/health") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def series(port: int, name: str) -> float:
    lines = [line for line in send_request(port, "/metrics")[1].splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("engine", ["mocker", "cpu"])
def test_canary_requests_keep_an_idle_worker_ready(cluster: Cluster, engine: str) -> None:
    port = free_port()
    canary = {
        "DYN_HEALTH_CHECK_ENABLED": "true",
        "DYN_CANARY_WAIT_TIME": "0.1",
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "60",
    }
    cluster.run(engine, "--model-name", "m", DYN_SYSTEM_PORT=str(port), **canary)
    wait_until(lambda: send_request(port)[0] == 200, "the worker never was ready")
    wait_until(lambda: series(port, "dynamo_component_requests_total") >= 3, "no request was counted")
    assert series(port, "dynamo_component_errors_total") == 0
    status, body = send_request(port)
    assert (status, json.loads(body)["endpoints"]["generate"]) == (200, "ready")


def test_unresponsive_worker_is_not_ready(cluster: Cluster) -> None:
    port = free_port()
    canary = {
        "DYN_HEALTH_CHECK_ENABLED": "true",
        "DYN_CANARY_WAIT_TIME": "5",  # It is ready until then.
        "DYN_HEALTH_CHECK_PAYLOAD": '{"model": "m", "token_ids": []}',  # The mocker refuses an empty prompt.
    }
    cluster.run("mocker", "--model-name", "m", "--speedup-ratio", "0", DYN_SYSTEM_PORT=str(port), **canary)
    wait_until(lambda: send_request(port)[0] == 200, "the worker never was ready")
    wait_until(lambda: send_request(port)[0] == 503, "its health never failed")
    assert json.loads(send_request(port)[1])["endpoints"]["generate"] == "notready"
    assert send_request(port, "/metadata") == (404, "Discovery metadata not available")
