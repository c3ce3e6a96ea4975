"""KServe over gRPC: real processes, called by Triton's own client."""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from benchmarks.ports import free_port
from tests.certificates import Certificates
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.tensor_worker import CONFIG
from tests.unit.grpc.kserve_stack import open_kserve_stack
from tritonclient.utils import InferenceServerException

from dynamo.core.errors import ConfigError
from dynamo.cpu.config import DEMO_MODEL
from dynamo.grpc.messages import SERVICE
from dynamo.grpc.service import KserveOptions, KserveService
from dynamo.llm import EngineType, EntrypointArgs, KserveGrpcService, PythonAsyncEngine, make_engine, run_input
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = [pytest.mark.integration, pytest.mark.kserve]


class KserveCluster(Cluster):
    """Frontend with KServe; its HTTP routes are on the metrics port."""

    def __init__(self, folder: Path, *frontend: str) -> None:
        self.grpc_port = free_port()
        super().__init__(folder, *frontend)

    def run(self, module: str, *argv: str, **variables: str) -> "subprocess.Popen[bytes]":
        if module == "frontend":
            argv = (*argv, "--kserve-grpc-server", "--http-port", str(self.grpc_port), "--grpc-metrics-port", str(self.port))  # fmt: skip
        return super().run(module, *argv, **variables)

    def has_output(self, word: str) -> bool:
        return word in (self.folder / "tensors.log").read_text().split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KserveCluster]:
    with KserveCluster(tmp_path_factory.mktemp("kserve")) as cluster:
        cluster.mocker("--speedup-ratio", "0")
        cluster.tensor_worker()
        with triton.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            wait_until(lambda: has_models(client, "m", "double"), "no model is ready")
        yield cluster


@pytest.fixture
def client(cluster: KserveCluster) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        yield client


def text(prompt: str, streaming: bool | None = None) -> list[Any]:
    given = triton.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([prompt.encode()], dtype=object))
    if streaming is None:
        return [given]
    streams = triton.InferInput("streaming", [1], "BOOL")
    streams.set_data_from_numpy(np.array([streaming]))
    return [given, streams]


def numbers(*values: int) -> list[Any]:
    given = triton.InferInput("numbers", [len(values)], "INT32")
    given.set_data_from_numpy(np.array(values, dtype=np.int32))
    return [given]


def test_server_and_model_metadata_are_returned(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_server_metadata().name == "dynamo"
    assert client.is_model_ready("m") and not client.is_model_ready("no-such-model")
    assert [one.name for one in client.get_model_metadata("m").inputs] == ["text_input", "streaming"]
    reported = client.get_model_metadata("double")
    assert (reported.name, reported.inputs[0].datatype, list(reported.outputs[0].shape)) == (
        CONFIG["name"],
        "INT32",
        [-1],
    )
    config = client.get_model_config("double").config
    assert (config.backend, config.input[0].data_type) == ("dynamo", 8)


def test_text_request_is_completed(client: triton.InferenceServerClient) -> None:
    answer = client.infer("m", text("one two"), request_id="7", parameters={"max_tokens": 5})
    assert answer.get_response().id == "7"
    assert len(answer.as_numpy("text_output")) == 1
    assert list(answer.as_numpy("finish_reason")) == [b"length"]


def test_tensor_request_returns_tensors(client: triton.InferenceServerClient) -> None:
    assert list(client.infer("double", numbers(1, -2)).as_numpy("numbers")) == [2, -4]


def streamed(client: triton.InferenceServerClient, count: int, *requests: dict[str, Any]) -> list[Any]:
    """Return the first responses of a stream, or its errors."""
    received: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: received.put(error or result))
    for one in requests:
        client.async_stream_infer(**one)
    answers = [received.get(timeout=DEADLINE_S) for _ in range(count)]
    client.stop_stream()
    return answers


def test_stream_serves_requests_in_order(client: triton.InferenceServerClient) -> None:
    answers = streamed(
        client,
        7,
        {"model_name": "double", "inputs": numbers(3), "request_id": "x", "parameters": {"times": 2}},
        {"model_name": "m", "inputs": text("hi", True), "request_id": "y", "parameters": {"max_tokens": 4}},
        {"model_name": "m", "inputs": text("hi"), "request_id": "z", "parameters": {"max_tokens": 4}},
    )
    ids = [answer.get_response().id for answer in answers]
    assert ids[:3] == ["x", "x", "y"]
    assert sorted(ids) == ids and ids[-1] in "yz"


def test_large_tensors_are_written_by_a_child_process(client: triton.InferenceServerClient) -> None:
    given = np.arange(400_000, dtype=np.int32)  # Two megabytes between the processes.
    request = {"model_name": "double", "inputs": numbers(*given), "request_id": "x", "parameters": {"times": 2}}
    one = client.infer("double", numbers(*given))
    for answer in (one, *streamed(client, 2, request)):
        assert np.array_equal(answer.as_numpy("numbers"), given * 2)


def test_invalid_request_has_its_grpc_status(client: triton.InferenceServerClient) -> None:
    for model, inputs, status in (
        ("no-such-model", text("hi"), "NOT_FOUND"),
        ("m", numbers(1), "INVALID_ARGUMENT"),
        ("m", text("hi", True), "INVALID_ARGUMENT"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            client.infer(model, inputs)
        assert raised.value.status() == f"StatusCode.{status}"
    [error] = streamed(client, 1, {"model_name": "no-such-model", "inputs": text("hi")})
    assert isinstance(error, InferenceServerException)


def test_cancelled_call_stops_the_worker(cluster: KserveCluster, client: triton.InferenceServerClient) -> None:
    received = threading.Event()
    call = client.async_infer("double", numbers(1), lambda result, error: received.set(), parameters={"hold": True})
    wait_until(lambda: cluster.has_output("held"), "the worker was never asked")
    call.cancel()
    assert received.wait(DEADLINE_S)
    wait_until(lambda: cluster.has_output("left"), "the worker was never told")


def test_metrics_port_serves_only_metrics(cluster: KserveCluster) -> None:
    assert cluster.metric("dynamo_frontend_requests_total", endpoint="tensor", model="double", status="success") > 0
    assert [one["id"] for one in cluster.http.get("/v1/models").json()["data"]] == ["double", "m", "shout"]
    assert cluster.post({"model": "m", "messages": []}).status_code == 404


def test_kserve_requires_api_keys_and_stops_cleanly(tmp_path: Path) -> None:
    with KserveCluster(tmp_path, "--api-key", "secret-key") as cluster:
        cluster.http.headers["authorization"] = "Bearer secret-key"
        cluster.mocker("--speedup-ratio", "0")
        with triton.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            key = {"authorization": "Bearer secret-key"}
            wait_until(lambda: has_models(client, "m", headers=key), "no model is ready")
            for headers in ({}, {"authorization": "Bearer other"}):
                with pytest.raises(InferenceServerException) as raised:
                    client.infer("m", text("hi"), headers=headers)
                assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
            assert client.infer("m", text("hi"), headers=key, parameters={"max_tokens": 1})
        cluster.frontend.send_signal(signal.SIGTERM)
        assert cluster.frontend.wait(DEADLINE_S) == 0


def test_occupied_port_is_named_in_the_error(cluster: KserveCluster, tmp_path: Path) -> None:
    argv = ["--kserve-grpc-server", "--http-host", "127.0.0.1", "--http-port", str(cluster.grpc_port)]
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.frontend", *argv, "--grpc-metrics-port", "0", "--discovery-backend", "mem"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ, "DYN_FILE_KV": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"--http-port {cluster.grpc_port}" in done.stderr.splitlines()[-1]


async def test_engines_of_the_process_are_served() -> None:
    async def shout(request: Any) -> Any:
        choice = {"index": 0, "text": request["prompt"].upper(), "finish_reason": "stop"}
        yield {"id": "c", "object": "text_completion", "created": 1, "model": "shout", "choices": [choice]}

    async def echo(request: Any) -> Any:
        yield {"model": "echo", "tensors": request["tensors"]}

    loop = asyncio.get_running_loop()
    service = KserveGrpcService(0, "127.0.0.1")
    service.add_completions_model("shout", "sum", PythonAsyncEngine(shout, loop))
    service.add_tensor_model("echo", "sum", PythonAsyncEngine(echo, loop), tensor_model_config=CONFIG)
    assert (service.list_completions_models(), service.list_tensor_models()) == (["shout"], ["echo"])
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    running = asyncio.ensure_future(service.run(runtime))
    async with asyncio.timeout(DEADLINE_S):
        while service.port is None:  # noqa: ASYNC110 - upstream has no event for it
            await asyncio.sleep(0.05)

        def send_request() -> None:
            with triton.InferenceServerClient(f"127.0.0.1:{service.port}") as client:
                wait_until(lambda: is_ready(client), "the service never was ready")
                assert list(client.infer("shout", text("hi")).as_numpy("text_output")) == [b"HI"]
                assert list(client.infer("echo", numbers(5)).as_numpy("numbers")) == [5]

        await asyncio.to_thread(send_request)
        service.remove_tensor_model("echo")
        assert service.list_tensor_models() == []
        service.shutdown()
        await running
    await runtime.shutdown()


async def test_tls_requires_client_certificates_and_messages_are_limited(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    async with open_kserve_stack() as stack:
        options = KserveOptions(
            host="127.0.0.1", port=0, certificate=files.cert, key=files.key, client_ca=files.ca, message_bytes_max=1000
        )
        service = KserveService(stack.pipeline, stack.models, options=options)
        await service.start()

        def credentials(certificate: str, key: str) -> Any:
            parts = [Path(one).read_bytes() for one in (files.ca, key, certificate)]
            return grpc.ssl_channel_credentials(*parts)

        async def live(credentials: Any, message: bytes = b"") -> Any:
            async with grpc.aio.secure_channel(f"127.0.0.1:{service.port}", credentials) as channel:
                call = channel.unary_unary(f"/{SERVICE}/ServerLive")
                return await call(message, timeout=DEADLINE_S)

        assert await live(credentials(files.client_cert, files.client_key)) == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await live(credentials(files.client_cert, files.client_key), b"x" * 2000)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await live(credentials(files.other_cert, files.other_key))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await service.stop(1.0)
    with pytest.raises(ConfigError, match="--tls-cert-path"):
        KserveService(stack.pipeline, stack.models, options=KserveOptions(port=0, certificate="a", key="b")).bind()


async def test_run_input_serves_grpc(tmp_path: Path) -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    grpc_port, metrics_port = free_port(), free_port()
    args = EntrypointArgs(
        EngineType.Echo, DEMO_MODEL, "m", http_host="127.0.0.1", http_port=grpc_port, http_metrics_port=metrics_port
    )
    running = asyncio.ensure_future(run_input(runtime, "grpc", await make_engine(runtime, args)))

    def send_request() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            wait_until(lambda: has_models(client, "m"), "the service never was ready")
            assert list(client.infer("m", text("hello")).as_numpy("text_output")) == [b"hello"]
        health = httpx.get(f"http://127.0.0.1:{metrics_port}/health", timeout=DEADLINE_S)
        assert health.json()["status"] == "healthy"

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(send_request)
        await runtime.shutdown()
        await running


def is_ready(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False


def has_models(client: triton.InferenceServerClient, *models: str, headers: dict[str, str] | None = None) -> bool:
    """Return whether the service, which listens a moment after the HTTP routes, has these models."""
    return is_ready(client) and all(client.is_model_ready(model, headers=headers) for model in models)


def test_typed_contents_are_returned_typed(cluster: KserveCluster) -> None:
    """Typed contents, which the protocol allows and Triton's client never sends."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        request = service_pb2.ModelInferRequest(model_name="double")
        request.inputs.add(name="numbers", datatype="INT32", shape=[2]).contents.int_contents.extend([4, 5])
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=DEADLINE_S)
    assert list(answer.outputs[0].contents.int_contents) == [8, 10]
    assert not answer.raw_output_contents


def test_http1_request_on_the_grpc_port_is_refused(cluster: KserveCluster) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{cluster.grpc_port}/health", timeout=DEADLINE_S)


def test_burst_of_requests_is_answered_as_a_whole(cluster: KserveCluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ServerLive")
        pending = [call.future(b"", timeout=DEADLINE_S) for _ in range(5000)]
        assert {one.code() for one in pending} == {grpc.StatusCode.OK}
