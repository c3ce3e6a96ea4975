"""Thinking: whether a model is to think before it answers, as its chat template is told (serving-plane.md §1.8).

A request may say so in four ways. `thinking` wins, then the template's own arguments, then `reasoning_effort`, then
what the worker was started with (`--dyn-default-thinking-mode`). All of them become the three names templates know.
"""

from collections.abc import Mapping
from typing import Any

from dynamo.protocols.openai import ChatCompletionRequest

ENABLED, DISABLED, ADAPTIVE = "enabled", "disabled", "adaptive"
DEFAULT_MODE_KEY = "default_thinking_mode"
"""Where a card's `runtime_data` says what the worker was started with."""

NO_EFFORT = "none"  # The `reasoning_effort` that asks for no reasoning at all.

_SWITCHES = ("thinking", "enable_thinking")


def template_arguments(request: ChatCompletionRequest, default_mode: str | None = None) -> dict[str, Any] | None:
    """What the request hands to the chat template, None for nothing."""
    given = request.chat_template_args if request.chat_template_args is not None else request.chat_template_kwargs
    mode = thinking_mode(request)
    if mode is None and not _is_controlled(given):
        mode = default_mode
    if mode is None and request.reasoning_effort is None:
        return given
    arguments: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
    if request.thinking is not None:
        return arguments | (given or {}) | _arguments_of(mode)
    return arguments | _arguments_of(mode) | (given or {})


def thinking_mode(request: ChatCompletionRequest) -> str | None:
    """What the request says of it, None where it says nothing."""
    thinking = request.thinking
    if thinking is not None:
        return _switched(thinking) if isinstance(thinking, bool) else str(thinking.get("type"))
    given = request.chat_template_args if request.chat_template_args is not None else request.chat_template_kwargs
    for name in _SWITCHES:
        value = (given or {}).get(name)
        if isinstance(value, bool):
            return _switched(value)
    mode = (given or {}).get("thinking_mode")
    if mode in (ENABLED, DISABLED, ADAPTIVE):
        return str(mode)
    effort = (given or {}).get("reasoning_effort") or request.reasoning_effort
    return None if effort is None else _switched(effort != NO_EFFORT)


def _switched(is_on: bool) -> str:
    return ENABLED if is_on else DISABLED


def _arguments_of(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    if mode == ADAPTIVE:
        return {"thinking_mode": ADAPTIVE}
    return {**dict.fromkeys(_SWITCHES, mode == ENABLED), "thinking_mode": mode}


def _is_controlled(given: Mapping[str, Any] | None) -> bool:
    return given is not None and any(name in given for name in (*_SWITCHES, "thinking_mode", "reasoning_effort"))
