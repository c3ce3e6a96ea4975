"""Echo: encoded fields of a long request within the events of its response."""

import json
from typing import Any

import pytest

from dynamo.api.responses.convert import to_response
from dynamo.api.responses.echo import SHORT_BYTES, SLICE_CHARS, echo_of, is_long_echo
from dynamo.core.codec import json_encode
from dynamo.protocols.response_items import MessageItem, OutputText
from dynamo.protocols.response_requests import ResponseRequest, decode_response_request

HOSTILE = '"tools":[] "instructions":null \\ "'


def request(**fields: Any) -> ResponseRequest:
    return decode_response_request(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def tools(count: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "name": f"t{number}", "description": HOSTILE, "parameters": {"tools": [], "a": None}}
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": HOSTILE, "tools": tools(3)},
        {"instructions": "é" * (2 * SLICE_CHARS + 1)},
        {"tools": tools(1), "user": HOSTILE, "metadata": {"tools": "[]"}},
        {"instructions": "", "text": {"format": {"type": "json_schema", "name": "s", "schema": {"tools": []}}}},
        {},
    ],
)
def test_parts_are_the_encoded_response(fields: dict[str, Any]) -> None:
    given = request(**fields)
    response = to_response(given, "resp_1", 1, is_stored=True)
    response.output.append(MessageItem("assistant", [OutputText(HOSTILE)], "msg_1", "completed"))
    assert b"".join(echo_of(given).within(response)) == json_encode(response)


def test_events_share_the_long_parts() -> None:
    given = request(instructions="a" * SHORT_BYTES, tools=tools(2))
    echo = echo_of(given)
    response = to_response(given, "resp_1", 1, is_stored=True)
    first, second = echo.within(response), echo.within(response)
    long = [part for part in first if len(part) >= SHORT_BYTES]
    assert long and all(any(part is other for other in second) for part in long)


def test_only_requests_that_are_repeated_at_length_are_encoded_before() -> None:
    assert is_long_echo(request(tools=tools(1)), SHORT_BYTES + 1)
    assert is_long_echo(request(instructions="a" * (SHORT_BYTES + 1)), SHORT_BYTES + 100)
    assert not is_long_echo(request(tools=tools(1)), SHORT_BYTES)
    assert not is_long_echo(request(instructions="a"), 1 << 24)
