"""An endpoint's response has its own format, for every kind of worker."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.relays import open_relays

from dynamo.core.codec import json_decode
from dynamo.http.routes import openai as routes_openai
from dynamo.http.routes import responses as routes_responses
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.model_card.types import ModelType
from dynamo.serving.endpoints import CHAT, tiered


def routes(table: RouteTable, context: RouteContext) -> None:
    for group in (routes_openai, routes_responses):
        group.add(table, context)


async def talker(_: Any) -> AsyncIterator[Any]:
    """Start a worker that takes text and returns OpenAI's chat chunks."""
    for delta, finish in (({"role": "assistant", "content": "Hel"}, None), ({"content": "lo"}, "stop")):
        yield {
            "id": "i",
            "created": 5,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }


def text_of_response(answer: Any) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))


@pytest.mark.parametrize("stream", [False, True])
async def test_text_workers_receive_chat_requests_for_other_endpoints(stream: bool) -> None:
    async with open_relays(routes) as relays:
        await relays.serve("m", ModelType.Chat, talker)
        responses = await relays.send_request("/v1/responses", {"model": "m", "input": "hi", "stream": stream})
        assert responses.status == 200, responses.body
        if stream:
            assert b"response.completed" in responses.body
            assert b'"delta":"Hel"' in responses.body
        else:
            assert text_of_response(responses.json) == "Hello"
        (requested,) = relays.received_requests
        assert requested["messages"] == [{"role": "user", "content": "hi"}]
        assert "input" not in requested


def test_chunks_contain_the_service_tier() -> None:
    chunk = tiered(CHAT).chunks("chatcmpl-1", "m", 5).first(0)
    assert json_decode(chunk.removeprefix(b"data: ").strip())["service_tier"] == "default"
