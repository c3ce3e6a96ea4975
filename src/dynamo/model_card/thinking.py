"""Thinking: decides whether a model reasons before it responds, and sets the chat template's arguments accordingly.

In descending precedence: the request's `thinking`, its template arguments, its `reasoning_effort`, and the worker's
`--dyn-default-thinking-mode`. All of them become the three arguments that templates use.
"""

from collections.abc import Mapping
from typing import Any

from dynamo.protocols.openai import ChatCompletionRequest

ENABLED, DISABLED, ADAPTIVE = "enabled", "disabled", "adaptive"
DEFAULT_MODE_KEY = "default_thinking_mode"
"""Key of the worker's default mode in a card's `runtime_data`."""

NO_EFFORT = "none"  # The `reasoning_effort` that disables reasoning.

_SWITCHES = ("thinking", "enable_thinking")


def template_arguments(request: ChatCompletionRequest, default_mode: str | None = None) -> dict[str, Any] | None:
    """Return the request's arguments for the chat template, None if there are none."""
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
    """Return the mode that the request selects, None if it selects none."""
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
