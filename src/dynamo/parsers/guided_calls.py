"""GuidedCalls: tool calls in an answer that was constrained to JSON because its request requires a call. Pure.

    [{"name": "get_weather", "parameters": {"city": "Oslo"}}]    `tool_choice` required: a list of calls of any tools
    {"city": "Oslo"}                                              a named tool: its arguments

The arguments are passed on as written. A call that breaks off before its arguments begin is dropped; arguments that
break off are completed to an object. An engine without guided decoding may answer in prose: text that does not begin
like calls is content.
"""

import re

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event
from dynamo.parsers.tool_calls.reader import Reader, Reading, ignore
from dynamo.parsers.tool_calls.values import Values, object_value

REST = re.compile(r".*", re.DOTALL)
ARGUMENT_KEYS = ("parameters", "arguments")


class GuidedCalls:
    """Parser of one choice; `tool` is the name of the tool if the request names one."""

    def __init__(self, tool: str | None = None) -> None:
        self._reader = Reader()
        self._values = Values(self._reader)
        self._events: list[Event] = []
        self._content: list[str] = []
        self._arguments: list[str] = []
        self._index = -1
        self._reading = self._list() if tool is None else self._named(tool)
        self._has_ended = False

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        if not text:
            return []
        self._reader.push(text)
        return self._go_on()

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        self._reader.is_over = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        if not self._has_ended:
            self._has_ended = next(self._reading, self) is not None
        self._close_arguments()
        if self._content:
            self._events.append(ContentDelta("".join(self._content)))
            self._content.clear()
        events, self._events = self._events, []
        return events

    def _named(self, tool: str) -> Reading[None]:
        space = yield from self._reader.space()
        if (yield from self._reader.peek()) != "{":
            yield from self._prose(space)
            return
        self._begin(tool)
        yield from object_value(self._values, self._arguments.append)
        yield from self._rest()

    def _list(self) -> Reading[None]:
        """Read a list of calls; a single call without a list is accepted."""
        reader = self._reader
        tape = yield from reader.space()
        is_list = (yield from reader.peek()) == "["
        if is_list:
            reader.skip()
            tape += "[" + (yield from reader.space())
        if (yield from reader.peek()) != "{":
            yield from self._prose(tape)
            return
        while (char := (yield from reader.peek())) in ("{", ","):
            reader.skip()
            if char == "{" and (not (yield from self._call()) or not is_list):
                break
            yield from reader.space()
        if char == "]":
            reader.skip()
        yield from self._rest()

    def _call(self) -> Reading[bool]:
        """Read the members of a call, and the brace after them; return whether it was complete."""
        reader, values = self._reader, self._values
        name = ""
        before: list[str] = []
        has_begun = False
        while True:
            yield from reader.space()
            char = yield from reader.peek()
            if char in ("}", ","):
                reader.skip()
                if char == ",":
                    continue
                if name and not has_begun:
                    self._begin(name)
                    self._arguments.append("{}")
                return True
            key = (yield from values.key())[1:-1]
            yield from reader.space()
            if not key or (yield from reader.peek()) != ":":
                return False
            reader.skip()
            yield from reader.space()
            if key == "name" and not name:
                parts: list[str] = []
                whole = yield from values.text(parts.append)
                name = "".join(parts)
                if whole and name and before:
                    self._begin(name)
                    self._arguments += before
                    has_begun = True
            elif key in ARGUMENT_KEYS and not has_begun and not before:
                if name:
                    self._begin(name)
                    has_begun = True
                whole = yield from object_value(values, (self._arguments if name else before).append)
            else:
                whole = yield from values.value(ignore)
            if not whole:
                return False

    def _prose(self, begun: str) -> Reading[None]:
        """Pass all text on as content."""
        if begun:
            self._content.append(begun)
        yield from self._reader.run(REST, self._content.append)
        while (yield from self._reader.peek()):
            yield from self._reader.run(REST, self._content.append)

    def _rest(self) -> Reading[None]:
        """Drop the text after the calls: it is neither a call nor content."""
        while (yield from self._reader.peek()):
            yield from self._reader.run(REST, ignore)

    def _begin(self, name: str) -> None:
        self._close_arguments()
        self._index += 1
        self._events.append(CallBegin(self._index, name))

    def _close_arguments(self) -> None:
        """Emit the arguments read so far as one event."""
        text = "".join(self._arguments)
        self._arguments.clear()
        if text:
            self._events.append(CallArguments(self._index, text))
