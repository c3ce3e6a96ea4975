"""Routes of the Messages API, in one process with the worker."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest
from starlette.requests import Request
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import NAME, Answer, ScriptedStack, open_stack

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.openapi.description import describe
from dynamo.http.routes.anthropic import add
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.serving.errors import ErrorAnswer

USER = [{"role": "user", "content": "hi"}]


class Served:
    """A pipeline with these routes."""

    def __init__(self, stack: ScriptedStack, options: ApiOptions) -> None:
        self.stack = stack
        self.table = RouteTable()
        add(self.table, RouteContext(stack.pipeline, stack.models, MetricsRegistry(), lambda: True, options))

    async def post(self, path: str, **fields: Any) -> Answer:
        return await self.stack.send_request(self.table.hot_handlers()[b"POST", path.encode()], fields)

    async def answer(self, script: Script | None = None, **fields: Any) -> Answer:
        nvext = {} if script is None else {"nvext": {"annotations": [script.annotation()]}}
        return await self.post("/v1/messages", **{"model": NAME, "max_tokens": 50, "messages": USER, **nvext, **fields})


@asynccontextmanager
async def served(*flags: str, **options: Any) -> AsyncIterator[Served]:
    async with open_stack(*flags) as stack:
        yield Served(stack, ApiOptions(**{"enable_anthropic": True, **options}))


async def test_disabled_messages_api_returns_404_and_names_its_flag() -> None:
    async with served(enable_anthropic=False) as one:
        assert one.table.hot_handlers() == {}
        assert [entry.path for entry in one.table.entries] == ["/v1/messages", "/v1/messages/count_tokens"]
        for route in one.table.starlette_routes():
            scope = {"type": "http", "method": "POST", "path": route.path, "headers": []}
            answer = await route.endpoint(Request(scope))
            body = json.loads(answer.body)
            assert (answer.status_code, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
            assert "--enable-anthropic-api" in body["error"]["message"]


async def test_message_is_answered_and_its_tokens_are_counted() -> None:
    async with served() as one:
        answer = await one.answer()
        assert (answer.status, answer.json["type"], answer.json["stop_reason"]) == (200, "message", "end_turn")
        assert answer.json["content"] == [{"type": "text", "text": "Hello there."}]
        assert answer.headers["request-id"].startswith("req_")
        counted = await one.post("/v1/messages/count_tokens", model=NAME, messages=USER)
        assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}


async def test_message_stream_ends_with_its_stop_reason_and_no_further_event() -> None:
    async with served("--dyn-reasoning-parser", "qwen3") as one:
        answer = await one.answer(Script(["<think>hm</think>Hi END"]), stream=True, stop_sequences=[" END"])
        names = [event.split("\n")[0].removeprefix("event: ") for event in answer.text_events]
        assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
        delta = json.loads(answer.text_events[-2].split("data: ", 1)[1])
        assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " END"}


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "no-such-model"}, 404, "not_found_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"bogus": 1}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "long " * 4000}]}, 400, "invalid_request_error"),
        ({"nvext": {"annotations": [Script(["x"], fails_after=0, fails_as="Unknown").annotation()]}}, 500, "api_error"),
        (
            {"nvext": {"annotations": [Script(["x"], fails_after=0, fails_as="WorkerOverloaded").annotation()]}},
            529,
            "overloaded_error",
        ),
    ],
)
async def test_errors_have_the_anthropic_format(fields: Any, status: int, kind: str) -> None:
    async with served() as one:
        answer = await one.answer(**fields)
        assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind)


async def test_token_count_is_not_bounded_by_the_context_length() -> None:
    async with served() as one:
        long = [{"role": "user", "content": "long " * 4000}]
        assert (await one.post("/v1/messages/count_tokens", model=NAME, messages=long)).json["input_tokens"] > 2048


async def test_billing_header_is_removed_unless_configured() -> None:
    system = "x-anthropic-billing-header: cch=1;\nBe brief."
    lengths = []
    for strips in (True, False):
        async with served(strip_anthropic_preamble=strips) as one:
            lengths.append((await one.answer(system=system)).json["usage"]["input_tokens"])
    assert lengths[0] < lengths[1]


async def test_messages_and_errors_conform_to_the_openapi_document() -> None:
    async with served("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3") as one:
        document = describe(one.table)
        text = '<think>hm</think>Hi<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        answer = await one.answer(Script([text]), tools=[{"name": "f", "input_schema": {"type": "object"}}])
        assert len(answer.json["content"]) == 3
        conforms(document, "/v1/messages", "200", answer.json)
        conforms(document, "/v1/messages", "400", (await one.answer(bogus=1)).json)
        counted = await one.post("/v1/messages/count_tokens", model=NAME, messages=USER)
        conforms(document, "/v1/messages/count_tokens", "200", counted.json)


def conforms(document: Any, path: str, status: str, answer: Any) -> None:
    schema = document["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": document["components"]})


async def test_errors_before_the_handler_have_the_anthropic_format() -> None:
    async with served() as one:
        body = one.table.error_bodies()[b"/v1/messages"](ErrorAnswer(413, "too large"))
        assert json.loads(body)["error"]["type"] == "request_too_large"
        assert set(describe(one.table)["paths"]) == {"/v1/messages", "/v1/messages/count_tokens"}
