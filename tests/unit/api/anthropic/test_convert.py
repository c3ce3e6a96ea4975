"""Requests of the Messages API as chats."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from tests.unit.any_json import bodies

from dynamo.api.anthropic.convert import SEALED, hides_thoughts, to_chat
from dynamo.api.sealed_text import sealed
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.anthropic import MessagesRequest, decode_message_count, decode_messages
from dynamo.protocols.openai import ChatCompletionRequest, ChatMessage, ContentPart, FunctionCall, ToolCall

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}


def chat_of(*messages: Any, strip_preamble: bool = True, **fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 4096, "messages": messages or [USER], **fields}
    return to_chat(decode_messages(msgspec.json.encode(body)), strip_preamble=strip_preamble)


def test_anthropic_message_is_converted_to_a_chat() -> None:
    chat = chat_of()
    assert (chat.model, chat.messages, chat.max_tokens) == ("m", [ChatMessage("user", "hi")], 4096)
    assert (chat.tools, chat.thinking, chat.stop, chat.continue_final_message) == (None, None, None, None)


def test_anthropic_sampling_fields_are_mapped_to_chat_fields() -> None:
    chat = chat_of(
        stream=True, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=4, metadata={"user_id": "u"},
        service_tier="auto", cache_control={"type": "ephemeral"}, output_config={"effort": "low"},
    )  # fmt: skip
    assert (chat.stream, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (True, ["x"], 0.5, 0.9, 4)
    assert (chat.user, chat.reasoning_effort) == ("u", "low")


def test_system_prompt_blocks_are_joined_into_one_message() -> None:
    chat = chat_of(system=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    assert chat.messages[0] == ChatMessage("system", "one\ntwo")
    assert chat_of(system="").messages == [ChatMessage("user", "hi")]


BILLING = "x-anthropic-billing-header: cc_version=2; cch=a1b2;"


@pytest.mark.parametrize(
    "system",
    [f"{BILLING}\nYou help.", [{"type": "text", "text": BILLING}, {"type": "text", "text": "You help."}]],
)
def test_billing_header_is_removed_from_the_system_prompt(system: Any) -> None:
    assert chat_of(system=system).messages[0] == ChatMessage("system", "You help.")
    assert chat_of(system=system, strip_preamble=False).messages[0] == ChatMessage("system", f"{BILLING}\nYou help.")


def test_billing_header_is_removed_only_at_the_beginning() -> None:
    text = f"You help.\n{BILLING}"
    assert chat_of(system=text).messages[0].content == text


def test_assistant_blocks_are_one_message_and_tool_results_are_separate_messages() -> None:
    chat = chat_of(
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me."}, CALL,
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "42"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "43"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "Well?"},
        ]},
        tools=[TOOL],
    )  # fmt: skip
    assert chat.messages == [
        ChatMessage("user", "hi"),
        ChatMessage(
            "assistant", "Let me.", tool_calls=[ToolCall(FunctionCall("f", '{"a":1}'), "t1")], reasoning_content="hm"
        ),
        ChatMessage("tool", "42", tool_call_id="t1"),
        ChatMessage("tool", "43", tool_call_id="t2"),
        ChatMessage("tool", "", tool_call_id="t3"),
        ChatMessage("user", "Well?"),
    ]


def test_text_document_is_included_with_its_title() -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
        "title": "T",
    }
    content = chat_of({"role": "user", "content": [document, {"type": "text", "text": "q"}]}).messages[0].content
    assert content == [ContentPart("text", "T\n\nbody"), ContentPart("text", "q")]


def test_final_assistant_message_is_continued() -> None:
    chat = chat_of(USER, {"role": "assistant", "content": "It is"})
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


def test_empty_final_assistant_message_is_dropped() -> None:
    chat = chat_of(USER, {"role": "assistant", "content": []})
    assert (chat.messages, chat.continue_final_message) == ([ChatMessage("user", "hi")], None)


def test_tools_and_tool_choice_are_converted_to_chat_form() -> None:
    chat = chat_of(tools=[{**TOOL, "strict": True, "type": "custom", "cache_control": {"type": "ephemeral"}}])
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice is None
    assert chat_of(tools=[TOOL], tool_choice={"type": "auto"}).tool_choice == "auto"
    assert chat_of(tools=[TOOL], tool_choice={"type": "none"}).tool_choice == "none"
    assert chat_of(tools=[TOOL], tool_choice={"type": "any"}).tool_choice == "required"
    named = chat_of(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert named.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert named.parallel_tool_calls is False


def test_thinking_is_passed_to_the_template_and_unset_by_default() -> None:
    assert chat_of(thinking={"type": "enabled", "budget_tokens": 1024}).thinking is True
    assert chat_of(thinking={"type": "adaptive"}).thinking is True
    assert chat_of(thinking={"type": "disabled"}).thinking is False
    assert chat_of().thinking is None


def test_hidden_reasoning_is_restored_from_its_signature_and_other_signatures_are_dropped() -> None:
    for signature, thoughts in ((sealed(SEALED, "hm"), "hm"), ("EqQBCgIYAhIM", None), ("sealed:%%", None)):
        block = {"type": "thinking", "thinking": "", "signature": signature}
        chat = chat_of(USER, {"role": "assistant", "content": [block, {"type": "text", "text": "x"}]}, USER)
        assert chat.messages[1].reasoning_content == thoughts


def test_thinking_display_omitted_hides_reasoning() -> None:
    def hidden(thinking: Any) -> bool:
        body = {"model": "m", "messages": [USER], "thinking": thinking}
        return hides_thoughts(decode_message_count(msgspec.json.encode(body)))

    assert hidden({"type": "adaptive", "display": "omitted"})
    assert not hidden({"type": "adaptive", "display": "summarized"}) and not hidden({"type": "disabled"})
    assert not hidden(None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"diagnostics": {}}, "diagnostics"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "thinking.budget_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": []}], "system": "s"}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)  # fmt: skip
def test_unsupported_anthropic_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_of(**fields)
    assert caught.value.param == param


def test_anthropic_fields_without_effect_are_accepted() -> None:
    chat = chat_of(
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        speed="standard",
    )
    assert chat.messages == [ChatMessage("user", "hi")]


@given(bodies(MessagesRequest.__struct_encode_fields__, model="m", max_tokens=5, messages=[USER]))
def test_any_anthropic_request_is_converted_or_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        assert to_chat(decode_messages(body)).messages
