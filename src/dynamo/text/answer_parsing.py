"""Reading: the events that a parser finds in one choice's text, buffered until the answer takes them.

Plain choices have none: their text is copied from a token table to the client without being parsed. A choice is parsed
if the model writes reasoning or tool calls, or if the answer's format has no fixed chunk.
"""

import random
import uuid
from collections.abc import Sequence

from msgspec.structs import replace

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, Parser, ReasoningDelta


class ThoughtsFirst:
    """A reasoning parser followed by a tool call parser; records whether the newest text was reasoning."""

    def __init__(self, thoughts: Parser, calls: Parser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self.is_thought = False

    def feed(self, text: str) -> list[Event]:
        """Process more text; see `Parser.feed`."""
        return self._pass(self._thoughts.feed(text))

    def finish(self) -> list[Event]:
        """Process the end of the text; see `Parser.finish`."""
        found = self._pass(self._thoughts.finish())
        return found if self._calls is None else [*found, *self._calls.finish()]

    def _pass(self, events: list[Event]) -> list[Event]:
        if events:
            self.is_thought = any(isinstance(event, ReasoningDelta) for event in events)
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                found += self._calls.feed(event.text)
            else:
                found.append(event)
        return found


class Reading:
    """One choice's text as events."""

    __slots__ = (
        "_calls_max", "_is_thought", "_order", "_parser", "calls", "events", "fresh_tokens", "reasoning_tokens",
    )  # fmt: skip

    def __init__(self, parser: Parser | None, calls_max: int | None = None) -> None:
        """Without a parser all text is content. Calls beyond `calls_max` are dropped."""
        self._parser = parser
        self._order = parser if isinstance(parser, ThoughtsFirst) else None
        self._calls_max = calls_max
        self.events: list[Event] = []
        """Events found and not yet taken. Every call has an id."""
        self.calls = 0
        """Number of tool calls so far."""
        self.fresh_tokens = 0
        """Number of tokens since the answer last took the events."""
        self.reasoning_tokens = 0
        """Number of tokens of reasoning and its closing marker; as upstream counts, without the opening marker."""
        self._is_thought = False
        """Whether the newest event was reasoning, if one parser finds everything."""

    def feed(self, text: str) -> bool:
        """Process the text that one token completed, possibly empty; return whether an event was found."""
        self.fresh_tokens += 1
        found = False
        if text:
            found = self._add([ContentDelta(text)] if self._parser is None else self._parser.feed(text))
        self.reasoning_tokens += self._is_thought if self._order is None else self._order.is_thought
        return found

    def close(self, text: str) -> bool:
        """Process the last text, which belongs to no token; return whether an event was found."""
        if self._parser is None:
            return bool(text) and self._add([ContentDelta(text)])
        found = self._parser.feed(text) if text else []
        return self._add([*found, *self._parser.finish()])

    def take(self) -> list[Event]:
        """Return the events since the last call; adjacent events of one kind are merged."""
        events, self.events = joined(self.events), []
        self.fresh_tokens = 0
        return events

    def _add(self, events: Sequence[Event]) -> bool:
        before = len(self.events)
        for event in events:
            if not isinstance(event, CallBegin):
                if not isinstance(event, CallArguments) or self._is_reported(event.index):
                    self.events.append(event)
            elif self._is_reported(event.index):
                self.calls += 1
                self.events.append(event if event.call_id else replace(event, call_id=new_call_id()))
        if events:
            self._is_thought = any(isinstance(event, ReasoningDelta) for event in events)
        return len(self.events) > before

    def _is_reported(self, index: int) -> bool:
        return self._calls_max is None or index < self._calls_max


def new_call_id() -> str:
    """Return a new id for a tool call to which the model gave none."""
    return f"call-{uuid.UUID(int=random.getrandbits(128), version=4)}"


def joined(events: Sequence[Event]) -> list[Event]:
    """Merge adjacent events of one kind: text of one kind, arguments of one call."""
    whole: list[Event] = []
    parts: list[str] = []
    for event in events:
        if isinstance(event, CallBegin):
            _close(whole, parts)
            whole.append(event)
        elif whole and _continues(whole[-1], event):
            parts.append(event.text)
        else:
            _close(whole, parts)
            whole.append(event)
            parts.append(event.text)
    _close(whole, parts)
    return whole


def _continues(before: Event, event: Event) -> bool:
    if isinstance(event, CallArguments):
        return isinstance(before, CallArguments) and before.index == event.index
    return before.__class__ is event.__class__


def _close(whole: list[Event], parts: list[str]) -> None:
    """Replace the last event by one with the text of all its parts."""
    last = whole[-1] if whole else None
    if len(parts) > 1 and not isinstance(last, CallBegin | None):
        whole[-1] = replace(last, text="".join(parts))
    parts.clear()
