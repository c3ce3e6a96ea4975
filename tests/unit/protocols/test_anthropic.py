"""Requests of the Messages API."""

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.anthropic import (
    AnswerText,
    AnthropicMessage,
    Base64Source,
    DocumentBlock,
    ImageBlock,
    MessageUsage,
    NamedChoice,
    RedactedThinkingBlock,
    TextBlock,
    TextSource,
    ThinkingAdaptive,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    decode_message_count,
    decode_messages,
)

USER = [{"role": "user", "content": "hi"}]


def decoded(**fields: Any) -> Any:
    return decode_messages(msgspec.json.encode({"model": "m", "max_tokens": 5, "messages": USER, **fields}))


def test_every_content_block_type_is_decoded() -> None:
    blocks = [
        {"type": "text", "text": "t", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "T"},
        {"type": "thinking", "thinking": "r", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [{"type": "text", "text": "42"}]},
    ]
    content = decoded(messages=[{"role": "user", "content": blocks}]).messages[0].content
    assert [type(block) for block in content] == [
        TextBlock, ImageBlock, DocumentBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, ToolResultBlock,
    ]  # fmt: skip
    assert content[1].source == Base64Source("image/png", "AA==")
    assert content[2].source == TextSource("d")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bogus": 1}, "bogus"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": "many"}, "max_tokens"),
    ],
)
def test_invalid_anthropic_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decoded(**fields)
    assert caught.value.param == param


def test_tool_choice_and_thinking_are_decoded_by_type() -> None:
    request = decoded(tool_choice={"type": "tool", "name": "f"}, thinking={"type": "adaptive", "display": "omitted"})
    assert request.tool_choice == NamedChoice("f")
    assert request.thinking == ThinkingAdaptive("omitted")


def test_max_tokens_is_required_for_messages_but_not_for_token_counts() -> None:
    body = msgspec.json.encode({"model": "m", "messages": USER})
    assert decode_message_count(body).model == "m"
    with pytest.raises(InvalidArgument, match="max_tokens"):
        decode_messages(body)


def test_message_encoding_equals_that_of_anthropic() -> None:
    message = AnthropicMessage(id="msg_1", content=[AnswerText("t")], model="m", usage=MessageUsage(3, 1))
    assert msgspec.json.decode(msgspec.json.encode(message)) == {
        "type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "text", "text": "t"}], "model": "m",
        "stop_reason": None, "stop_sequence": None,
        "usage": {
            "input_tokens": 3, "output_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip
