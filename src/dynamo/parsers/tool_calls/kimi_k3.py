"""Kimi K3: channels, calls and arguments between tags of three tokens each (XTML), every argument with its type.

    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>

A call may contain its arguments as one object instead, tagged `json`. The tags of other channels are dropped, the text in
them is content. Attributes are unescaped, values are not.
"""

import html
from collections.abc import Sequence

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.arguments import Arguments, read_parameter
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Reading, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import ANYTHING, STRING, json_types
from dynamo.parsers.tool_calls.tagged_calls import ATTRIBUTE, HEADER_CHARS_MAX
from dynamo.parsers.tool_calls.values import object_value

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)

_VALUE_ENDS = landmarks(CLOSE, OPEN, END)


class KimiK3CallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, MARKERS)

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        tag, _ = yield from self.tag(mark)
        if mark != OPEN or tag != "tools":
            return
        while mark := (yield from self.reader.until(self.marks, ignore)):
            tag, attributes = yield from self.tag(mark)
            if mark == OPEN and tag == "call" and attributes.get("tool"):
                yield from self.call(attributes["tool"])
            elif mark == END or (mark == CLOSE and tag in ("tools", "message")):
                break
        self.cut()
        yield from self.separate()

    def tag(self, mark: str) -> Reading[tuple[str, dict[str, str]]]:
        """Return the name and the attributes of the tag that a marker begins; an empty name if it begins none."""
        if mark not in (OPEN, CLOSE):
            return "", {}
        parts: list[str] = []
        end = yield from self.reader.until(self.marks, parts.append)
        if end != SEP:
            self.reader.back(end)
        header = "".join(parts).strip()
        if end != SEP or len(header) > HEADER_CHARS_MAX:
            return "", {}
        name, _, rest = header.partition(" ")
        found = {match[1]: match[2] or match[3] or match[4] or "" for match in ATTRIBUTE.finditer(rest)}
        return name, {key: html.unescape(value) for key, value in found.items()}

    def call(self, name: str) -> Reading[None]:
        """Read a call after its opening tag, up to and including its closing one."""
        self.begin(name)
        arguments = Arguments(self.argue)
        while mark := (yield from self.reader.until(self.marks, ignore)):
            tag, attributes = yield from self.tag(mark)
            if mark == OPEN and tag == "argument" and attributes.get("key"):
                yield from self.argument(name, attributes, arguments)
            elif mark == OPEN and tag == "json" and arguments.is_empty:
                yield from object_value(self.values, self.argue)
                yield from self.drop()
                arguments = Arguments(ignore)
            elif mark == END or (mark == CLOSE and tag in ("call", "tools", "message")):
                break
        arguments.close()

    def argument(self, tool: str, attributes: dict[str, str], arguments: Arguments) -> Reading[None]:
        """Read an argument after its opening tag; its closing tag is not consumed."""
        given = attributes.get("type", "")
        types = (
            STRING
            if given and json_types(given) == STRING
            else json_types(given) | ANYTHING
            if given
            else self.schemas.types(tool, attributes["key"])
        )
        parameter = arguments.parameter(attributes["key"], frozenset(types) or ANYTHING)
        self.reader.back((yield from read_parameter(self.reader, parameter, _VALUE_ENDS)))


EXAMPLE = (
    f'{OPEN}tools{SEP}{OPEN}call tool="get_weather" index="1"{SEP}'
    f'{OPEN}argument key="city" type="string"{SEP}Oslo{CLOSE}argument{SEP}'
    f'{OPEN}argument key="days" type="number"{SEP}2{CLOSE}argument{SEP}'
    f"{CLOSE}call{SEP}{CLOSE}tools{SEP}"
)

FAMILIES = (
    ToolCallFamily(name="kimi_k3", make=KimiK3CallParser, markers=MARKERS, example=EXAMPLE, aliases=("kimi-k3",)),
)
