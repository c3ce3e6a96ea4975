"""Requests that are no generations go to prefill and decode workers as generations do."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.relays import RelayCluster, open_relays

from dynamo.core.errors import Disconnected, Unknown
from dynamo.http.routes import embeddings as routes_embeddings
from dynamo.http.routes import native as routes_native
from dynamo.http.routes import openai as routes_openai
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.model_card.types import ModelType, WorkerType
from dynamo.runtime.distributed import DistributedRuntime

VLLM, SGLANG = "/inference/v1/generate", "/generate"
NATIVE = {"vllm_inference_v1_generate": "true", "sglang_generate": "true"}
PROMPT = [5, 6, 7]
WHERE = {"blocks": [1, 2]}


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "1")
    monkeypatch.setenv("DYN_SGLANG_ENABLE_GENERATE", "1")


def routes(table: RouteTable, context: RouteContext) -> None:
    for group in (routes_native, routes_embeddings, routes_openai):
        group.add(table, context)


class DisaggregatedCluster:
    """A frontend, a prefill worker and decode workers; `fails` makes the next one raise it."""

    def __init__(self, relays: RelayCluster) -> None:
        self.relays = relays
        self.others: list[DistributedRuntime] = []
        self.received_requests: list[tuple[str, Any]] = []
        """Role and request."""
        self.workers: list[tuple[str, int]] = []
        self.fails: dict[str, list[Exception]] = {"prefill": [], "decode": []}
        self.came = asyncio.Event()

    async def serve(self, directory: Path, kind: ModelType, *roles: WorkerType) -> None:
        for role in roles:
            worker = self.relays.runtime()
            self.others.append(worker)
            word = "prefill" if role == WorkerType.Prefill else "decode"

            async def handler(
                request: Any, word: str = word, worker: DistributedRuntime = worker
            ) -> AsyncIterator[Any]:
                self.received_requests.append((word, request))
                self.workers.append((word, worker.instance_id))
                self.came.set()
                if self.fails[word]:
                    raise self.fails[word].pop()
                if word == "prefill":
                    yield {"token_ids": [1], "index": 0, "finish_reason": "length", "disaggregated_params": WHERE}
                    return
                yield {"token_ids": [8], "index": 0}
                yield {"token_ids": [9], "index": 0, "finish_reason": "stop"}

            shown = ModelType.Prefill if word == "prefill" else kind
            await self.relays.serve(
                "m", shown, handler, directory=str(directory), data=NATIVE, worker=worker, role=role
            )

    def roles(self) -> list[str]:
        return [role for role, _ in self.received_requests]


@pytest.fixture
async def cluster() -> AsyncIterator[DisaggregatedCluster]:
    async with open_relays(routes) as relays:
        stack = DisaggregatedCluster(relays)
        yield stack
        for one in stack.others:
            await one.shutdown(drain_timeout_s=0.0)


BOTH = (WorkerType.Prefill, WorkerType.Decode)


async def test_native_request_is_prefilled_and_decoded_by_different_workers(
    cluster: DisaggregatedCluster, model_dir: Path
) -> None:
    await cluster.serve(model_dir, ModelType.Chat, *BOTH)
    vllm = await cluster.relays.send_request(
        VLLM, {"token_ids": PROMPT, "sampling_params": {}}, {"x-dynamo-explain": "1"}
    )
    assert (vllm.status, vllm.json["choices"][0]["token_ids"]) == (200, [8, 9])
    decode = next(worker for role, worker in cluster.workers if role == "decode")
    assert vllm.headers["x-dynamo-routing"] == f"worker={decode}"
    sglang = await cluster.relays.send_request(SGLANG, {"input_ids": PROMPT, "stream": True})
    assert sglang.status == 200
    assert cluster.roles() == ["prefill", "decode"] * 2
    assert [request["token_ids"] for _, request in cluster.received_requests] == [PROMPT] * 4
    assert cluster.received_requests[0][1]["stop_conditions"]["max_tokens"] == 1
    assert cluster.received_requests[1][1]["prefill_result"]["disaggregated_params"] == WHERE


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_native_request_is_retried_on_another_worker_after_a_disconnect(
    cluster: DisaggregatedCluster, model_dir: Path, role: str
) -> None:
    await cluster.serve(model_dir, ModelType.Chat, *BOTH, *BOTH)
    cluster.fails[role].append(Disconnected("gone"))
    answer = await cluster.relays.send_request(SGLANG, {"input_ids": PROMPT, "stream": True})
    assert answer.status == 200
    assert cluster.roles().count(role) == 2
    assert len({worker for one, worker in cluster.workers if one == role}) == 2


async def test_non_retryable_worker_error_is_returned(cluster: DisaggregatedCluster, model_dir: Path) -> None:
    await cluster.serve(model_dir, ModelType.Chat, *BOTH)
    cluster.fails["decode"].append(Unknown("it cannot"))
    answer = await cluster.relays.send_request(SGLANG, {"input_ids": PROMPT, "stream": True})
    assert (answer.status, cluster.roles()) == (500, ["prefill", "decode"])


async def test_native_request_without_a_prefill_worker_is_not_found(
    cluster: DisaggregatedCluster, model_dir: Path
) -> None:
    await cluster.serve(model_dir, ModelType.Chat, WorkerType.Decode)
    answer = await cluster.relays.send_request(SGLANG, {"input_ids": PROMPT, "stream": True})
    assert (answer.status, cluster.received_requests) == (404, [])


async def test_embedding_model_with_prefill_and_decode_workers_is_not_found(
    cluster: DisaggregatedCluster, model_dir: Path
) -> None:
    await cluster.serve(model_dir, ModelType.Embedding, *BOTH)
    answer = await cluster.relays.send_request("/v1/embeddings", {"model": "m", "input": "hi"})
    assert (answer.status, cluster.received_requests) == (404, [])
    assert b"prefill and decode workers" in answer.body
    assert cluster.relays.pipeline.inflight == 0


async def test_malformed_worker_instance_header_is_refused_before_the_request_is_counted(
    cluster: DisaggregatedCluster, model_dir: Path
) -> None:
    await cluster.serve(model_dir, ModelType.Chat, *BOTH)
    headers = {"x-dynamo-worker-instance-id": "zzz"}
    answer = await cluster.relays.send_request(SGLANG, {"input_ids": PROMPT, "stream": True}, headers)
    assert (answer.status, cluster.received_requests, len(cluster.relays.metrics.open_requests)) == (400, [], 0)


async def test_speculative_prefill_uses_the_workers_of_the_previous_turn(
    cluster: DisaggregatedCluster, model_dir: Path
) -> None:
    await cluster.serve(model_dir, ModelType.Chat, *BOTH, *BOTH)
    request_fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "nvext": {"agent_hints": {"speculative_prefill": True}},
    }
    answer = await cluster.relays.send_request("/v1/chat/completions", request_fields)
    assert answer.status == 200
    async with asyncio.timeout(10.0):
        while len(cluster.received_requests) < 4:
            cluster.came.clear()
            await cluster.came.wait()
    assert [request["model"] for _, request in cluster.received_requests] == [
        "m",
        "m",
        "speculative_prefill",
        "speculative_prefill",
    ]
    assert cluster.workers[:2] == cluster.workers[2:]
    assert len(cluster.received_requests[2][1]["token_ids"]) > len(cluster.received_requests[0][1]["token_ids"])
