"""Calls: common base and policies of the parsers of all formats of tool calls. Pure.

Malformed text is handled in the same way in all formats:

- A call is announced when its name is complete and its arguments begin; one that breaks off before that is dropped.
- Announced calls are never taken back. Arguments that break off, or violate the format, are completed to a JSON object
  from the part that could be read.
- Other text between the markers of a call is dropped. Dropped text is never content, and of a misplaced marker only the
  marker itself is dropped.
- White space between two calls, and after the last one, is part of the format; all other text is content, unchanged.
- In formats that write calls without a marker, text is a call only if it names a tool that the request offers. After
  a marker any name is passed on: the client decides which tools it supports.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, Tool
from dynamo.parsers.markers import Output
from dynamo.parsers.tool_calls.reader import Reader, Reading, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import Schemas
from dynamo.parsers.tool_calls.values import Values


class CallParser(ABC):
    """Parser of one choice. `marked` of each format reads the text after its markers."""

    def __init__(self, tools: Sequence[Tool], markers: Sequence[str], stops: Sequence[str] = ()) -> None:
        """`stops` are searched in content like the markers, but are content unless they begin a call."""
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
        """Whether the next text is content unless a landmark begins in it."""

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        if self._is_content and not self.reader.kept_chars and self._stops.first(text) is None:
            self.content(text)  # The common case: no landmark can begin in the text.
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
        """Read the whole text: content, and the calls begun by markers."""
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
        """Read the text after a marker."""

    def content(self, text: str) -> None:
        """Emit content."""
        self._output.emit(ContentDelta, text)

    def unstop(self, tape: Sequence[str]) -> None:
        """Turn a stop that begins no call into content, and read the text after it again."""
        self.content(tape[0])
        self.reader.restore("".join(tape[1:]))

    def cut(self) -> None:
        """Record that a marker or a call was removed from the content."""
        self._output.cut()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        self.cut()
        self._index += 1
        self._output.add(CallBegin(self._index, name, call_id))

    def argue(self, text: str) -> None:
        """Emit more of its arguments."""
        if text:
            self._output.add(CallArguments(self._index, text))

    def drop(self) -> Reading[str]:
        """Drop everything up to the next marker, and return that; the marker is not consumed."""
        mark = yield from self.reader.until(self.marks, ignore)
        self.reader.back(mark)
        return mark

    def separate(self, *strays: str) -> Reading[None]:
        """Read white space after a call: content only if other content follows. Stray markers are dropped."""
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
    """Return the events with adjacent pieces of one call's arguments joined."""
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
