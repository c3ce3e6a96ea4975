"""GLM: the tool's name, then keys and values in turn.

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>

GLM 4.5 puts each of them on a line of its own, later versions do not; values are taken unchanged in both.
"""

from collections.abc import Sequence

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.arguments import Arguments, read_parameter
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Reading, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import STRING

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

CONTAINERS = STRING | {"object", "array"}
"""Types of a parameter that the tool's schema does not list."""

_CALL_ENDS = landmarks(CLOSE, OPEN)
_VALUE_ENDS = landmarks(VALUE_END, KEY, CLOSE, OPEN)


class GlmCallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, MARKERS)

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        if mark == OPEN:
            yield from self.call()
            yield from self.separate()

    def call(self) -> Reading[None]:
        """Read a call up to and including its closing marker."""
        parts: list[str] = []
        mark = yield from self.reader.until(self.marks, parts.append)
        name = "".join(parts).strip()
        if not name and mark == KEY:  # A call without a name is dropped with its arguments.
            mark = yield from self.reader.until(_CALL_ENDS, ignore)
        if not name or mark not in (KEY, CLOSE):
            if mark != CLOSE:
                self.reader.back(mark)
            return
        self.begin(name)
        arguments = Arguments(self.argue)
        while mark not in (CLOSE, OPEN, ""):
            mark = (yield from self.parameter(name, arguments)) if mark == KEY else (yield from self.next_mark())
        arguments.close()
        if mark == OPEN:
            self.reader.back(mark)

    def next_mark(self) -> Reading[str]:
        """Return the next marker inside a call; text between the markers is dropped."""
        return (yield from self.reader.until(self.marks, ignore))

    def parameter(self, tool: str, arguments: Arguments) -> Reading[str]:
        """Read a key after its opening marker, and its value; return the next marker."""
        parts: list[str] = []
        mark = yield from self.reader.until(self.marks, parts.append)
        key = "".join(parts).strip()
        if mark != KEY_END or not key:
            return mark
        mark = yield from self.next_mark()
        if mark != VALUE:
            return mark
        types = self.schemas.types(tool, key) or CONTAINERS
        mark = yield from read_parameter(self.reader, arguments.parameter(key, types), _VALUE_ENDS)
        return mark if mark != VALUE_END else (yield from self.next_mark())


def example(between: str) -> str:
    """Return the call of the examples, with `between` between its parts."""
    city = f"{KEY}city{KEY_END}{between}{VALUE}Oslo{VALUE_END}"
    days = f"{KEY}days{KEY_END}{between}{VALUE}2{VALUE_END}"
    return between.join((f"{OPEN}get_weather", city, days, CLOSE))


FAMILIES = (
    ToolCallFamily(name="glm45", make=GlmCallParser, markers=MARKERS, example=example("\n")),
    ToolCallFamily(name="glm47", make=GlmCallParser, markers=MARKERS, example=example("")),
)
