"""Calls: what the parsers of all formats of tool calls share. Pure.

What happens to text that is not as it should be is the same in all formats:

- A call is announced when its name is whole and its arguments begin; one that breaks off before that is dropped.
- What was announced is never taken back. Arguments that break off, or stop being what the format allows, are made a
  whole JSON object from what could be read of them.
- What else stands between the markers of a call is dropped. Dropped text is never content, and a marker in the wrong
  place is dropped alone.
- White space between two calls, and behind the last one, is part of the format; all other text is content as it is.
- In formats that write calls without a marker, text is a call only if it names a tool that the request offers. Behind
  a marker any name is passed on: it is the client who knows what it can do.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo.parsers.base import CallArguments, CallBegin, Content, Event, Tool
from dynamo.parsers.markers import Output
from dynamo.parsers.tool_calls.reader import Reader, Reading, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import Schemas
from dynamo.parsers.tool_calls.values import Values


class CallParser(ABC):
    """One choice. A format says in `marked` what follows each of its markers."""

    def __init__(self, tools: Sequence[Tool], markers: Sequence[str], stops: Sequence[str] = ()) -> None:
        """`stops` are looked for in content besides the markers, and are content unless they begin a call."""
        self.reader = Reader()
        self.marks = landmarks(*markers)
        self.values = Values(self.reader, self.marks)
        self.schemas = Schemas(tools)
        self._stops = landmarks(*markers, *stops) if stops else self.marks
        self._output = Output(tuple(markers))
        self._index = -1
        self._reading = self.read()
        self._has_ended = False
        self._is_content = False
        """Whether what comes next is content unless a landmark begins in it."""

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        if self._is_content and not self.reader.kept_chars and self._stops.first(text) is None:
            self.content(text)  # As most text is: no landmark can begin in it.
            return self._output.take()
        self.reader.push(text)
        self._go_on()
        return joined(self._output.take())

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        self.reader.is_over = True
        self._go_on()
        return joined(self._output.finish())

    def read(self) -> Reading[None]:
        """The whole text: content, and what its markers begin."""
        while True:
            self._is_content = True
            mark = yield from self.reader.until(self._stops, self.content)
            self._is_content = False
            if not mark:
                return
            if mark in self.marks.texts:
                self.cut()
            yield from self.marked(mark)

    @abstractmethod
    def marked(self, mark: str) -> Reading[None]:
        """What follows a marker."""

    def content(self, text: str) -> None:
        """Text for the user."""
        self._output.say(Content, text)

    def unstop(self, tape: Sequence[str]) -> None:
        """What was read from a stop on begins no call: the stop is content, and the rest is read again."""
        self.content(tape[0])
        self.reader.restore("".join(tape[1:]))

    def cut(self) -> None:
        """A marker, or a call, was taken out of the content."""
        self._output.cut()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call."""
        self.cut()
        self._index += 1
        self._output.add(CallBegin(self._index, name, call_id))

    def argue(self, text: str) -> None:
        """More of its arguments."""
        if text:
            self._output.add(CallArguments(self._index, text))

    def drop(self) -> Reading[str]:
        """Drops everything up to the next marker, and returns that; it is read again by whoever comes next."""
        mark = yield from self.reader.until(self.marks, ignore)
        self.reader.back(mark)
        return mark

    def separate(self, *strays: str) -> Reading[None]:
        """White space behind a call: content only where other content follows. Stray markers are dropped."""
        while True:
            space = yield from self.reader.space()
            stray = (yield from self.reader.at_any(landmarks(*strays))) if strays else ""
            if not stray:
                break
            self.reader.skip(len(stray))
        if (yield from self.reader.peek()) and not (yield from self.reader.at_any(self.marks)):
            self.content(space)

    def _go_on(self) -> None:
        if not self._has_ended:
            self._has_ended = next(self._reading, self) is not None


def joined(events: list[Event]) -> list[Event]:
    """Events with the pieces of one call's arguments in one."""
    if len(events) < 2:
        return events
    found: list[Event] = []
    pieces: list[str] = []
    for event in events:
        if isinstance(event, CallArguments):
            pieces.append(event.text)
            index = event.index
            continue
        if pieces:
            found.append(CallArguments(index, "".join(pieces)))
            pieces = []
        found.append(event)
    if pieces:
        found.append(CallArguments(index, "".join(pieces)))
    return found
