"""Pythonic: a list of calls in Python syntax.

    [get_weather(city="Oslo", days=2), now()]

There is no marker, so text is a list of calls only if it begins with the name of a tool that the request offers, called
with keywords.
"""

import re
from collections.abc import Sequence

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.arguments import Arguments
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Reading, ignore, landmarks

START, END = "<|python_start|>", "<|python_end|>"
LIST = "["

_NAME = re.compile(r"[\w.\-]*")
_END = landmarks("]", START, END)


class PythonicCallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, (START, END), (LIST,))

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        if mark != LIST:
            return
        tape = [LIST]
        name, key = yield from self.head(tape)
        if not self.schemas.has(name):
            self.unstop(tape)
            return
        while name:
            self.begin(name)
            whole = yield from self.call(key)
            name = ""
            if whole and (yield from self.comma()):
                name, key = yield from self.head([])
        end = yield from self.reader.until(_END, ignore)
        if end != "]":
            self.reader.back(end)
        yield from self.separate()

    def head(self, tape: list[str]) -> Reading[tuple[str, str]]:
        """Read a call's name and its first keyword, if any; the name is empty if this is no call. Record the text on `tape`."""
        reader = self.reader
        tape.append((yield from reader.space()))
        name = yield from reader.word(_NAME)
        tape.append(name)
        if not name or (yield from reader.peek()) != "(":
            return "", ""
        reader.skip()
        tape.append("(")
        tape.append((yield from reader.space()))
        if (yield from reader.peek()) == ")":
            return name, ""
        key = yield from reader.word(_NAME)
        tape.append(key)
        tape.append((yield from reader.space()))
        return (name, key) if key and (yield from reader.peek()) == "=" else ("", "")

    def call(self, key: str) -> Reading[bool]:
        """Read the arguments of a call, whose first keyword was read; return whether they were complete."""
        reader = self.reader
        arguments = Arguments(self.argue)
        whole = True
        while whole and key:
            reader.skip()
            whole = yield from self.values.value(arguments.value(key))
            key = ""
            if whole and (yield from self.comma()):
                key = yield from reader.word(_NAME)
                yield from reader.space()
                whole = not key or (yield from reader.peek()) == "="
        yield from reader.space()
        whole = whole and (yield from reader.peek()) == ")"
        reader.skip(int(whole))
        arguments.close()
        return whole

    def comma(self) -> Reading[bool]:
        """Read a comma and the white space around it; return whether there was one."""
        yield from self.reader.space()
        if (yield from self.reader.peek()) != ",":
            return False
        self.reader.skip()
        yield from self.reader.space()
        return True


FAMILIES = (
    ToolCallFamily(
        name="pythonic",
        make=PythonicCallParser,
        markers=(START, END),
        example='[get_weather(city="Oslo", days=2)]',
    ),
)
