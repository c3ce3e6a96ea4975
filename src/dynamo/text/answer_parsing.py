"""Reading: what a parser finds in one choice's text, kept until the answer takes it.

Plain choices have none: their text goes from a table to the client without being looked at. A choice is read where the
model writes thoughts or tool calls, and where the answer's format has no fixed chunk.
"""

import random
import uuid
from collections.abc import Sequence
from dataclasses import replace

from dynamo.parsers.base import CallArguments, CallBegin, Content, Event, Parser, Reasoning


class ThoughtsFirst:
    """A parser of thoughts, and behind it one of calls; it knows whether the newest text was thought."""

    def __init__(self, thoughts: Parser, calls: Parser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self.is_thought = False

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        return self._pass(self._thoughts.feed(text))

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        found = self._pass(self._thoughts.finish())
        return found if self._calls is None else [*found, *self._calls.finish()]

    def _pass(self, events: list[Event]) -> list[Event]:
        if events:
            self.is_thought = any(isinstance(event, Reasoning) for event in events)
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content):
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
        """Without a parser all text is content. Calls after the last of `calls_max` are not told."""
        self._parser = parser
        self._order = parser if isinstance(parser, ThoughtsFirst) else None
        self._calls_max = calls_max
        self.events: list[Event] = []
        """What was found and not taken yet. Every call has an id."""
        self.calls = 0
        """Tool calls so far."""
        self.fresh_tokens = 0
        """Tokens since the answer took the events."""
        self.reasoning_tokens = 0
        """Tokens that were thoughts, or closed them; as upstream counts, without those that opened them."""
        self._is_thought = False
        """Whether the newest event was a thought, where one parser finds everything."""

    def feed(self, text: str) -> bool:
        """The text that one token made certain, which may be none; whether something was found."""
        self.fresh_tokens += 1
        found = False
        if text:
            found = self._add([Content(text)] if self._parser is None else self._parser.feed(text))
        self.reasoning_tokens += self._is_thought if self._order is None else self._order.is_thought
        return found

    def close(self, text: str) -> bool:
        """The last text, of no token of its own; whether something was found."""
        if self._parser is None:
            return bool(text) and self._add([Content(text)])
        found = self._parser.feed(text) if text else []
        return self._add([*found, *self._parser.finish()])

    def take(self) -> list[Event]:
        """The events since the last call; neighbours of one kind are one."""
        events, self.events = joined(self.events), []
        self.fresh_tokens = 0
        return events

    def _add(self, events: Sequence[Event]) -> bool:
        before = len(self.events)
        for event in events:
            if not isinstance(event, CallBegin):
                if not isinstance(event, CallArguments) or self._is_told(event.index):
                    self.events.append(event)
            elif self._is_told(event.index):
                self.calls += 1
                self.events.append(event if event.call_id else replace(event, call_id=new_call_id()))
        if events:
            self._is_thought = any(isinstance(event, Reasoning) for event in events)
        return len(self.events) > before

    def _is_told(self, index: int) -> bool:
        return self._calls_max is None or index < self._calls_max


def new_call_id() -> str:
    """The id of a tool call to which the model gave none."""
    return f"call-{uuid.UUID(int=random.getrandbits(128), version=4)}"


def joined(events: Sequence[Event]) -> list[Event]:
    """The same events with neighbours of one kind made one: text of one kind, arguments of one call."""
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
    """The last event is over: it gets the text of all its parts."""
    last = whole[-1] if whole else None
    if len(parts) > 1 and not isinstance(last, CallBegin | None):
        whole[-1] = replace(last, text="".join(parts))
    parts.clear()
