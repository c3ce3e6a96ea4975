"""Requests of the Responses API."""

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.response_requests import (
    AllowedTools,
    ChosenFunction,
    SchemaFormat,
    decode_response_request,
    decode_token_count,
)


def refused(body: Any) -> str | None:
    with pytest.raises(InvalidArgument) as caught:
        decode_response_request(msgspec.json.encode(body))
    return caught.value.param


def test_tools_tool_choices_and_text_formats_are_decoded() -> None:
    request = decode_response_request(
        msgspec.json.encode({
            "model": "m", "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True, "async": False}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
        })
    )  # fmt: skip
    assert request.tools is not None and request.tools[0].name == "f"
    assert isinstance(request.tool_choice, AllowedTools)
    assert request.text is not None and request.text.format == SchemaFormat("s", {"type": "object"})
    named = decode_response_request(b'{"tool_choice": {"type": "function", "name": "f"}}')
    assert named.tool_choice == ChosenFunction("f")


def test_hosted_tools_are_refused_by_type() -> None:
    assert refused({"model": "m", "input": "x", "tools": [{"type": "web_search"}]}) == "tools[0].type"
    assert refused({"model": "m", "input": "x", "tool_choice": {"type": "mcp"}}) == "tool_choice.type"


def test_token_count_accepts_prompt_fields_only() -> None:
    assert decode_token_count(b'{"input": "x"}').model is None
    with pytest.raises(InvalidArgument, match="temperature"):
        decode_token_count(b'{"input": "x", "temperature": 1}')
