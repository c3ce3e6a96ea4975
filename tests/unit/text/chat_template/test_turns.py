"""Messages are rendered in the form that the template accepts, otherwise as the client wrote them."""

from typing import Any

import pytest

from dynamo.core.codec import json_encode
from dynamo.protocols.openai import ChatCompletionRequest, ChatMessage, ContentPart, FunctionCall, ToolCall, decode_chat
from dynamo.text.chat_template.turns import TemplateForm, Turn, conversation, template_arguments, thinking_mode

SYSTEM = ChatMessage(role="system", content="s")
DEVELOPER = ChatMessage(role="developer", content="d")
USER = ChatMessage(role="user", content="u")
LATE = ChatMessage(role="system", content="l")

ON = {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}
OFF = {"thinking": False, "enable_thinking": False, "thinking_mode": "disabled"}


def call(arguments: str = "", call_id: str | None = "call-0123456789", content: str | None = None) -> ChatMessage:
    function = FunctionCall(name="f", arguments=arguments)
    return ChatMessage(role="assistant", content=content, tool_calls=[ToolCall(function=function, id=call_id)])


def roles(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in turns]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (TemplateForm(), [("system", "s"), ("system", "d"), ("user", "u"), ("system", "l")]),
        (TemplateForm(has_developers=True), [("system", "s"), ("developer", "d"), ("user", "u"), ("system", "l")]),
        (TemplateForm(has_several_systems=False), [("system", "s\n\nd"), ("user", "u"), ("system", "l")]),
        (TemplateForm(has_several_systems=False, has_late_systems=False), [("system", "s\n\nd\n\nl"), ("user", "u")]),
        (
            TemplateForm(has_several_systems=False, has_developers=True),
            [("system", "s\n\nd"), ("user", "u"), ("system", "l")],
        ),
    ],
)
def test_turns_join_instructions_only_where_required(form: TemplateForm, expected: list[tuple[str, str]]) -> None:
    assert roles(conversation([SYSTEM, DEVELOPER, USER, LATE], form)) == expected


def test_turns_start_a_conversation_with_late_instructions() -> None:
    assert roles(conversation([USER, LATE], TemplateForm(has_late_systems=False))) == [("system", "l"), ("user", "u")]


def test_turns_keep_the_parts_of_joined_instructions() -> None:
    turns = conversation([SYSTEM, DEVELOPER], TemplateForm(has_parts=True, has_several_systems=False))
    assert [part["text"] for part in turns[0]["content"]] == ["s", "d"]


@pytest.mark.parametrize(
    ("form", "content", "expected"),
    [
        (TemplateForm(), None, ""),
        (TemplateForm(has_null_content=True), None, None),
        (TemplateForm(has_null_content=True), "", ""),
        (TemplateForm(has_null_content=True, has_empty_content=False), "", None),
        (TemplateForm(has_null_content=True), "x", "x"),
    ],
)
def test_turns_give_a_message_with_calls_the_content_type_of_the_template(
    form: TemplateForm, content: str | None, expected: str | None
) -> None:
    assert conversation([call(content=content)], form)[0]["content"] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("[1]", "[1]"), ("\ud800", "\ud800"), ({"b": 2}, {"b": 2})],
)
def test_turns_parse_arguments_into_objects_where_possible(arguments: str, expected: object) -> None:
    turn = conversation([call(arguments)], TemplateForm(has_text_arguments=False))[0]
    assert turn["tool_calls"][0]["function"]["arguments"] == expected


def test_turns_shorten_call_ids_consistently_and_only_if_required() -> None:
    answer = ChatMessage(role="tool", content="4", tool_call_id="call-0123456789")
    calling, answering = conversation([call(), answer], TemplateForm(has_long_ids=False))
    assert calling["tool_calls"][0]["id"] == answering["tool_call_id"]
    assert len(answering["tool_call_id"]) == 9
    assert conversation([answer], TemplateForm())[0]["tool_call_id"] == "call-0123456789"
    assert (
        conversation([call(call_id="abcdefgh9")], TemplateForm(has_long_ids=False))[0]["tool_calls"][0]["id"]
        == "abcdefgh9"
    )
    assert conversation([call(call_id=None)], TemplateForm(has_long_ids=False))[0]["tool_calls"][0]["id"] is None


def test_turns_drop_unsupported_parts() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="image_url"), ContentPart(type="input_audio")]
    message = ChatMessage(role="user", content=[*parts, ContentPart(type="refusal", refusal="no")])
    assert conversation([message], TemplateForm())[0]["content"] == "a\nno"
    shown = conversation([message], TemplateForm(media=frozenset({"image"})))[0]["content"]
    assert shown == [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "no"}]
    only_text = ChatMessage(role="user", content=parts[:1])
    assert conversation([only_text], TemplateForm(media=frozenset({"image"})))[0]["content"] == "a"


def test_turns_pass_reasoning_under_every_supported_field_name() -> None:
    message = ChatMessage(role="assistant", content="a", reasoning="r", name="n")
    turn = conversation([message], TemplateForm())[0]
    assert (turn["reasoning_content"], turn["thinking"], turn["name"]) == ("r", "r", "n")
    both = call(content="x")
    both.reasoning_content = "r"
    assert "thinking" not in conversation([both], TemplateForm(has_thoughts_with_content=False))[0]
    both.content = None
    assert conversation([both], TemplateForm(has_thoughts_with_content=False))[0]["thinking"] == "r"


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode_chat(json_encode({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"chat_template_args": {"a": 1}}, {"a": 1}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"thinking": False}, OFF),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, ON),
        ({"thinking": {"type": "adaptive"}}, {"thinking_mode": "adaptive"}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", **ON}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", **OFF}),
        ({"chat_template_args": {"enable_thinking": False}}, OFF),
        ({"chat_template_args": {"thinking": True}}, ON),
        ({"chat_template_args": {"thinking_mode": "enabled"}}, ON),
        ({"chat_template_args": {"thinking_mode": "x"}}, {"thinking_mode": "x"}),
        ({"chat_template_args": {"reasoning_effort": "high"}}, {"reasoning_effort": "high", **ON}),
        ({"thinking": True, "chat_template_args": {"enable_thinking": False}}, ON),
        ({"thinking": False, "reasoning_effort": "high"}, {"reasoning_effort": "high", **OFF}),
        (
            {"reasoning_effort": "high", "chat_template_args": {"enable_thinking": False}},
            {"reasoning_effort": "high", **OFF},
        ),
    ],
)
def test_thinking_mode_is_read_from_a_request_in_four_ways(fields: dict[str, Any], expected: Any) -> None:
    assert template_arguments(chat(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "default", "expected"),
    [
        ({}, "enabled", ON),
        ({}, "disabled", OFF),
        ({"chat_template_args": {"a": 1}}, "enabled", {"a": 1, **ON}),
        ({"thinking": False}, "enabled", OFF),
        ({"reasoning_effort": "low"}, "disabled", {"reasoning_effort": "low", **ON}),
        ({"chat_template_args": {"thinking_mode": "x"}}, "enabled", {"thinking_mode": "x"}),
    ],
)
def test_thinking_mode_defaults_to_that_of_the_worker(fields: dict[str, Any], default: str, expected: Any) -> None:
    assert template_arguments(chat(**fields), default) == expected


def test_thinking_mode_is_none_without_any_setting() -> None:
    assert thinking_mode(chat()) is None
