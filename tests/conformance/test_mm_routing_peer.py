"""Images and the KV router: both frontends send a worker the same data for the same conversation."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.peers import require_peer
from tests.vision_model import image, write_model

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler

pytestmark = pytest.mark.conformance


def text(output: str) -> dict[str, Any]:
    return {"type": "text", "text": output}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [text("what is this? "), image(56, 56)],
    [image(280, 140), text(" and "), image(56, 56)],
    [image(70, 280)],
    [image(1, 1)],
    [image(4000, 3000)],
    [image(3000, 16)],
    [image(5000, 10)],
    [text("nothing to see")],
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, text("broken")],
]


class Worker:
    """A worker in this process that records its requests."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.runtime = DistributedRuntime()
        self.received_requests: list[dict[str, Any]] = []

    async def start(self) -> None:
        endpoint = self.runtime.endpoint("dynamo.backend.generate")
        await register_model(
            ModelInput.Tokens, ModelType.Chat, endpoint, self._model, MODEL_NAME,
            worker_type=WorkerType.Aggregated, kv_cache_block_size=16,
        )  # fmt: skip
        await endpoint.serve(GeneratorHandler(self._generate, self.runtime.tasks))

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.received_requests.append(request)
        yield {"token_ids": [40], "index": 0, "finish_reason": "stop"}


async def image_data(worker: Worker, stack: Stack) -> list[Any]:
    """Return the image data of each conversation that the worker receives."""
    found = []
    for content in CONVERSATIONS:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        worker.received_requests.clear()
        status, answer = await asyncio.to_thread(stack.send_request, "POST", "/v1/chat/completions", body)
        assert status == 200, answer
        (request,) = worker.received_requests
        found.append((request["token_ids"], request.get("mm_routing_info"), _hashes(request)))
    return found


def _hashes(request: dict[str, Any]) -> Any:
    return (request.get("extra_args") or {}).get("mm_hashes")


@pytest.mark.parametrize("processor", [True, False])
async def test_both_frontends_send_the_same_image_routing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: bool
) -> None:
    require_peer()
    variables = {"DYN_FILE_KV": str(tmp_path / "kv"), "DYN_EVENT_PLANE_HOST": HOST}
    for name, value in {**variables, "DYN_TCP_RPC_HOST": HOST, "DYN_TCP_RESPONSE_STREAM_HOST": HOST}.items():
        monkeypatch.setenv(name, value)
    worker = Worker(write_model(tmp_path / "model", processor=processor))
    await worker.start()
    found = []
    try:
        for implementation in (ours(), theirs(peer_python())):
            recipe = Recipe(
                name="mm", frontend=implementation, engine=implementation, workers=0, frontend_flags=("--router-mode", "kv"),
                variables=variables,
            )  # fmt: skip
            stack = Stack(recipe, os.fspath(tmp_path))
            try:
                await asyncio.to_thread(stack.__enter__)
                found.append(await image_data(worker, stack))
            finally:
                await asyncio.to_thread(stack.close)
    finally:
        await worker.runtime.shutdown()
    mine, other = found
    for content, one, another in zip(CONVERSATIONS, mine, other, strict=True):
        assert one == another, [part.get("text") for part in content]
    assert [info is not None for _, info, _ in mine] == [processor and place not in (7, 8) for place in range(9)]
