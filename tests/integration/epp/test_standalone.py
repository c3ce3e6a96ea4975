"""The endpoint picker in standalone mode: engine pods of an InferencePool, their KV events and their render endpoint."""

import contextlib
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq
from benchmarks.ports import free_port
from tests.cluster.gateway import DESTINATION, GatewayStream, refusal
from tests.cluster.kubernetes.pods import call
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.processes import ProcessGroup, wait_until

from dynamo.grpc.health import CLASSES as HEALTH_CLASSES
from dynamo.grpc.health import HEALTH_SERVICE, SERVING
from dynamo.runtime.discovery.pod_identity import id_of_name

pytestmark = [pytest.mark.integration, pytest.mark.kserve]

BLOCK = 4
WORKER = "x-dynamo-worker-instance-id"
PODS = "/api/v1/namespaces/default/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
POOL_SPEC: dict[str, Any] = {"selector": {"matchLabels": {"app": "engine"}}, "targetPorts": [{"number": 8000}]}
FREE_FORM = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
POOL_DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
    "spec": {
        "group": "inference.networking.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool", "listKind": "InferencePoolList"},
        "versions": [
            {"name": "v1", "served": True, "storage": True,
             "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": FREE_FORM}}}},
        ],
    },
}  # fmt: skip


def tokens_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


class RenderHandler(BaseHTTPRequestHandler):
    """vLLM's render endpoint, for a tokenizer whose words are numbers."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][0]["content"]
        status, answer = (200, {"token_ids": tokens_of(text)}) if text != "bad" else (400, {"error": "bad words"})
        data = json.dumps(answer if self.path == "/v1/chat/completions/render" else {}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Engine:
    """KV events of one engine on a loopback address of its own."""

    def __init__(self, ip: str, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(f"tcp://{ip}:{port}")
        self._sequence = 0

    def store(self, tokens: list[int]) -> None:
        """Publish a prompt's blocks as cached."""
        hashes = [sum(tokens[: end + BLOCK]) + end for end in range(0, len(tokens), BLOCK)]
        event = ["BlockStored", hashes, None, tokens, BLOCK, None]
        payload = msgspec.msgpack.encode([0.0, [event]])
        self._socket.send_multipart([b"", struct.pack(">Q", self._sequence), payload])
        self._sequence += 1

    def close(self) -> None:
        self._socket.close(linger=0)


class StandaloneGroup(ProcessGroup):
    """Pods in a cluster, and pickers of their pool."""

    def __init__(self, folder: Path, server: KubernetesServer, render: str) -> None:
        super().__init__(folder)
        self.server, self.render, self.event_port = server, render, free_port()
        self._open = contextlib.ExitStack()

    def stop(self) -> None:
        """Close what tests opened, also of a test that failed, and end the processes."""
        self._open.close()
        super().stop()

    def engine(self, ip: str) -> Engine:
        """Publish the KV events of an engine."""
        return self._open.enter_context(contextlib.closing(Engine(ip, self.event_port)))

    def pod(self, name: str, ip: str, *, ready: bool = True) -> None:
        """Create a pod that has an address."""
        spec = {"containers": [{"name": "engine", "image": "vllm"}]}
        call(self.server, "POST", PODS, {"metadata": {"name": name, "labels": {"app": "engine"}}, "spec": spec})
        self.set_ready(name, ip, ready=ready)

    def set_ready(self, name: str, ip: str, *, ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        status = {"phase": "Running", "podIP": ip, "conditions": [condition]}
        call(self.server, "PATCH", f"{PODS}/{name}/status", {"status": status})

    def picker(self, **variables: str) -> "tuple[grpc.Channel, grpc.Channel, subprocess.Popen[bytes]]":
        """Start a picker; return channels to it and to its health service."""
        port, health = free_port(), free_port()
        given = {
            "DYN_EPP_MODE": "standalone", "DYN_EPP_INFERENCE_POOL_NAME": "pool", "POD_NAMESPACE": "default",
            "DYN_MODEL_NAME": "m", "DYN_KV_CACHE_BLOCK_SIZE": str(BLOCK), "DYN_EPP_KV_EVENT_PORT": str(self.event_port),
            "DYN_EPP_TOKENIZER_SERVICE_URL": self.render, "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render",
            "DYN_SECURE_SERVING": "false", "DYN_EPP_METRICS_PORT": "0", "KUBECONFIG": str(self.server.kubeconfig),
            "DYN_EPP_GRACEFUL_SHUTDOWN_PROPAGATION_SECS": "0", **variables,
        }  # fmt: skip
        argv = ["--host", "127.0.0.1", "--grpc-port", str(port), "--grpc-health-port", str(health)]
        process = self.start(f"epp{len(self.processes)}", [sys.executable, "-m", "dynamo.epp", *argv], given)
        channel, health_channel = (
            self._open.enter_context(grpc.insecure_channel(f"127.0.0.1:{one}")) for one in (port, health)
        )
        return channel, health_channel, process


def is_serving(health: grpc.Channel) -> bool:
    check = health.unary_unary(
        f"/{HEALTH_SERVICE}/Check", response_deserializer=HEALTH_CLASSES["HealthCheckResponse"].FromString
    )
    try:
        answer = check(HEALTH_CLASSES["HealthCheckRequest"]().SerializeToString(), timeout=5)
    except grpc.RpcError:
        return False
    return bool(answer.status == SERVING)


def chat(text: str, model: str = "m") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def picked(channel: grpc.Channel, text: str) -> dict[str, str]:
    with GatewayStream(channel) as stream:
        return stream.pick(chat(text))


def refused(channel: grpc.Channel, body: dict[str, Any]) -> tuple[int, str]:
    with GatewayStream(channel) as stream:
        stream.request_headers()
        stream.request_body(json.dumps(body).encode())
        code, answer, _ = refusal(stream.receive())
        return code, answer["error"]["message"]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[StandaloneGroup]:
    renderer = ThreadingHTTPServer(("127.0.0.1", 0), RenderHandler)
    threading.Thread(target=renderer.serve_forever, daemon=True).start()
    with KubernetesServer(tmp_path / "kubernetes", controllers=False) as server:
        call(server, "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", POOL_DEFINITION)
        made = StandaloneGroup(tmp_path, server, f"http://127.0.0.1:{renderer.server_address[1]}")
        yield made
        made.stop()
    renderer.shutdown()
    renderer.server_close()


def words(start: int) -> str:
    return " ".join(str(start + one) for one in range(16 * BLOCK))


def test_pool_of_engine_pods(group: StandaloneGroup) -> None:
    channel, health, _ = group.picker()
    group.pod("a", "127.0.0.2")
    group.pod("b", "127.0.0.3")
    group.pod("c", "127.0.0.4", ready=False)
    call(group.server, "POST", POOLS, {"metadata": {"name": "pool"}, "spec": POOL_SPEC})
    group.wait_until(lambda: is_serving(health), "no pod was found")
    ids = {str(id_of_name("a")): "127.0.0.2:8000", str(id_of_name("b")): "127.0.0.3:8000"}

    engine = group.engine("127.0.0.3")

    def follows_events() -> bool:
        engine.store(tokens_of(words(1000)))
        return all(picked(channel, words(1000))[WORKER] == str(id_of_name("b")) for _ in range(4))

    group.wait_until(follows_events, "requests do not follow the cached blocks")
    with contextlib.ExitStack() as streams:  # Open together: each adds to the load of its pod.
        found = [streams.enter_context(GatewayStream(channel)).pick(chat(words(2000 * n))) for n in range(2, 8)]
    destinations = {headers[WORKER]: headers[DESTINATION] for headers in found}
    assert destinations == ids, "both pods are used for prompts that neither caches"

    assert refused(channel, chat("1 2", "other")) == (404, "Model not found: 'other'; served: m")
    code, message = refused(channel, chat("bad"))
    assert code == 400
    assert "bad words" in message
    assert refused(channel, {"model": 1})[0] == 400

    group.set_ready("b", "127.0.0.3", ready=False)
    group.wait_until(
        lambda: picked(channel, words(1000))[WORKER] == str(id_of_name("a")), "a pod that is not ready is chosen"
    )
    call(group.server, "PATCH", f"{POOLS}/pool", {"spec": {**POOL_SPEC, "targetPorts": [{"number": 9000}]}})
    group.wait_until(
        lambda: picked(channel, words(1))[DESTINATION] == "127.0.0.2:9000", "the pool's port did not change"
    )
    call(group.server, "DELETE", f"{POOLS}/pool")
    group.wait_until(lambda: not is_serving(health), "a picker without a pool serves")
    assert refused(channel, chat(words(1)))[0] == 503


def test_picker_with_replicas_waits_until_it_has_read_their_service(group: StandaloneGroup) -> None:
    group.pod("a", "127.0.0.2")
    call(group.server, "POST", POOLS, {"metadata": {"name": "pool"}, "spec": POOL_SPEC})
    group.server.act(path="/apis/discovery.*", status=503, count=5)
    group.server.server.api.allows_loopback = True
    endpoints = [{"addresses": [ip], "conditions": {"ready": True}} for ip in ("127.0.0.11", "127.0.0.12")]
    metadata = {"name": "epp-1", "labels": {"kubernetes.io/service-name": "epp"}}
    body = {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints, "ports": []}
    channel, health, process = group.picker(
        DYN_EPP_PEER_SERVICE="epp", POD_IP="127.0.0.11", DYN_EPP_REPLICA_SYNC_PORT=str(free_port())
    )
    group.wait_until(lambda: is_serving(health), "the picker waits for its replicas forever")
    call(group.server, "POST", SLICES, body)
    assert picked(channel, words(1))[WORKER]
    assert process.poll() is None


def test_unreachable_tokenizer_is_a_clear_error(group: StandaloneGroup) -> None:
    group.pod("a", "127.0.0.2")
    call(group.server, "POST", POOLS, {"metadata": {"name": "pool"}, "spec": POOL_SPEC})
    channel, health, _ = group.picker(DYN_EPP_TOKENIZER_SERVICE_URL=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: is_serving(health), "no pod was found")
    code, message = refused(channel, chat("1 2"))
    assert (code, "the tokenizer service does not answer" in message) == (503, True)
