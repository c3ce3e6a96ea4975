"""Routes of the Responses API, in one process with the worker."""

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import NAME, Answer, ScriptedStack, open_stack

from dynamo.api.responses.compaction import compacted
from dynamo.api.responses.directory_store import DirectoryStore
from dynamo.api.responses.echo import echo_of
from dynamo.api.responses.store import Dropped, MemoryResponseStore
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.openapi.description import describe
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.responses import add, error_body, open_store
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.http.server.exchange import HotHandler
from dynamo.serving.errors import ErrorAnswer


class Served:
    """A pipeline with these routes."""

    def __init__(self, stack: ScriptedStack, options: ApiOptions) -> None:
        self.stack = stack
        self.registry = MetricsRegistry()
        self.table = RouteTable()
        add(self.table, RouteContext(stack.pipeline, stack.models, self.registry, lambda: True, options, "x"))
        self.http = TestClient(Starlette(routes=self.table.starlette_routes()))

    async def post(self, path: str, **fields: Any) -> Answer:
        handler: HotHandler = self.table.hot_handlers()[b"POST", path.encode()]
        return await self.stack.send_request(handler, fields)

    async def respond(self, script: Script | None = None, **fields: Any) -> Any:
        nvext = {} if script is None else {"nvext": {"annotations": [script.annotation()]}}
        return await self.post("/v1/responses", **{"model": NAME, "input": "hi", **nvext, **fields})


@asynccontextmanager
async def served(*flags: str, **options: Any) -> AsyncIterator[Served]:
    async with open_stack(*flags) as stack:
        one = Served(stack, ApiOptions(**options))
        yield one
        for close in one.table.on_stop:
            await close()


async def test_response_is_returned_stored_and_counted() -> None:
    async with served() as one:
        answer = await one.respond()
        assert answer.status == 200
        assert answer.json["output"][0]["content"][0]["text"] == "Hello there."
        kept = one.http.get(f"/v1/responses/{answer.json['id']}")
        assert kept.json() == answer.json
        assert "x_responses_store_entries 1" in one.registry.render()
        counted = await one.post("/v1/responses/input_tokens", model=NAME, input="hi")
        assert counted.json == {"object": "response.input_tokens", "input_tokens": answer.json["usage"]["input_tokens"]}


async def test_input_tokens_requires_no_model_when_one_model_is_served() -> None:
    async with served() as one:
        assert (await one.post("/v1/responses/input_tokens", input="hi")).json["input_tokens"] > 0
        refused = await one.post("/v1/responses/input_tokens", model="no-such-model", input="hi")
        assert (refused.status, refused.json["error"]["param"]) == (404, "model")


async def test_response_stream_ends_with_the_stored_response() -> None:
    async with served("--dyn-reasoning-parser", "qwen3") as one:
        answer = await one.respond(Script(["<think>hm</think>Hi"]), stream=True)
        assert answer.headers["content-type"] == "text/event-stream"
        last = json.loads(answer.text_events[-2].split("data: ", 1)[1])
        assert last["type"] == "response.completed"
        assert [item["type"] for item in last["response"]["output"]] == ["reasoning", "message"]
        assert one.http.get(f"/v1/responses/{last['response']['id']}").json() == last["response"]


def long_tools() -> list[dict[str, Any]]:
    return [
        {"type": "function", "name": f"t{number}", "description": "a" * 100, "parameters": {"type": "object"}}
        for number in range(3)
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_response_repeats_of_a_long_request_is_encoded_once_and_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    encoded: list[int] = []

    def echo(request: Any) -> Any:
        encoded.append(threading.get_ident())
        return echo_of(request)

    monkeypatch.setattr("dynamo.http.routes.responses.echo_of", echo)
    monkeypatch.setattr("dynamo.api.responses.echo.SHORT_BYTES", 300)
    async with served() as one:
        answer = await one.respond(tools=long_tools(), instructions="Be brief.", stream=stream)
        assert answer.status == 200
        if stream:
            events = [json.loads(event.split("data: ", 1)[1]) for event in answer.text_events[:-1]]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            shown = [event["response"] for event in events if "response" in event]
            assert len(shown) == 3
        else:
            shown = [answer.json]
        for response in shown:
            assert [tool["name"] for tool in response["tools"]] == [tool["name"] for tool in long_tools()]
            assert response["instructions"] == "Be brief."
        assert len(encoded) == 1 and encoded[0] != threading.get_ident()


async def test_compaction_is_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def recorded(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return compacted(*given)

    monkeypatch.setattr("dynamo.http.routes.responses.compacted", recorded)
    async with served() as one:
        answer = await one.post("/v1/responses/compact", model=NAME, input="hi")
        assert answer.status == 200
        assert [item["type"] for item in answer.json["output"]] == ["message", "compaction"]
        assert threads and threads[0] != threading.get_ident()


async def test_response_prompt_contains_the_previous_conversation() -> None:
    async with served() as one:
        first = (await one.respond()).json
        second = await one.respond(input="and?", previous_response_id=first["id"])
        again = await one.respond(
            input=[{"role": "user", "content": "hi"}, first["output"][0], {"role": "user", "content": "and?"}]
        )
        assert second.json["usage"]["input_tokens"] == again.json["usage"]["input_tokens"]
        first_requested, *_, last_requested = one.stack.engine.requests
        assert len(last_requested.token_ids) > len(first_requested.token_ids)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"model": None}, 400, "model"),
        ({"model": "no-such-model"}, 404, "model"),
        ({"background": True}, 400, "background"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"previous_response_id": "resp_" + "0" * 32}, 404, "previous_response_id"),
        ({"input": [{"id": "msg_" + "0" * 32}]}, 404, "input[0].id"),
        ({"input": "long " * 4000}, 400, "input"),
    ],
)
async def test_responses_error_names_the_request_field(fields: Any, status: int, param: str) -> None:
    async with served() as one:
        answer = await one.respond(**fields)
        assert (answer.status, answer.json["error"]["param"]) == (status, param)


async def test_truncation_auto_drops_the_oldest_items_that_exceed_the_context() -> None:
    turns = [{"role": "user", "content": f"{number} " + "long " * 400} for number in range(8)]
    async with served() as one:
        assert (await one.respond(input=turns)).status == 400
        answer = await one.respond(input=turns, truncation="auto", max_output_tokens=64)
        assert (answer.status, answer.json["truncation"]) == (200, "auto")
        used = answer.json["usage"]["input_tokens"]
        alone = (await one.respond(input=turns[-1:])).json["usage"]["input_tokens"]
        assert alone < used <= 2048 - 64 < used + alone
        counted = await one.post("/v1/responses/input_tokens", model=NAME, input=turns, truncation="auto")
        assert counted.json["input_tokens"] <= 2048
        short = await one.respond(truncation="auto")
        assert short.json["usage"]["input_tokens"] == (await one.respond()).json["usage"]["input_tokens"]
        assert (await one.respond(input="long " * 4000, truncation="auto")).status == 400


async def test_stored_responses_are_listed_and_deleted() -> None:
    async with served() as one:
        response_id = (await one.respond(input=[{"role": "user", "content": text} for text in "abc"])).json["id"]
        path = f"/v1/responses/{response_id}"
        page = one.http.get(f"{path}/input_items", params={"limit": 2}).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["c", "b"]
        assert page["has_more"] is True
        rest = one.http.get(f"{path}/input_items", params={"after": page["last_id"]}).json()
        assert [item["content"][0]["text"] for item in rest["data"]] == ["a"]
        for query in ({"limit": "x"}, {"limit": 0}, {"order": "up"}, {"after": "x"}):
            assert one.http.get(f"{path}/input_items", params=query).status_code == 400
        assert one.http.get(path, params={"stream": "true"}).status_code == 400
        assert one.http.delete(path).json() == {"id": response_id, "object": "response", "deleted": True}
        for refused in (one.http.get(path), one.http.delete(path), one.http.get(f"{path}/input_items")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found")


async def test_response_is_not_stored_with_store_false_or_without_a_store() -> None:
    async with served() as one:
        answer = await one.respond(store=False)
        assert answer.json["store"] is False
        assert one.http.get(f"/v1/responses/{answer.json['id']}").status_code == 404
    async with served(responses_store="none") as one:
        answer = await one.respond(store=True)
        assert answer.json["store"] is False
        assert (await one.respond(previous_response_id=answer.json["id"])).status == 400


async def test_unknown_response_fields_are_ignored_when_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as one:
        assert (await one.respond(bogus=1)).json["error"]["param"] == "bogus"
    monkeypatch.setenv("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", "1")
    async with served() as one:
        assert (await one.respond(bogus=1)).status == 200


def test_response_store_is_selected_by_its_option(tmp_path: Any) -> None:
    dropped = Dropped(None, "x")
    assert open_store(ApiOptions(responses_store="none"), dropped) is None
    assert isinstance(open_store(ApiOptions(), dropped), MemoryResponseStore)
    assert isinstance(open_store(ApiOptions(responses_store=str(tmp_path / "store")), dropped), DirectoryStore)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError):
        open_store(ApiOptions(responses_store=str(tmp_path / "file")), dropped)


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("messages[3].content", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("model", "model"),
        (None, None),
    ],
)
def test_errors_name_the_fields_of_the_request(param: str | None, named: str | None) -> None:
    assert json.loads(error_body(ErrorAnswer(400, "x", param=param)))["error"]["param"] == named


async def test_responses_and_errors_conform_to_the_openapi_document() -> None:
    async with served("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3") as one:
        document = describe(one.table)
        text = '<think>hm</think>Hi<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        fields = {"tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}}}
        answer = (await one.respond(Script([text]), **fields)).json
        assert len(answer["output"]) == 3
        conforms(document, "/v1/responses", "post", "200", answer)
        conforms(document, "/v1/responses", "post", "400", (await one.respond(bogus=1)).json)
        page = one.http.get(f"/v1/responses/{answer['id']}/input_items").json()
        conforms(document, "/v1/responses/{id}/input_items", "get", "200", page)
        missing = one.http.get("/v1/responses/resp_1").json()
        conforms(document, "/v1/responses/{id}", "get", "404", missing)


def conforms(document: Any, path: str, method: str, status: str, answer: Any) -> None:
    schema = document["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": document["components"]})


async def test_openapi_document_describes_the_responses_routes() -> None:
    async with served() as one:
        document = describe(one.table)
        assert set(document["paths"]) == {
            "/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens", "/v1/responses/{id}",
            "/v1/responses/{id}/input_items",
        }  # fmt: skip
