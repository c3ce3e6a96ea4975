"""Named calls: formats that write the tool's name between two markers, and the arguments as JSON after them.

    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo", "days": 2}<｜tool▁call▁end｜>
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>

The arguments are passed on as written.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Reading, ignore
from dynamo.parsers.tool_calls.values import object_value

ARGUMENTS = '{"city": "Oslo", "days": 2}'


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """Markers of a format."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    """Closing markers around all calls."""
    call: tuple[str, str]
    separator: str
    """Marker between the name and the arguments."""
    named: Callable[[str], tuple[str, str | None]]
    """Function from the text before the separator to the name, and the call's id if that text is one."""
    is_fenced: bool = False
    """Whether the name follows the separator, before a Markdown fence that contains the arguments."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that are never content."""
        return (*self.openers, *self.closers, *self.call, self.separator)


class NamedCallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool], form: NamedFormat) -> None:
        super().__init__(tools, form.markers)
        self.form = form

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        form = self.form
        if mark in form.openers:
            while (mark := (yield from self.reader.until(self.marks, ignore))) and mark not in form.closers:
                if mark == form.call[0]:
                    yield from self.call()
        elif mark == form.call[0]:
            yield from self.call()
        self.cut()
        yield from self.separate()

    def call(self) -> Reading[None]:
        """Read a call after its opening marker, up to and including its closing one."""
        header: list[str] = []
        mark = yield from self.reader.until(self.marks, header.append)
        if mark != self.form.separator:
            self.reader.back(mark)
            return
        name, call_id = self.form.named("".join(header))
        if self.form.is_fenced:
            name = (yield from self.reader.word(_LINE)).strip()
            if not (yield from self.reader.peek()):
                return  # The name may be incomplete.
            yield from self.reader.run(_FENCE, ignore)
        if name:
            self.begin(name, call_id)
            yield from object_value(self.values, self.argue)
        mark = yield from self.reader.until(self.marks, ignore)
        if mark != self.form.call[1]:
            self.reader.back(mark)


_LINE = re.compile(r"[^\n{`<]*")
_FENCE = re.compile(r"[^{<]*")
_KIMI = re.compile(r"(?:functions\.)?(.*?)(?::[0-9]+)?", re.DOTALL)


def plain(header: str) -> tuple[str, None]:
    """Return the name, and no id."""
    return header.strip(), None


def numbered(header: str) -> tuple[str, str | None]:
    """Return name and id of Kimi's `functions.get_weather:0`, which is also the call's id."""
    found = _KIMI.fullmatch(header.strip())
    name = found[1] if found is not None else ""
    return name, header.strip() if name and name != header.strip() else None


SECTION, SECTION_ALONE = "<|tool_calls_section_{}|>", "<|tool_call_section_{}|>"

DEEPSEEK_V3_1 = NamedFormat(
    openers=("<｜tool▁calls▁begin｜>",),
    closers=("<｜tool▁calls▁end｜>",),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    separator="<｜tool▁sep｜>",
    named=plain,
)
DEEPSEEK_V3 = NamedFormat(
    openers=DEEPSEEK_V3_1.openers,
    closers=DEEPSEEK_V3_1.closers,
    call=DEEPSEEK_V3_1.call,
    separator=DEEPSEEK_V3_1.separator,
    named=plain,
    is_fenced=True,
)
KIMI = NamedFormat(
    openers=(SECTION.format("begin"), SECTION_ALONE.format("begin")),
    closers=(SECTION.format("end"), SECTION_ALONE.format("end")),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
    named=numbered,
)


def family(name: str, form: NamedFormat, call: str, aliases: tuple[str, ...] = ()) -> ToolCallFamily:
    """Return a family of this kind; `call` is the text between the markers of a call in its example."""
    return ToolCallFamily(
        name=name,
        make=lambda tools: NamedCallParser(tools, form),
        markers=form.markers,
        example="".join((form.openers[0], form.call[0], call, form.call[1], form.closers[0])),
        aliases=aliases,
    )


FAMILIES = (
    family("deepseek_v3", DEEPSEEK_V3, f"function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"),
    family("deepseek_v3_1", DEEPSEEK_V3_1, f"get_weather<｜tool▁sep｜>{ARGUMENTS}"),
    family("kimi_k2", KIMI, f"functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}", ("kimi_k25",)),
)
