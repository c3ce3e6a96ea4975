"""Registry: every parser by its name, and the parser of a request.

`output_parser(tool_calls="hermes", reasoning="qwen3", tools=tools)` makes the parser of one choice.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from dynamo.core.errors import ConfigError
from dynamo.parsers import harmony
from dynamo.parsers import reasoning as thoughts
from dynamo.parsers import tool_calls as calls
from dynamo.parsers.base import Chain, Parser, ReasoningFamily, Tool, ToolCallFamily

F = TypeVar("F")


TOOL_CALLS: Mapping[str, ToolCallFamily] = {name: one for one in calls.FAMILIES for name in (one.name, *one.aliases)}
REASONING: Mapping[str, ReasoningFamily] = {name: one for one in thoughts.FAMILIES for name in (one.name, *one.aliases)}


def tool_call_family(name: str) -> ToolCallFamily:
    """Return a family of tool calls. Raise `ConfigError` with the known names."""
    return _known(TOOL_CALLS, name, "--dyn-tool-call-parser")


def reasoning_family(name: str) -> ReasoningFamily:
    """Return a family of reasoning. Raise `ConfigError` with the known names."""
    return _known(REASONING, name, "--dyn-reasoning-parser")


def tool_call_names() -> list[str]:
    """Return all names and aliases of the families of tool calls."""
    return sorted(TOOL_CALLS)


def reasoning_names() -> list[str]:
    """Return all names and aliases of the families of reasoning."""
    return sorted(REASONING)


def output_parser(
    *,
    tool_calls: str | None,
    reasoning: str | None,
    tools: Sequence[Tool],
    is_reasoning: bool | None = None,
) -> Parser | None:
    """Return the parser of one choice; None if its text is plain content.

    `tool_calls` and `reasoning` are family names. Tool calls are parsed only if the request offers tools.
    `is_reasoning`: whether the prompt has opened the reasoning; None: as is usual for the family.
    """
    first = second = None
    if tool_calls is not None and tools:
        calls_family = tool_call_family(tool_calls)
        if calls_family is harmony.TOOL_CALLS and reasoning in (None, harmony.THOUGHTS.name):
            return harmony.harmony(tools, bool(is_reasoning))  # One parser for all channels.
        second = calls_family.make(tools)
    if reasoning is not None:
        family = reasoning_family(reasoning)
        is_inside = family.starts_inside if is_reasoning is None else is_reasoning
        first = family.make(is_inside) if second is None else before_calls(family, is_inside, calls_family.markers)
    if first is not None and second is not None:
        return Chain(first, second)
    return first or second


def before_calls(family: ReasoningFamily, is_inside: bool, call_markers: Sequence[str]) -> Parser:
    """Return the reasoning parser for use before a parser of tool calls with those markers."""
    if family.make_before_calls is None:
        return family.make(is_inside)
    return family.make_before_calls(is_inside, call_markers)


def _known(table: Mapping[str, F], name: str, flag: str) -> F:
    try:
        return table[name]
    except KeyError:
        raise ConfigError(f"{flag} {name}: must be one of {', '.join(sorted(table))}") from None
