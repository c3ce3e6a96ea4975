"""Relay: a request is retried on another worker until the first output, and no response fills the memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.relays import RelayCluster, open_relays
from tests.settle import until

from dynamo.core.codec import json_encode, msgpack_decode, msgpack_encode
from dynamo.core.errors import CannotConnect, Disconnected, Unknown, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.http.routes import embeddings as routes_embeddings
from dynamo.http.routes import native as routes_native
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.model_card.types import ModelType
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Item
from dynamo.serving import relay
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.relay import RelayAnswer
from dynamo.serving.request_headers import headed
from dynamo.serving.request_state import RequestState
from dynamo.serving.response_form import Form, Whole
from dynamo.serving.served_model import ServedModel


class Client:
    """An exchange's outside."""

    def __init__(self) -> None:
        self.response_started = False
        self.disconnected = False
        self.header_bytes = b""
        self.on_disconnect: Any = None
        self.transport = self
        self.outputs: list[Any] = []

    def open(self, content_type: bytes) -> None:
        self.response_started = True
        self.outputs.append(content_type)

    def write(self, data: bytes) -> None:
        self.outputs.append(data)

    def end(self, data: bytes = b"") -> None:
        self.outputs.append(("end", data))

    def abort(self) -> None:
        self.outputs.append("abort")

    def respond(self, status: int, body: bytes, content_type: bytes = b"") -> None:
        self.outputs.append((status, body, content_type))

    def refuse(self, error: ErrorAnswer) -> None:
        self.outputs.append(error.status)


class FakeCall:
    def __init__(self, instance_id: int, killed: list[int]) -> None:
        self.instance_id = instance_id
        self._killed = killed

    def stop(self) -> None: ...

    def kill(self) -> None:
        self._killed.append(self.instance_id)


class FakeModel:
    name = "m"

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.received_requests: list[tuple[int, Any]] = []
        self.killed: list[int] = []

    async def send(self, body: bytes, receiver: Any, *, exclude: frozenset[int], **how: Any) -> FakeCall:
        left = [worker for worker in range(1, self.workers + 1) if worker not in exclude]
        if not left:
            raise WorkerUnavailable("no worker is left")
        self.received_requests.append((left[0], msgpack_decode(body)))
        return FakeCall(left[0], self.killed)


class Pieces(Form):
    """Form that writes each item at once; an item `None` fails."""

    media = b"x/y"

    def add(self, value: Any) -> bytes:
        if value is None:
            self.refusal = Whole(b"no", status=400)
            return b""
        return json_encode(value)

    def end(self) -> Whole | bytes:
        return b"."

    def failure(self, error: ErrorAnswer) -> bytes | None:
        return None if error.status == 500 else super().failure(error)


class BufferingForm(Form):
    """Writes everything at the end."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def add(self, value: Any) -> bytes:
        self.items.append(value)
        return b""

    def end(self) -> Whole:
        return Whole(json_encode(self.items), headers=b"x: y\r\n")


class Scene:
    def __init__(self, form: Form, *, stream: bool = False, workers: int = 1) -> None:
        self.client: Any = Client()
        self.model: Any = FakeModel(workers)
        self.tasks = TaskOwner("test")
        self.closed: list[str] = []
        self.took: list[float] = []
        record = RequestState(FrontendMetrics(MetricsRegistry()), "e", "m", stream=stream, started_s=0)
        self.answer = RelayAnswer(
            self.client, record, lambda answer, label, error: self.closed.append(label),
            model=self.model, tasks=self.tasks, request=msgpack_encode("ask"), form=form, on_success=self.took.append,
        )  # fmt: skip

    async def begun(self) -> "Scene":
        await self.answer.forward()
        return self

    def receive_event(self, *values: Any) -> None:
        for value in values:
            self.answer.on_item(Item(msgpack_encode(value)))


async def test_collected_response_is_sent_at_its_end_with_headers() -> None:
    scene = await Scene(BufferingForm()).begun()
    scene.receive_event(1, 2)
    scene.answer.on_item(Item(None, event="note"))
    assert scene.client.outputs == []
    scene.answer.on_end()
    assert scene.client.outputs == [(200, b"[1,2]", b"application/json")]
    assert (scene.client.header_bytes, scene.closed, len(scene.took)) == (b"x: y\r\n", [""], 1)
    assert scene.model.received_requests == [(1, "ask")]


async def test_streamed_pieces_are_sent_at_once_with_their_content_type() -> None:
    scene = await Scene(Pieces(), stream=True).begun()
    scene.receive_event(1, 2)
    assert scene.client.outputs == [b"x/y", b"1", b"2"]
    scene.answer.on_end()
    scene.answer.on_end()
    scene.receive_event(3)
    assert scene.client.outputs[3:] == [("end", b".")]
    assert scene.closed == [""]


async def test_relay_retries_other_workers_until_the_first_item() -> None:
    scene = await Scene(Pieces(), stream=True, workers=3).begun()
    scene.answer.on_error(Disconnected("gone"))
    assert await scene.tasks.wait(30)
    scene.receive_event(1)
    scene.answer.on_error(Disconnected("gone too"))
    assert [worker for worker, _ in scene.model.received_requests] == [1, 2]
    assert scene.closed == ["unavailable"]
    assert scene.client.outputs[-1][0] == "end"


async def test_relay_aborts_a_format_without_error_events() -> None:
    scene = await Scene(Pieces(), stream=True).begun()
    scene.receive_event(1)
    scene.answer.on_error(Unknown("secret"))
    assert scene.client.outputs[-1] == "abort"
    late = await Scene(Pieces(), stream=True).begun()
    late.answer.on_error(Unknown("secret"))
    assert late.client.outputs == [500]


async def test_relay_returns_a_failure_in_the_format_of_the_worker() -> None:
    scene = await Scene(Pieces()).begun()
    scene.receive_event(None)
    assert scene.client.outputs == [(400, b"no", b"application/json")]
    assert (scene.model.killed, scene.closed) == ([1], ["validation"])


async def test_relay_refuses_a_plain_token() -> None:
    scene = await Scene(BufferingForm()).begun()
    scene.answer.on_token(5)
    assert scene.client.outputs == [500]
    assert scene.model.killed == [1]


async def test_relay_bounds_a_collected_response_but_not_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEPT_BYTES_MAX", 100)
    scene = await Scene(BufferingForm()).begun()
    scene.receive_event("x" * 60)
    scene.receive_event("x" * 60)
    assert (scene.client.outputs, scene.model.killed) == ([500], [1])
    stream = await Scene(Pieces(), stream=True).begun()
    stream.receive_event("x" * 60, "x" * 60)
    assert len(stream.client.outputs) == 3


async def test_relay_client_disconnect_kills_the_worker_call() -> None:
    scene = await Scene(BufferingForm()).begun()
    scene.answer.leave()
    scene.receive_event(1)
    scene.answer.on_end()
    assert (scene.client.outputs, scene.model.killed, scene.closed) == ([], [1], ["cancelled"])


VLLM, SGLANG = "/inference/v1/generate", "/generate"
BOTH = {"vllm_inference_v1_generate": "true", "sglang_generate": "true"}
PROMPT = list(range(64))


@pytest.fixture(autouse=True)
def native_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "1")
    monkeypatch.setenv("DYN_SGLANG_ENABLE_GENERATE", "1")


def routes(table: RouteTable, context: RouteContext) -> None:
    routes_native.add(table, context)
    routes_embeddings.add(table, context)


class Two:
    """A frontend in kv mode and two workers."""

    def __init__(self, relays: RelayCluster) -> None:
        self.relays = relays
        self.others: list[DistributedRuntime] = []
        self.received_requests: list[tuple[int, Any]] = []
        """Worker and request."""
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.has_begun = asyncio.Event()

    async def serve(self, directory: Path, kind: ModelType = ModelType.Chat) -> None:
        for worker in (self.relays.worker, self.relays.runtime()):
            if worker is not self.relays.worker:
                self.others.append(worker)

            async def handler(request: Any, worker: DistributedRuntime = worker) -> AsyncIterator[Any]:
                self.received_requests.append((worker.instance_id, request))
                self.has_begun.set()
                if kind is ModelType.Embedding:
                    vectors = [[0.5]] * len(request["token_ids"])
                    yield {"embeddings": vectors, "prompt_tokens": 1, "total_tokens": 1}
                    return
                yield {"token_ids": [5], "index": 0}
                await self.may_go_on.wait()
                yield {"token_ids": [6], "index": 0, "finish_reason": "stop"}

            await self.relays.serve("m", kind, handler, directory=str(directory), data=BOTH, worker=worker)
        if kind is not ModelType.Embedding:
            async with asyncio.timeout(10.0):
                await until(lambda: len(self.kv.machine.loads()) == 2)

    @property
    def served(self) -> ServedModel:
        (served,) = self.relays.models.all_sets()
        return served

    @property
    def kv(self) -> KvPushRouter:
        assert self.served.kv is not None
        return self.served.kv

    def requests(self) -> int:
        return sum(requests for _, _, requests in self.kv.machine.loads().values())

    def workers(self) -> list[int]:
        return [worker for worker, _ in self.received_requests]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with open_relays(routes, "kv") as relays:
        stack = Two(relays)
        yield stack
        for one in stack.others:
            await one.shutdown(drain_timeout_s=0.0)


async def test_native_requests_with_the_same_prompt_are_sent_to_the_same_worker(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    for _ in range(4):
        vllm = await two.relays.send_request(VLLM, {"token_ids": PROMPT, "sampling_params": {}})
        sglang = await two.relays.send_request(SGLANG, {"input_ids": PROMPT, "stream": True})
        assert (vllm.status, sglang.status) == (200, 200)
    assert len(set(two.workers())) == 1
    assert {request["routing"]["dp_rank"] for _, request in two.received_requests} == {0}
    assert two.requests() == 0
    found = list(two.kv.explain())
    assert len(found) == 8


async def test_native_request_is_counted_as_load_until_its_end(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    two.may_go_on.clear()
    _, wire = two.relays.begin(SGLANG, {"input_ids": PROMPT, "stream": True})
    async with asyncio.timeout(10.0):
        await two.has_begun.wait()
    assert two.requests() == 1
    other = [999 + token for token in PROMPT]
    two.has_begun.clear()
    two.relays.begin(SGLANG, {"input_ids": other, "stream": True})
    async with asyncio.timeout(10.0):
        await two.has_begun.wait()
    assert len(set(two.workers())) == 2, "the second goes to who is not busy"
    assert two.requests() == 2
    two.may_go_on.set()
    async with asyncio.timeout(10.0):
        await wire.complete.wait()
        await until(lambda: not two.requests())


async def test_native_request_is_not_counted_after_a_client_disconnect(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    two.may_go_on.clear()
    exchange, _ = two.relays.begin(SGLANG, {"input_ids": PROMPT, "stream": True})
    async with asyncio.timeout(10.0):
        await two.has_begun.wait()
    assert exchange.on_disconnect is not None
    exchange.on_disconnect()
    assert two.requests() == 0


async def test_native_request_skips_an_unreachable_worker(
    two: Two, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.serve(model_dir)
    send, refused = two.served.client.send, []

    async def fails_once(*what: Any, instance_id: int | None = None, **how: Any) -> Any:
        if not refused:
            refused.append(instance_id)
            raise CannotConnect("connection refused")
        return await send(*what, instance_id=instance_id, **how)

    monkeypatch.setattr(two.served.client, "send", fails_once)
    answer = await two.relays.send_request(VLLM, {"token_ids": PROMPT, "sampling_params": {}})
    assert answer.status == 200
    assert two.workers() != refused
    assert two.requests() == 0


async def test_headers_name_the_worker_of_a_native_request(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    for worker in [*two.served.worker_ids(), two.served.worker_ids()[0]]:
        headers = {"x-dynamo-worker-instance-id": str(worker), "x-dynamo-explain": "1"}
        answer = await two.relays.send_request(VLLM, {"token_ids": PROMPT, "sampling_params": {}}, headers)
        assert answer.status == 200
        assert two.received_requests[-1][0] == worker
        assert answer.headers["x-dynamo-routing"].startswith(f"worker={worker}; rank=0")
    unreachable = await two.relays.send_request(
        VLLM, {"token_ids": PROMPT, "sampling_params": {}}, {"x-dynamo-worker-instance-id": "12"}
    )
    assert unreachable.status == 400
    assert "12 is not a worker" in unreachable.json["message"]


async def test_embeddings_are_routed_to_the_caching_worker_and_counted_with_all_prompts(
    two: Two, model_dir: Path
) -> None:
    await two.serve(model_dir, ModelType.Embedding)
    for _ in range(3):
        answer = await two.relays.send_request(
            "/v1/embeddings", {"model": "m", "input": [[token % 50 for token in PROMPT]] * 2}
        )
        assert answer.status == 200, answer.json
    assert len(set(two.workers())) == 1
    assert "routing" not in two.received_requests[0][1]
    (last, *_) = two.kv.explain()
    assert last.prompt_tokens == 2 * len(PROMPT)
    assert two.requests() == 0


def test_routing_headers_are_merged_into_the_request() -> None:
    request = PreprocessedRequest("m", [1], routing=Routing(cache_salt="a", priority=1))
    changed = headed(request, [(b"x-tenant-id", b"b"), (b"x-dynamo-session-id", b"s"), (b"x-dp-rank", b"3")])
    assert changed.routing == Routing(cache_salt="b", priority=1, dp_rank=3)
    assert changed.agent_context == {"session_id": "s", "input_trigger": "other"}
    assert headed(request, [(b"accept", b"*/*")]) is request
