"""Unary: a whole choice in one piece."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.codec import json_decode
from dynamo.core.errors import InvalidArgument, Unknown
from dynamo.llm import LLMUnaryClient, UnaryChatModel, with_engine_data
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.runtime import Context, DistributedRuntime
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore

TIMEOUT_S = 5.0


class Fixed:
    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs

    async def round_robin(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> AsyncIterator[Any]:
        return self.stream()

    async def stream(self) -> AsyncIterator[Any]:
        for output in self.outputs:
            yield output


LAST = {"token_ids": [3], "index": 0, "finish_reason": "stop"}


async def test_unary_response_contains_the_tokens_of_all_outputs() -> None:
    client = LLMUnaryClient(Fixed({"token_ids": [1, 2], "index": 0}, {**LAST, "completion_usage": {"total_tokens": 9}}))
    assert await client.complete({"token_ids": [5]}) == {
        "token_ids": [1, 2, 3], "index": 0, "finish_reason": "stop", "completion_usage": {"total_tokens": 9},
    }  # fmt: skip


@pytest.mark.parametrize(
    "outputs",
    [(), ({"token_ids": [1]},), (LAST, LAST), (5,), ({"text": "x"},), ({**LAST, "index": 1},), ({"token_ids": "x"},)],
)
async def test_malformed_endpoint_output_is_an_unknown_error(outputs: tuple[Any, ...]) -> None:
    with pytest.raises(Unknown, match="the endpoint"):
        await LLMUnaryClient(Fixed(*outputs)).complete({})


@pytest.mark.parametrize(
    "request_",
    [
        {"sampling_options": {"n": 2}}, {"sampling_options": 5}, {"output_options": {"logprobs": 0}},
        {"output_options": {"prompt_logprobs": 1}}, {"output_options": "x"},
    ],
)  # fmt: skip
async def test_unary_client_refuses_several_choices_and_logprobs(request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        await LLMUnaryClient(Fixed(LAST)).complete(request_)


def test_engine_data_is_merged_into_the_unary_response() -> None:
    assert with_engine_data(LAST, {}) == LAST
    more = with_engine_data({**LAST, "engine_data": {"a": 1}}, {"b": 2})
    assert more["engine_data"] == {"a": 1, "b": 2}
    with pytest.raises(InvalidArgument, match="already has a"):
        with_engine_data(more, {"a": 3})
    with pytest.raises(InvalidArgument):
        with_engine_data({**LAST, "engine_data": 5}, {"a": 3})


async def test_unary_model_is_registered_and_answers_requests(model_dir: Path) -> None:
    async def handler(request: Any, *, context: Context) -> Any:
        return {"token_ids": request["token_ids"], "index": 0, "finish_reason": "length"}

    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    serving = asyncio.ensure_future(UnaryChatModel(str(model_dir), "service").serve(runtime, handler))
    async with asyncio.timeout(TIMEOUT_S):
        client = await LLMUnaryClient.connect(runtime, "service.app.generate")
        assert (await client.complete({"token_ids": [1, 2]}))["token_ids"] == [1, 2]
    (card,) = (await runtime.discovery.snapshot(MODEL_CARDS)).values()
    assert json_decode(card)["card_json"]["display_name"] == "service"
    await runtime.shutdown()
    await serving
