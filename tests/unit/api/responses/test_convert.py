"""Requests of the Responses API as chats."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from tests.unit.any_json import bodies

from dynamo.api.responses.convert import check_results, messages_of, to_chat, to_response, without_oldest
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import ChatCompletionRequest, ChatMessage, ContentPart, FunctionCall, ToolCall
from dynamo.protocols.response_items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
    decode_items,
)
from dynamo.protocols.response_requests import ResponseRequest, decode_response_request

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "description": "d"}
TIME = {"type": "function", "name": "time"}


def request_of(**fields: Any) -> ResponseRequest:
    return decode_response_request(msgspec.json.encode({"model": "m", "input": "hi", **fields}))


def chat_of(**fields: Any) -> ChatCompletionRequest:
    request = request_of(**fields)
    assert request.input is not None
    return to_chat(request, decode_items(request.input))  # type: ignore[arg-type]


def test_text_input_is_converted_to_a_chat() -> None:
    chat = chat_of()
    assert chat.model == "m"
    assert chat.messages == [ChatMessage("user", "hi")]
    assert (chat.stream, chat.tools, chat.response_format, chat.logprobs) == (None, None, None, None)


def test_response_fields_are_mapped_to_chat_fields() -> None:
    chat = chat_of(
        instructions="be brief", max_output_tokens=7, temperature=0.5, top_p=0.9, stream=True, user="u", metadata={"a": "b"},
        reasoning={"effort": "low", "summary": "auto"}, parallel_tool_calls=False, include=["message.output_text.logprobs"],
        top_logprobs=2, text={"verbosity": "low"}, nvext={"greed_sampling": True},
    )  # fmt: skip
    assert chat.messages[0] == ChatMessage("system", "be brief")
    assert (chat.max_completion_tokens, chat.temperature, chat.top_p, chat.stream) == (7, 0.5, 0.9, True)
    assert (chat.reasoning_effort, chat.parallel_tool_calls, chat.logprobs, chat.top_logprobs) == (
        "low",
        False,
        True,
        2,
    )
    assert chat.chat_template_kwargs == {"verbosity": "low"}
    assert chat.nvext is not None and chat.nvext.greed_sampling


def test_consecutive_assistant_items_are_one_message() -> None:
    found = messages_of([
        MessageItem("user", "u"),
        ReasoningItem([], "rs", [ReasoningText("think "), ReasoningText("hard")]),
        MessageItem("assistant", [OutputText("Let me.")]),
        FunctionCallItem('{"a":1}', "c1", "f"),
        FunctionCallItem("{}", "c2", "g"),
        FunctionOutputItem("c1", "42"),
        FunctionOutputItem("c2", [InputText("a"), InputText("b")]),
        MessageItem("assistant", [OutputText("Done.")]),
    ])  # fmt: skip
    calls = [ToolCall(FunctionCall("f", '{"a":1}'), "c1"), ToolCall(FunctionCall("g", "{}"), "c2")]
    assert found == [
        ChatMessage("user", "u"),
        ChatMessage("assistant", "Let me.", tool_calls=calls, reasoning_content="think hard"),
        ChatMessage("tool", "42", tool_call_id="c1"),
        ChatMessage("tool", [ContentPart("text", "a"), ContentPart("text", "b")], tool_call_id="c2"),
        ChatMessage("assistant", "Done."),
    ]


def test_new_reasoning_or_text_starts_a_new_message() -> None:
    found = messages_of([
        MessageItem("assistant", "one"),
        MessageItem("assistant", "two"),
        ReasoningItem([SummaryText("s1"), SummaryText("s2")]),
        MessageItem("assistant", [Refusal("no")]),
    ])  # fmt: skip
    assert found == [
        ChatMessage("assistant", "one"),
        ChatMessage("assistant", "two"),
        ChatMessage("assistant", [ContentPart("refusal", refusal="no")], reasoning_content="s1\n\ns2"),
    ]


def test_truncation_removes_tool_results_with_their_calls() -> None:
    items: list[Any] = [
        MessageItem("user", "a"),
        FunctionCallItem("{}", "c1", "f"),
        FunctionOutputItem("c1", "1"),
        FunctionCallItem("{}", "c2", "f"),
        FunctionOutputItem("c2", "2"),
    ]
    assert without_oldest(items, 1) == items[1:]
    assert without_oldest(items, 2) == items[3:]


def test_response_tools_are_converted_to_chat_tools() -> None:
    chat = chat_of(tools=[WEATHER, {**TIME, "strict": True}], tool_choice="auto")
    assert chat.tools == [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "time", "strict": True}},
    ]
    assert chat.tool_choice == "auto"


def test_allowed_tools_restrict_the_tools_of_the_chat() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    chat = chat_of(tools=[WEATHER, TIME], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["time"]
    assert chat.tool_choice == "auto"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"moderation": {}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: "x"}}, "metadata"),
        ({"tools": [{**TIME, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TIME, "async": True}]}, "tools[0].async"),
        ({"tools": [{**TIME, "output_schema": {}}]}, "tools[0].output_schema"),
        ({"tools": [{**TIME, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input_image.file_id"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_completion_tokens"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_unsupported_response_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_of(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False, "truncation": "disabled", "store": False, "service_tier": "flex"},
        {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "safety_identifier": "s"},
        {"reasoning": {"context": "auto", "mode": "standard"}, "stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)  # fmt: skip
def test_response_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert chat_of(**fields).messages == [ChatMessage("user", "hi")]


def test_response_repeats_the_request_fields() -> None:
    requested = request_of(
        instructions="i", temperature=0.5, tools=[WEATHER], tool_choice="none", metadata={"a": "b"}, top_logprobs=3,
        text={"format": {"type": "json_object"}}, parallel_tool_calls=False, service_tier="flex", previous_response_id="p",
    )  # fmt: skip
    response = to_response(requested, "resp_1", 5, is_stored=True)
    output = msgspec.to_builtins(response)
    assert (output["id"], output["created_at"], output["status"], output["store"]) == ("resp_1", 5, "in_progress", True)
    assert (output["instructions"], output["temperature"], output["top_p"], output["tool_choice"]) == (
        "i",
        0.5,
        1.0,
        "none",
    )
    assert output["tools"] == [WEATHER | {"strict": True}]
    assert output["text"] == {"format": {"type": "json_object"}}
    assert (output["parallel_tool_calls"], output["service_tier"], output["previous_response_id"]) == (
        False,
        "flex",
        "p",
    )
    assert output["metadata"] == {"a": "b"}


def test_response_has_openai_defaults_for_absent_fields() -> None:
    output = msgspec.to_builtins(to_response(request_of(), "resp_1", 5, is_stored=False))
    assert (output["temperature"], output["top_p"], output["tool_choice"], output["truncation"]) == (
        1.0,
        1.0,
        "auto",
        "disabled",
    )
    assert output["text"] == {"format": {"type": "text"}}


@given(bodies(ResponseRequest.__struct_encode_fields__, model="m", input=[{"role": "user", "content": "hi"}]))
def test_any_response_request_is_converted_or_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        request = decode_response_request(body)
        chat = to_chat(
            request, [item for item in decode_items(request.input or "") if not isinstance(item, ItemReference)]
        )
        assert chat.messages
        assert to_response(request, "resp_1", 1, is_stored=False).status == "in_progress"


def test_chat_sampling_fields_are_accepted_in_responses() -> None:
    fields: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["a"], "frequency_penalty": 0.5, "presence_penalty": 0.25,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    chat = chat_of(**fields, response_format={"type": "json_object"})
    assert {name: getattr(chat, name) for name in fields} == fields
    assert chat.response_format is not None and chat.response_format.type == "json_object"
    with pytest.raises(InvalidArgument, match="are mutually exclusive"):
        chat_of(response_format={"type": "text"}, text={"format": {"type": "json_object"}})


def test_response_repeats_tools_with_strict_and_penalties() -> None:
    tools = [TIME, WEATHER | {"strict": False}, WEATHER | {"strict": True}]
    response = to_response(request_of(tools=tools, frequency_penalty=0.5), "resp_1", 1, is_stored=False)
    shown = msgspec.to_builtins(response.tools)
    bare = {"type": "function", "name": "time", "parameters": None, "description": None, "strict": True}
    assert shown == [bare, WEATHER | {"strict": False}, WEATHER | {"strict": True}]
    assert (response.frequency_penalty, response.presence_penalty) == (0.5, 0.0)


def test_tool_result_without_its_call_is_refused() -> None:
    call, result = FunctionCallItem("{}", "c1", "f"), FunctionOutputItem("c1", "1")
    check_results([call], [result])
    check_results([], [call, result])
    check_results([call], [MessageItem("user", "hi")])
    with pytest.raises(InvalidArgument, match="c1"):
        check_results([], [result])
