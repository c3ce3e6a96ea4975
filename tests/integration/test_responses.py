"""Responses API with OpenAI's own client, its strict validation on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from tests.cluster.cluster import MODEL, Cluster, scripted
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "responses-and-messages.md"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
ANSWER = '<think>Two and two. €😀</think>Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Malmö"}}\n</tool_call>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("responses")) as cluster:
        cluster.scripted_worker()
        yield cluster


def client_of(cluster: Cluster) -> openai.OpenAI:
    return cluster.openai(_strict_response_validation=True)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return client_of(cluster)


def plain(items: Any) -> list[Any]:
    """Return output without the fields that differ between responses: ids, and the client's own additions."""
    found = []
    for item in items:
        one = item.to_dict()
        found.append({name: value for name, value in one.items() if name not in ("id", "call_id", "parsed_arguments")})
        for part in one.get("content") or ():
            part.pop("parsed", None)
    return found


def test_text_input_gets_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "Hello there."
    assert (response.status, response.metadata, response.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@pytest.mark.parametrize("cuts", [[], [1], [3, 1, 7]])
def test_stream_equals_the_whole_response_with_reasoning_text_and_calls(client: openai.OpenAI, cuts: list[int]) -> None:
    options: Any = {"model": MODEL, "input": "hi", "tools": [WEATHER], "extra_body": scripted(ANSWER, cuts=cuts)}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert plain(final.output) == plain(whole.output)
    assert "".join(texts) == whole.output_text == "Let me see."
    thought, _, call = whole.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "Two and two. €😀"
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Malmö"}
    assert final.usage == whole.usage
    assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens > 0


def test_stream_events_are_those_of_the_sdk(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(model=MODEL, input="hi", stream=True, tools=[WEATHER], extra_body=scripted(ANSWER))
    )
    adapter: Any = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip


def test_tool_call_and_result_round_trip(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hi", tools=[WEATHER], store=False, extra_body=scripted(ANSWER))
    call = first.output[-1]
    assert call.type == "function_call"
    conversation: Any = [{"role": "user", "content": "hi"}, *first.output]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"})
    second = client.responses.create(model=MODEL, input=conversation, tools=[WEATHER], store=False)
    assert second.output_text == "Hello there."
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_conversation_continues_from_its_last_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hi", instructions="Be brief.")
    second = client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    printed: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    same = client.responses.create(model=MODEL, input=printed)
    assert second.previous_response_id == first.id
    assert second.usage is not None and same.usage is not None
    assert second.usage.input_tokens == same.usage.input_tokens, "instructions are not carried over"
    referred: Any = [
        {"role": "user", "content": "hi"},
        {"type": "item_reference", "id": first.output[0].id},
        printed[2],
    ]
    assert client.responses.input_tokens.count(model=MODEL, input=referred).input_tokens == same.usage.input_tokens


def test_stored_response_is_read_listed_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    assert client.responses.retrieve(response.id) == response
    listed = list(client.responses.input_items.list(response.id, order="asc", limit=1))
    assert [item.content[0].text for item in listed] == ["a", "b"]  # type: ignore[union-attr]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(response.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=response.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_response_with_store_false_is_not_stored(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", store=False)
    assert response.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_streamed_response_is_stored(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi") as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": "hi", "instructions": "Be brief.", "tools": [WEATHER]},
        {"input": "hi", "tools": [WEATHER], "tool_choice": "none"},
        {"input": [{"role": "user", "content": "long " * 3000}]},
    ],
)
def test_token_count_equals_the_usage_of_the_request(client: openai.OpenAI, fields: Any) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, **fields).input_tokens
    if counted > 2048:
        with pytest.raises(openai.BadRequestError, match=str(counted)):
            client.responses.create(model=MODEL, **fields)
        return
    usage = client.responses.create(model=MODEL, **fields).usage
    assert usage is not None and usage.input_tokens == counted


def test_usage_reports_cached_tokens(client: openai.OpenAI) -> None:
    usage = client.responses.create(model=MODEL, input="hi", extra_body=scripted("x", cached=5)).usage
    assert usage is not None and usage.input_tokens_details.cached_tokens == 5


def test_truncated_response_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="hi", max_output_tokens=1, extra_body=scripted("one two three")
    )
    assert (response.status, response.output_text) == ("incomplete", "one")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    events = list(
        client.responses.create(
            model=MODEL, input="hi", max_output_tokens=1, stream=True, extra_body=scripted("one two")
        )
    )
    assert events[-1].type == "response.incomplete"


def test_logprobs_are_returned_with_the_text(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (message,) = client.responses.create(**options).output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None
    assert "".join(one.token for one in logprobs) == "Hello there."
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    with client.responses.stream(**options) as stream:
        assert plain(stream.get_final_response().output) == plain([message])


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, openai.NotFoundError, "previous_response_id"),
        ({"extra_body": {"bogus": 1}}, openai.BadRequestError, "bogus"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, openai.BadRequestError, "input[0].content[0].type"),
        ({"extra_body": scripted("x", fails_after=0, fails_as="Unknown")}, openai.InternalServerError, None),
        ({"extra_body": scripted("x", fails_after=0, fails_as="WorkerOverloaded")}, openai.InternalServerError, None),
    ],
)  # fmt: skip
def test_errors_are_raised_as_exceptions_of_the_sdk(
    client: openai.OpenAI, fields: Any, kind: Any, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.responses.create(**{"model": MODEL, "input": "hi", **fields})
    assert caught.value.param == param


def test_interrupted_stream_ends_with_a_failed_response(client: openai.OpenAI, tmp_path: Path) -> None:
    text, read = "many words before it ends " * 60, tmp_path / "read"
    events = []
    with client.responses.create(
        model=MODEL,
        input="hi",
        stream=True,
        extra_body=scripted(text, fails_after=200, fails_as="Unknown", fails_when=str(read)),
    ) as stream:
        for event in stream:
            read.touch()
            events.append(event)
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.code == "server_error"
    (item,) = last.response.output
    assert item.type == "message" and item.status == "incomplete" and text.startswith(item.content[0].text)  # type: ignore[union-attr]


def test_two_frontends_share_a_directory_of_responses(tmp_path: Any) -> None:
    store = str(tmp_path / "store")
    with Cluster(tmp_path, "--responses-store", store) as one:
        one.scripted_worker()
        other = Cluster(tmp_path, "--responses-store", store)
        try:
            wait_until(lambda: other.workers() == 1, "the second frontend saw no worker")
            first = client_of(one).responses.create(model=MODEL, input="hi")
            second = client_of(other).responses.create(model=MODEL, input="and?", previous_response_id=first.id)
            assert client_of(one).responses.retrieve(second.id).previous_response_id == first.id
            client_of(other).responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                client_of(one).responses.retrieve(first.id)
        finally:
            other.stop()


def test_frontend_without_response_store_reports_the_setting(tmp_path: Any) -> None:
    with Cluster(tmp_path, "--responses-store", "none") as cluster:
        cluster.scripted_worker()
        client = client_of(cluster)
        response = client.responses.create(model=MODEL, input="hi", store=True)
        assert response.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError, match="--responses-store none"):
            client.responses.create(model=MODEL, input="hi", previous_response_id=response.id)
        assert cluster.post({}, "/v1/messages").status_code == 404


class Place(pydantic.BaseModel):
    """Structured output of the embedded engine."""

    city: str = pydantic.Field(max_length=12)
    is_large: bool


@pytest.fixture(scope="module")
def demo_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("demo"), "--enable-anthropic-api") as cluster:
        cluster.run("cpu", "--model-name", MODEL)
        wait_until(lambda: cluster.workers() == 1, "the worker never appeared")
        yield cluster


@pytest.fixture(scope="module")
def demo(demo_cluster: Cluster) -> openai.OpenAI:
    return client_of(demo_cluster)


def test_model_output_is_equal_streamed_and_whole(demo: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "What is a worker?", "temperature": 0, "max_output_tokens": 40}
    whole = demo.responses.create(**options)
    with demo.responses.stream(**options) as stream:
        final = stream.get_final_response()
    assert whole.output_text and plain(final.output) == plain(whole.output)
    assert whole.usage is not None and final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = demo.responses.input_tokens.count(model=MODEL, input=options["input"]).input_tokens
    assert counted == whole.usage.input_tokens


def test_model_output_matches_the_schema(demo: openai.OpenAI) -> None:
    parsed = demo.responses.parse(
        model=MODEL, input="A place, please.", text_format=Place, max_output_tokens=200, temperature=0
    )
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Place)


def test_model_calls_the_required_tool(demo: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    response = demo.responses.create(
        model=MODEL, input="Weather?", tools=[WEATHER], tool_choice=choice, max_output_tokens=200, temperature=0
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert response.status == "completed" and set(json.loads(call.arguments)) == {"city"}


def test_examples_of_the_page_run(demo_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        here = block.replace("http://localhost:8000", f"http://127.0.0.1:{demo_cluster.port}")
        exec(compile(here, PAGE.name, "exec"), names)
    assert names["second"].previous_response_id == names["first"].id
    printed = capsys.readouterr().out
    assert names["last"].output_text in printed and names["message"].content[0].text in printed


def test_request_of_a_coding_agent_is_served(client: openai.OpenAI) -> None:
    """Typical fields of such a program: no storage, returned reasoning, a key for the prompt cache."""
    conversation: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You write code."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ]
    options: Any = {
        "model": MODEL, "instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session", "text": {"verbosity": "medium"},
    }  # fmt: skip
    with client.responses.stream(input=conversation, extra_body=scripted(ANSWER), **options) as stream:
        first = stream.get_final_response()
    items = [item.to_dict(exclude_none=False) for item in first.output]
    for item in items:
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)  # type: ignore[attr-defined]
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    second = client.responses.create(input=[*conversation, *items, result], **options)
    assert second.output_text == "Hello there."
