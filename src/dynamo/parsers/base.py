"""Events that parsers find in a model's text, and the interface of a parser.

    text so far            events
    "Let me look. <tool"   Content("Let me look. ")
    "_call>{"name": "f"    CallBegin(0, "f")
    ", "arguments": {"a"   CallArguments(0, '{"a"')
    ": 1}}</tool_call>"    CallArguments(0, ": 1}")

A parser is fed text in pieces of any size and returns the events that are certain; text that may still turn out to be a
marker is held back until that is decided. Laws, checked for every family by tests/contract/test_parsers.py:

- **Chunk boundaries do not matter.** The joined events are the same for every division of the same text.
- **No marker text in content or reasoning**, and no text lost that is not part of a marker or a call.
- **No exceptions**, on any text; a call that does not parse is handled by the family's policy.
- **Time is linear** in the text: text is never read again from its start.
- The `arguments` of a call are one JSON object once joined; a call that was cut off by the end of the text is closed or
  dropped as docs/parsers.md specifies, one policy for all families; it is never left half open.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct


class ContentDelta(Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallBegin(Struct, frozen=True):
    """Start of a tool call: its index in the answer, counted from 0, and the tool's complete name."""

    index: int
    name: str
    call_id: str | None = None
    """Id of the call in the text; most families write none."""


class CallArguments(Struct, frozen=True):
    """Next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | CallBegin | CallArguments


class Parser(Protocol):
    """Parser of one choice's text, read once from front to back."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain. Pieces of content and arguments are returned as soon as they are unambiguous."""

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the text. No `feed` may follow."""


class Tool(Struct, frozen=True):
    """A tool offered by the request; its schema gives the types of values for families that write none."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments' object; empty if the request has none."""
    strict: bool = False


def tools_of(given: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Return the tools of an OpenAI request, already validated."""
    return tuple(
        Tool(
            name=one["function"]["name"],
            parameters=one["function"].get("parameters") or {},
            strict=bool(one["function"].get("strict")),
        )
        for one in given or ()
    )


class ToolCallFamily(Struct, frozen=True):
    """A format of tool calls."""

    name: str
    make: Callable[[Sequence[Tool]], Parser]
    """Factory of the parser of one choice."""
    markers: tuple[str, ...]
    """Texts that begin or end parts of the format. Those that are special tokens of the tokenizer must not be skipped."""
    example: str
    """Text of the model for the call `get_weather(city="Oslo", days=2)`."""
    aliases: tuple[str, ...] = ()


class ReasoningFamily(Struct, frozen=True):
    """A format of reasoning."""

    name: str
    make: Callable[[bool], Parser]
    """Factory of the parser of one choice; its argument is whether the prompt has opened the reasoning, so that the text
    begins inside it."""
    markers: tuple[str, ...]
    starts_inside: bool
    """Whether text begins inside the reasoning if the prompt does not decide it."""
    example: str
    """Text of the model for the reasoning "two and two" and the content "Four."."""
    aliases: tuple[str, ...] = ()
    make_before_calls: Callable[[bool, Sequence[str]], Parser] | None = None
    """Factory for use before a parser of tool calls with the given markers, which receives calls unchanged as content.
    None: `make`."""
    opened_by: tuple[str, ...] = ()
    """Endings of a prompt that have opened the reasoning."""
    closed_by: tuple[str, ...] = ()
    """Endings of a prompt after which no reasoning follows."""


class Chain:
    """Two parsers in sequence: the content found by the first is the text of the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        return self._through(self._first.feed(text))

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        return self._through(self._first.finish()) + self._second.finish()

    def _through(self, events: Sequence[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                found += self._second.feed(event.text)
            else:
                found.append(event)
        return found
