"""Requests and items of the Responses API."""

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.responses import (
    AllowedTools,
    ChosenFunction,
    FunctionCallItem,
    FunctionOutputItem,
    InputImage,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    SchemaFormat,
    decode_items,
    decode_response_request,
    decode_token_count,
)


def items(*given: Any) -> list[Any]:
    return decode_items([msgspec.Raw(msgspec.json.encode(one)) for one in given])


def refused(body: Any) -> str | None:
    with pytest.raises(InvalidArgument) as caught:
        decode_items(decode_response_request(msgspec.json.encode(body)).input or "")
    return caught.value.param


def test_text_input_is_a_user_message() -> None:
    assert decode_items("hi") == [MessageItem("user", "hi")]


def test_every_item_type_is_decoded() -> None:
    found = items(
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": "https://x/y.png", "detail": "low"},
        ]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "item_reference", "id": "msg_2"},
        {"id": "msg_3"},
    )  # fmt: skip
    assert found == [
        MessageItem("developer", "d"),
        MessageItem("user", [InputText("t"), InputImage("https://x/y.png", detail="low")]),
        ReasoningItem([], "rs_1", [ReasoningText("r")]),
        FunctionCallItem("{}", "c", "f", status="completed"),
        FunctionOutputItem("c", [InputText("42")]),
        MessageItem("assistant", [OutputText("a")], "msg_1", "completed"),
        ItemReference("msg_2"),
        ItemReference("msg_3"),
    ]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([3], "input[0]"),
        ([{"type": "computer_call"}], "input[0].type"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": "x", "mood": "good"}], "input[0].mood"),
        ([{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}], "input[1].arguments"),
    ],
)
def test_malformed_item_is_refused_by_path(given: Any, param: str) -> None:
    assert refused({"model": "m", "input": given}) == param


def test_empty_input_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must not be empty"):
        decode_items([])


def test_input_with_too_many_items_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 10000"):
        decode_items([msgspec.Raw(b"{}")] * 10_001)


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


def test_response_encodes_every_field_and_round_trips() -> None:
    item = FunctionCallItem("{}", "c", "f", "fc_1", "completed")
    response = Response(id="resp_1", created_at=1, model="m", output=[item])
    raw = msgspec.json.encode(response)
    assert set(msgspec.json.decode(raw)) == set(Response.__struct_fields__)
    assert msgspec.json.decode(raw, type=Response) == response
