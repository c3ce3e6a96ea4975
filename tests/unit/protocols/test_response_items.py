"""Items of the Responses API."""

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.response_items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputImage,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    decode_items,
)


def items(*given: Any) -> list[Any]:
    return decode_items([msgspec.Raw(msgspec.json.encode(one)) for one in given])


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
    with pytest.raises(InvalidArgument) as caught:
        items(*given)
    assert caught.value.param == param


def test_empty_input_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must not be empty"):
        decode_items([])


def test_input_with_too_many_items_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 10000"):
        decode_items([msgspec.Raw(b"{}")] * 10_001)
