"""Who decides whether a model thinks, and what its template is told."""

from typing import Any

import pytest

from dynamo.core.codec import json_encode
from dynamo.model_card.thinking import template_arguments, thinking_mode
from dynamo.protocols.openai import ChatCompletionRequest, decode_chat

ON = {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}
OFF = {"thinking": False, "enable_thinking": False, "thinking_mode": "disabled"}


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
