"""Helpers of tool call tests: a family, a text, and its parse for any chunking."""

import json
from typing import Any

from tests.unit.parsers.reading import outcome

from dynamo.parsers.base import Tool
from dynamo.parsers.registry import TOOL_CALLS

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "sunny": {"type": "boolean"},
    "note": {"type": ["string", "null"]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
}
TOOLS = (Tool("get_weather", {"type": "object", "properties": PROPERTIES}), Tool("now", {}))

Found = tuple[str, list[tuple[str, Any]]]


def found(name: str, text: str) -> Found:
    """The content and the calls of a text."""
    whole, by_character = outcome(lambda: TOOL_CALLS[name].make(TOOLS), text)
    assert whole == by_character
    return whole.content, [(called, json.loads(arguments)) for called, arguments in whole.calls]


def weather(**arguments: Any) -> tuple[str, Any]:
    """A call of it."""
    return "get_weather", arguments


NOW: tuple[str, Any] = ("now", {})
