"""KServe: our frontend and the released one with the same workers of ours, called by Triton's client."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from benchmarks.ports import free_port
from google.protobuf.json_format import MessageToDict
from tests.cluster.peers import OURS, THEIRS, PeerCluster, require_peer
from tests.cluster.processes import DEADLINE_S
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.conformance

ROOT = Path(__file__).parents[2]


class KservePeers(PeerCluster):
    """Both frontends and a worker of tensors, over one directory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, frontends=())
        self.stubs: dict[str, Any] = {}
        self.channels: list[grpc.Channel] = []
        self.start("worker", [sys.executable, "-m", "tests.integration.tensor_worker"], cwd=ROOT)
        for name in (OURS, THEIRS):
            port = self.start_frontend(name, "--kserve-grpc-server", "--grpc-metrics-port", str(free_port()))
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            self.channels.append(channel)
            self.stubs[name] = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.wait_until(self.is_served, "the frontends never listed the worker")

    def is_served(self) -> bool:
        try:
            requests = [service_pb2.ModelReadyRequest(name=name) for name in ("double", "shout")]
            return all(stub.ModelReady(one, timeout=5).ready for stub in self.stubs.values() for one in requests)
        except grpc.RpcError:
            return False

    def call(self, method: str, request: Any) -> list[Any]:
        """Return the response of each frontend, or the status code with which it refuses."""
        answers = []
        for stub in self.stubs.values():
            try:
                answers.append(MessageToDict(getattr(stub, method)(request, timeout=DEADLINE_S)))
            except grpc.RpcError as error:
                answers.append(error.code())  # type: ignore[attr-defined]  # grpc's own errors are calls too
        return answers

    def stop(self) -> None:
        for channel in self.channels:
            channel.close()
        super().stop()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KservePeers]:
    require_peer()
    with KservePeers(tmp_path_factory.mktemp("kserve-peer")) as peers:
        yield peers


@pytest.mark.parametrize("name", ["double", "shout", "no-such-model"])
@pytest.mark.parametrize("kind", ["ModelReady", "ModelMetadata", "ModelConfig"])
def test_both_frontends_return_the_same_model_metadata(peers: KservePeers, kind: str, name: str) -> None:
    ours, theirs = peers.call(kind, getattr(service_pb2, f"{kind}Request")(name=name))
    assert ours == theirs


def tensors(datatype: str = "INT32", shape: Any = (2,), raw: bytes | None = None, **contents: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="double", id="7")
    given = request.inputs.add(name="numbers", datatype=datatype, shape=shape)
    for name, values in contents.items():
        getattr(given.contents, name).extend(values)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


@pytest.mark.parametrize(
    "request_message",
    [
        tensors(int_contents=[1, -2]),
        tensors(raw=b"\1\0\0\0\2\0\0\0"),
        tensors("INT64", [2], int64_contents=[1, 1 << 40]),
        tensors("UINT8", [1, 2], uint_contents=[1, 2]),
        tensors("FP32", [1], fp32_contents=[1.5]),
        tensors("FP64", [1], raw=b"\0\0\0\0\0\0\xf8?"),
        tensors("FP16", [1], raw=b"\0\0"),
        tensors("FOO", [1], int_contents=[1]),
        tensors(shape=[-1], int_contents=[1]),
        tensors(shape=[3], int_contents=[1]),
        tensors(fp32_contents=[1, 2]),
        tensors("FP16", [1], fp32_contents=[1]),
        tensors(raw=b"\1\0\0"),
        tensors(raw=b"\1\0\0\0"),
        tensors("BYTES", [1], raw=b"\5\0\0\0x"),
    ],
    ids=lambda message: f"{message.inputs[0].datatype}{list(message.inputs[0].shape)}",
)
def test_both_frontends_return_the_same_tensors(peers: KservePeers, request_message: Any) -> None:
    ours, theirs = peers.call("ModelInfer", request_message)
    assert ours == theirs


def prompt(*texts: str, streaming: bool | None = None, **more: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="shout", id="7")
    given = request.inputs.add(name=more.get("name", "text_input"), datatype="BYTES", shape=[len(texts)])
    given.contents.bytes_contents.extend(text.encode() for text in texts)
    if streaming is not None:
        request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(streaming)
    return request


@pytest.mark.parametrize(
    "request_message",
    [
        prompt("one two"),
        prompt("one two", streaming=False),
        prompt("one two", streaming=True),
        prompt("one", "two"),
        prompt("one", name="foo"),
        service_pb2.ModelInferRequest(model_name="shout"),
    ],
    ids=["text", "unary", "streaming", "two", "foo", "nothing"],
)
def test_both_frontends_return_the_same_text(peers: KservePeers, request_message: Any) -> None:
    ours, theirs = peers.call("ModelInfer", request_message)
    assert ours == theirs


@pytest.mark.parametrize("streaming", [True, False])
def test_both_frontends_stream_the_same_text(peers: KservePeers, streaming: bool) -> None:
    request = prompt("one two", streaming=streaming)
    ours, theirs = (
        [MessageToDict(one) for one in peers.stubs[name].ModelStreamInfer(iter([request]), timeout=DEADLINE_S)]
        for name in peers.stubs
    )
    assert ours == theirs
    assert len(ours) == (3 if streaming else 1)


def test_both_frontends_return_not_found_for_an_unknown_model(peers: KservePeers) -> None:
    request = tensors(int_contents=[1, 2])
    request.model_name = "no-such-model"
    assert peers.call("ModelInfer", request) == [grpc.StatusCode.NOT_FOUND] * 2


def test_both_frontends_answer_bidirectional_streams_equally(peers: KservePeers) -> None:
    request = tensors(int_contents=[1, 2])
    request.parameters["times"].int64_param = 3
    answers = [
        [MessageToDict(one) for one in peers.stubs[name].ModelStreamInfer(iter([request, request]), timeout=DEADLINE_S)]
        for name in peers.stubs
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6
