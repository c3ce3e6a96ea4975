"""Messages API with Anthropic's own client, its strict validation on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.cluster.cluster import MODEL, Cluster, scripted

pytestmark = pytest.mark.integration

USER: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ANSWER = '<think>Two and two. €😀</think>Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Malmö"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    with Cluster(tmp_path_factory.mktemp("messages"), "--enable-anthropic-api") as cluster:
        cluster.scripted_worker()
        yield cluster.anthropic(_strict_response_validation=True)


def send_request(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = client.messages.create(
        **{"model": MODEL, "max_tokens": 100, "messages": USER, **fields}
    )
    return message


def plain(message: anthropic.types.Message) -> Any:
    """Return a message without the fields that differ between responses: ids, and the client's own additions."""
    output = message.to_dict()
    del output["id"]  # type: ignore[misc]
    for block in output["content"]:  # type: ignore[attr-defined]
        block.pop("id", None)
        block.pop("parsed_output", None)
    return {name: value for name, value in output.items() if value is not None}


def test_message_gets_a_response(client: anthropic.Anthropic) -> None:
    message = send_request(client, system="Be brief.", metadata={"user_id": "u"})
    assert message.content[0].to_dict() == {"type": "text", "text": "Hello there."}
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", MODEL)
    assert message.id.startswith("msg_") and (message._request_id or "").startswith("req_")


@pytest.mark.parametrize("cuts", [[], [1], [3, 1, 7]])
def test_stream_equals_the_whole_message_with_thinking_text_and_calls(
    client: anthropic.Anthropic, cuts: list[int]
) -> None:
    options: Any = {"max_tokens": 1000, "tools": [WEATHER], "extra_body": scripted(ANSWER, cuts=cuts)}
    whole = send_request(client, **options)
    with client.messages.stream(model=MODEL, messages=USER, **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    thought, output, call = whole.content
    assert thought.type == "thinking" and thought.thinking == "Two and two. €😀" and thought.signature
    assert output.type == "text" and output.text == text == "Let me see."
    assert call.type == "tool_use" and call.input == {"city": "Malmö"} and call.id.startswith("toolu_")
    assert whole.stop_reason == "tool_use"
    assert whole.usage.output_tokens_details is not None and whole.usage.output_tokens_details.thinking_tokens > 0


def test_tool_call_and_result_round_trip(client: anthropic.Anthropic) -> None:
    first = send_request(client, tools=[WEATHER], extra_body=scripted(ANSWER))
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 degrees"}]}
    messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = send_request(client, tools=[WEATHER], messages=messages)
    assert second.stop_reason == "end_turn"
    assert second.usage.input_tokens > first.usage.input_tokens


def test_disabled_thinking_is_not_returned(client: anthropic.Anthropic) -> None:
    options: Any = {"thinking": {"type": "adaptive", "display": "omitted"}, "extra_body": scripted(ANSWER)}
    whole = send_request(client, **options)
    assert whole.content[0].type == "thinking" and whole.content[0].thinking == ""
    with client.messages.stream(model=MODEL, max_tokens=100, messages=USER, **options) as stream:
        assert plain(stream.get_final_message()) == plain(whole)


def test_message_reports_its_stop_reason(client: anthropic.Anthropic) -> None:
    stopped = send_request(client, stop_sequences=["three"], extra_body=scripted("one two three four"))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].to_dict() == {"type": "text", "text": "one two "}
    cut = send_request(client, max_tokens=1, extra_body=scripted("one two three"))
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    with client.messages.stream(
        model=MODEL, max_tokens=50, messages=USER, stop_sequences=["three"], extra_body=scripted("one two three four")
    ) as stream:
        assert plain(stream.get_final_message()) == plain(stopped)


def test_prefilled_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    usage = send_request(client, messages=begun).usage
    assert (
        usage.input_tokens < send_request(client, messages=[*begun, {"role": "user", "content": ""}]).usage.input_tokens
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "adaptive"}},
        {"messages": [*USER, {"role": "assistant", "content": "It is"}]},
    ],
)
def test_token_count_equals_the_usage_of_the_request(client: anthropic.Anthropic, fields: Any) -> None:
    counted = client.messages.count_tokens(**{"model": MODEL, "messages": USER, **fields}).input_tokens
    assert send_request(client, **fields).usage.input_tokens == counted


def test_cached_tokens_are_counted_separately(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    usage = send_request(client, extra_body=scripted("x", cached=5)).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted - 5, 5)
    with client.messages.stream(model=MODEL, max_tokens=9, messages=USER, extra_body=scripted("x", cached=5)) as stream:
        assert stream.get_final_message().usage == usage


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "no-such-model"}, anthropic.NotFoundError, "no-such-model"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "greater than 0"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"extra_body": {"bogus": 1}}, anthropic.BadRequestError, "bogus"),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "Temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]}, anthropic.BadRequestError, "container_upload"),
        ({"extra_body": scripted("x", fails_after=0, fails_as="Unknown")}, anthropic.InternalServerError, "Internal server error"),
        ({"extra_body": scripted("x", fails_after=0, fails_as="WorkerOverloaded")}, anthropic.OverloadedError, "overloaded_error"),
    ],
)  # fmt: skip
def test_errors_are_raised_as_exceptions_of_the_sdk(
    client: anthropic.Anthropic, fields: Any, kind: Any, words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        send_request(client, **fields)
    assert caught.value.body["type"] == "error"


def test_interrupted_stream_raises_its_error(client: anthropic.Anthropic, tmp_path: Path) -> None:
    read = tmp_path / "read"
    script = scripted("many words before it ends " * 60, fails_after=200, fails_as="Unknown", fails_when=str(read))
    with client.messages.create(model=MODEL, max_tokens=2000, messages=USER, stream=True, extra_body=script) as stream:
        kinds = [next(stream).type]
        read.touch()
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            kinds += [event.type for event in stream]
    assert kinds[0] == "message_start"


def test_malformed_json_gets_an_anthropic_error(client: anthropic.Anthropic) -> None:
    answer = client._client.post("/v1/messages", content=b"{bad")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_request_of_a_coding_agent_is_served(client: anthropic.Anthropic) -> None:
    """Typical fields of such a program: cache hints, beta fields, a billing line, streamed tools."""
    hint: Any = {"type": "ephemeral", "ttl": "1h"}
    tool: Any = {**WEATHER, "eager_input_streaming": True, "cache_control": hint}
    with client.beta.messages.stream(
        model=MODEL,
        max_tokens=32000,
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"},
            {"type": "text", "text": "You write code.", "cache_control": hint},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": hint}]}],
        tools=[tool],
        metadata={"user_id": "user_1"},
        thinking={"type": "enabled", "budget_tokens": 31999},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        extra_body=scripted(ANSWER),
    ) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use"
