"""Requests have limits on their lists and texts; each refusal names the field, its size and the limit."""

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.protocols import openai_ranges
from dynamo.protocols.openai import decode_chat, decode_completion
from dynamo.protocols.openai_ranges import RequestBounds

USER = {"role": "user", "content": "hi"}
SMALL = RequestBounds(messages=3, prompt_tokens=4, text_chars=10, stop_chars=5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.protocols.openai_ranges.request_bounds", lambda: SMALL)
    monkeypatch.setattr("dynamo.protocols.openai_ranges.TOOLS_MAX", 1)
    monkeypatch.setattr("dynamo.protocols.openai_ranges.TOKEN_IDS_MAX", 2)
    monkeypatch.setattr("dynamo.protocols.openai_ranges.ENTRIES_MAX", 2)
    monkeypatch.setattr("dynamo.protocols.openai_ranges.DESCRIPTION_CHARS_MAX", 5)


def tool(description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description}}


def parts(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a"}] * count}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"messages": [USER] * 4}, "messages has 4 entries; at most 3 are allowed (DYN_HTTP_MAX_MESSAGES)", "messages"),
        ({"messages": [parts(4)]}, "messages has 4 parts; at most 3", "messages"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 4}]}, "messages has 4 parts; at most 3", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 11}]}, "messages has 11 characters of text; at most 10", "messages"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": "x" * 11}]}, "11 characters of text", "messages"),
        ({"stop": "x" * 6}, "stop has 6 characters; at most 5 are allowed (DYN_HTTP_MAX_STOP_CHARS)", "stop"),
        ({"stop": ["a", "x" * 6]}, "stop[1] has 6 characters; at most 5", "stop[1]"),
        ({"tools": [tool()] * 2}, "tools has 2 entries; at most 1", "tools"),
        ({"tools": [tool("x" * 6)]}, "tools[0].function.description has 6 characters; at most 5", "tools[0].function.description"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids has 3 entries; at most 2", "stop_token_ids"),
        ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids has 3 entries; at most 2", "allowed_token_ids"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias has 3 entries; at most 2", "logit_bias"),
        ({"nvext": {"token_data": [1] * 5}}, "nvext.token_data has 5 entries; at most 4", "nvext.token_data"),
        ({"nvext": {"annotations": ["a"] * 3}}, "nvext.annotations has 3 entries; at most 2", "nvext.annotations"),
    ],
)  # fmt: skip
def test_chat_beyond_a_bound_is_refused_by_name(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_chat(msgspec.json.encode({"model": "m", "messages": [USER], **fields}))
    assert message in str(refused.value)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("x" * 11, "prompt has 11 characters; at most 10 are allowed (DYN_HTTP_TEXT_LIMIT_MB)"),
        (["x" * 6, "x" * 5], "prompt has 11 characters; at most 10"),
        ([1] * 5, "prompt has 5 entries; at most 4 are allowed (DYN_HTTP_MAX_PROMPT_TOKENS)"),
        ([[1] * 3, [1] * 2], "prompt has 5 token ids; at most 4"),
    ],
)
def test_completion_beyond_a_bound_is_refused_by_name(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_completion(msgspec.json.encode({"model": "m", "prompt": prompt}))
    assert message in str(refused.value)
    assert refused.value.param == "prompt"


def test_requests_within_bounds_are_accepted() -> None:
    decode_chat(msgspec.json.encode({"model": "m", "messages": [USER, parts(3), USER], "stop": ["x" * 5]}))
    for prompt in ("x" * 10, [1] * 4, [[1] * 2, [1] * 2]):
        decode_completion(msgspec.json.encode({"model": "m", "prompt": prompt}))


def test_request_bounds_are_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in zip(openai_ranges.BOUNDS_VARIABLES, ("1", "2", "3", "4"), strict=True):
        monkeypatch.setenv(variable, value)
    assert RequestBounds.from_environment() == RequestBounds(1, 2, 3 << 20, 4)
    monkeypatch.setenv(openai_ranges.MESSAGES_VARIABLE, "0")
    with pytest.raises(ConfigError, match="DYN_HTTP_MAX_MESSAGES=0: must be at least 1"):
        RequestBounds.from_environment()
