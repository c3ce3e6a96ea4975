"""Relayed requests of tokens go where the KV router says, and are counted until they end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.relays import Relays, open_relays
from tests.settle import until

from dynamo.core.errors import CannotConnect
from dynamo.http.routes import embeddings as routes_embeddings
from dynamo.http.routes import native as routes_native
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.model_card.types import ModelType
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.serving.request_headers import headed
from dynamo.serving.served_model import ServedModel

VLLM, SGLANG = "/inference/v1/generate", "/generate"
BOTH = {"vllm_inference_v1_generate": "true", "sglang_generate": "true"}
PROMPT = list(range(64))


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "1")
    monkeypatch.setenv("DYN_SGLANG_ENABLE_GENERATE", "1")


def routes(table: RouteTable, context: RouteContext) -> None:
    routes_native.add(table, context)
    routes_embeddings.add(table, context)


class Two:
    """A frontend in kv mode and two workers."""

    def __init__(self, relays: Relays) -> None:
        self.relays = relays
        self.others: list[DistributedRuntime] = []
        self.asked: list[tuple[int, Any]] = []
        """Worker and request."""
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.has_begun = asyncio.Event()

    async def serve(self, directory: Path, kind: ModelType = ModelType.Chat) -> None:
        for worker in (self.relays.worker, self.relays.runtime()):
            if worker is not self.relays.worker:
                self.others.append(worker)

            async def handler(request: Any, worker: DistributedRuntime = worker) -> AsyncIterator[Any]:
                self.asked.append((worker.instance_id, request))
                self.has_begun.set()
                if kind is ModelType.Embedding:
                    vectors = [[0.5]] * len(request["token_ids"])
                    yield {"embeddings": vectors, "prompt_tokens": 1, "total_tokens": 1}
                    return
                yield {"token_ids": [5], "index": 0}
                await self.may_go_on.wait()
                yield {"token_ids": [6], "index": 0, "finish_reason": "stop"}

            await self.relays.serve("m", kind, handler, directory=str(directory), data=BOTH, worker=worker)

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
        return [worker for worker, _ in self.asked]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with open_relays(routes, "kv") as relays:
        house = Two(relays)
        yield house
        for one in house.others:
            await one.shutdown(drain_timeout_s=0.0)


async def test_native_prompts_go_to_the_worker_that_was_given_them_before(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    for _ in range(4):
        vllm = await two.relays.ask(VLLM, {"token_ids": PROMPT, "sampling_params": {}})
        sglang = await two.relays.ask(SGLANG, {"input_ids": PROMPT, "stream": True})
        assert (vllm.status, sglang.status) == (200, 200)
    assert len(set(two.workers())) == 1
    assert {request["routing"]["dp_rank"] for _, request in two.asked} == {0}
    assert two.requests() == 0
    found = list(two.kv.explain())
    assert len(found) == 8


async def test_a_native_request_is_counted_until_it_ends(two: Two, model_dir: Path) -> None:
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


async def test_who_leaves_is_not_counted_any_more(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    two.may_go_on.clear()
    exchange, _ = two.relays.begin(SGLANG, {"input_ids": PROMPT, "stream": True})
    async with asyncio.timeout(10.0):
        await two.has_begun.wait()
    assert exchange.on_disconnect is not None
    exchange.on_disconnect()
    assert two.requests() == 0


async def test_a_worker_that_cannot_be_reached_is_passed_over(
    two: Two, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.serve(model_dir)
    send, refused = two.served.client.send, []

    async def fails_once(*what: Any, instance_id: int | None = None, **how: Any) -> Any:
        if not refused:
            refused.append(instance_id)
            raise CannotConnect("nobody listens")
        return await send(*what, instance_id=instance_id, **how)

    monkeypatch.setattr(two.served.client, "send", fails_once)
    answer = await two.relays.ask(VLLM, {"token_ids": PROMPT, "sampling_params": {}})
    assert answer.status == 200
    assert two.workers() != refused
    assert two.requests() == 0


async def test_headers_name_the_worker_of_a_native_request(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir)
    for worker in [*two.served.worker_ids(), two.served.worker_ids()[0]]:
        headers = {"x-dynamo-worker-instance-id": str(worker), "x-dynamo-explain": "1"}
        answer = await two.relays.ask(VLLM, {"token_ids": PROMPT, "sampling_params": {}}, headers)
        assert answer.status == 200
        assert two.asked[-1][0] == worker
        assert answer.headers["x-dynamo-routing"].startswith(f"worker={worker}; rank=0")
    nobody = await two.relays.ask(
        VLLM, {"token_ids": PROMPT, "sampling_params": {}}, {"x-dynamo-worker-instance-id": "12"}
    )
    assert nobody.status == 400
    assert "12 is not a worker" in nobody.json["message"]


async def test_embeddings_go_where_their_texts_went_and_cost_all_of_them(two: Two, model_dir: Path) -> None:
    await two.serve(model_dir, ModelType.Embedding)
    for _ in range(3):
        answer = await two.relays.ask("/v1/embeddings", {"model": "m", "input": [[token % 50 for token in PROMPT]] * 2})
        assert answer.status == 200, answer.json
    assert len(set(two.workers())) == 1
    assert "routing" not in two.asked[0][1]
    (last, *_) = two.kv.explain()
    assert last.prompt_tokens == 2 * len(PROMPT)
    assert two.requests() == 0


def test_headers_add_to_what_a_request_says_of_its_way() -> None:
    request = PreprocessedRequest("m", [1], routing=Routing(cache_salt="a", priority=1))
    changed = headed(request, [(b"x-tenant-id", b"b"), (b"x-dynamo-session-id", b"s"), (b"x-dp-rank", b"3")])
    assert changed.routing == Routing(cache_salt="b", priority=1, dp_rank=3)
    assert changed.agent_context == {"session_id": "s", "input_trigger": "other"}
    assert headed(request, [(b"accept", b"*/*")]) is request
