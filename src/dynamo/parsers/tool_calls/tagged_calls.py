"""Tagged calls: formats that write a call as one tag and each of its parameters as another.

    <tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>
    <minimax:tool_call><invoke name="get_weather"><parameter name="city">Oslo</parameter></invoke></minimax:tool_call>

A value ends at the first tag that ends it: the formats cannot express such a tag inside a value. Nothing is unescaped,
because models write `&lt;` literally. A call without the block around it is accepted too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.arguments import Arguments, Parameter
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.json_calls import BARE, EXAMPLE, HERMES, JsonCallParser
from dynamo.parsers.tool_calls.reader import Reading, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import ANYTHING, STRING
from dynamo.parsers.tool_calls.values import object_value

HEADER_CHARS_MAX = 512  # Longer than any tag.

ATTRIBUTE = re.compile(r"""([\w:-]+) ?= ?(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Tags of a format. Openers exclude the text after the name."""

    blocks: tuple[tuple[str, str], ...]
    """Openers and closers of blocks of calls."""
    call: tuple[str, str]
    parameter: tuple[str, str]
    named: Callable[[str], tuple[str, str]]
    """Function from the rest of a tag to the name, and the tag's string attribute: `true`, `false` or empty."""
    ends: tuple[str, ...]
    """Texts that end a value, in addition to its own closer."""
    is_framed: bool = False
    """Whether a value is on lines of its own."""
    unknown: frozenset[str] = STRING
    """Types of a parameter that the tool's schema does not list."""
    is_json: bool = False
    """Whether a call may contain a JSON object instead of parameters, and a block such an object with the name in it."""
    strays: tuple[str, ...] = ()
    """Closers that are dropped after a call, though elsewhere they may be content."""
    others: tuple[str, ...] = ()
    """Further markers, which are dropped."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that are never content."""
        return tuple(dict.fromkeys([*(tag for block in self.blocks for tag in block), self.call[0], *self.others]))


class Tags:
    """Reader of calls of such a format for a parser."""

    def __init__(self, host: CallParser, form: TagFormat) -> None:
        self.host = host
        self.form = form
        self._closers = tuple(closer for _, closer in form.blocks)
        bounds = (*(tag for block in form.blocks for tag in block), form.call[0])
        self._in_block = landmarks(*bounds)
        self._in_call = landmarks(*bounds, form.call[1], form.parameter[0])
        self._openers = tuple(opener for opener, _ in form.blocks)
        self._value_ends = landmarks(
            form.parameter[1], *form.ends, form.call[1], form.parameter[0], form.call[0], *self._openers
        )

    def block(self) -> Reading[None]:
        """Read calls up to the end of their block."""
        reader = self.host.reader
        while (mark := (yield from reader.until(self._in_block, ignore))) and mark not in self._closers:
            if mark == self.form.call[0]:
                yield from self.call()
        self.host.cut()
        yield from self.host.separate(*self.form.strays)

    def bare(self) -> Reading[None]:
        """Read a call without a block around it."""
        yield from self.call()
        yield from self.host.separate(*self.form.strays)

    def call(self) -> Reading[None]:
        """Read a call after the opening of its tag."""
        host, reader = self.host, self.host.reader
        header, is_tag = yield from self._header()
        name = self._named(header)[0] if is_tag else ""
        if not name:
            if is_tag:  # A call without a name is dropped with its parameters.
                mark = yield from self._parameters("", Arguments(ignore))
                reader.back(mark if mark != self.form.call[1] else "")
            return
        host.begin(name)
        yield from reader.space()
        if self.form.is_json and (yield from reader.peek()) == "{":
            yield from object_value(host.values, host.argue)
            mark = yield from reader.until(self._in_call, ignore)
        else:
            arguments = Arguments(host.argue)
            mark = yield from self._parameters(name, arguments)
            arguments.close()
        if mark != self.form.call[1]:
            reader.back(mark)

    def _parameters(self, tool: str, arguments: Arguments) -> Reading[str]:
        """Read the parameters of a call; return the text that ended it."""
        reader, form = self.host.reader, self.form
        while (mark := (yield from reader.until(self._in_call, ignore))) == form.parameter[0]:
            header, is_tag = yield from self._header()
            key, is_string = self._named(header) if is_tag else ("", "")
            if not key:
                continue
            types = self.host.schemas.types(tool, key)
            if is_string:
                types = STRING if is_string == "true" else types | ANYTHING
            yield from self._value(arguments.parameter(key, types or form.unknown, is_framed=form.is_framed), tool)
        return mark

    def _value(self, parameter: Parameter, tool: str) -> Reading[None]:
        """Read the text of a parameter up to its closer, or, if that is missing, up to the next tag."""
        reader, form = self.host.reader, self.form
        while end := (yield from reader.until(self._value_ends, parameter.piece)):
            if end == form.parameter[1]:
                break
            tape = [end]
            is_end = end in form.ends or (yield from self._is_tag(end, tool, tape))
            reader.restore("".join(tape if is_end else tape[1:]))
            if is_end:
                break
            parameter.piece(end)
        parameter.end(is_whole=bool(end))

    def _is_tag(self, opening: str, tool: str, tape: list[str]) -> Reading[bool]:
        """Return whether an opening in a value is a tag of the format, not text. Record the text read on `tape`.

        It is a tag if it begins a parameter that the tool has, or a call to an offered tool; the closer of a call is one
        if another call, the end of the block or the end of the text follows.
        """
        reader, form, schemas = self.host.reader, self.form, self.host.schemas
        if opening == form.parameter[0]:
            return schemas.has_parameter(tool, self._named((yield from self._taped_header(tape)))[0])
        if opening != form.call[0]:
            tape.append((yield from reader.space()))
            following = yield from reader.at_any(self._in_block)
            if opening == form.call[1]:
                return bool(following) or not (yield from reader.peek())
            if following != form.call[0]:
                return False
            reader.skip(len(following))
            tape.append(following)
        return schemas.has(self._named((yield from self._taped_header(tape)))[0])

    def _taped_header(self, tape: list[str]) -> Reading[str]:
        """Read the rest of a tag and record it; return it without its end, or an empty string if it is no tag."""
        header, is_tag = yield from self._header()
        tape += (header, ">" if is_tag else "")
        return header if is_tag else ""

    def _header(self) -> Reading[tuple[str, bool]]:
        """Read the rest of a tag; return it and whether it is one."""
        parts: list[str] = []
        end = yield from self.host.reader.until(_TAG_ENDS, parts.append)
        if end != ">":
            self.host.reader.back(end)
        return "".join(parts), end == ">"

    def _named(self, header: str) -> tuple[str, str]:
        """Return the name in the rest of a tag, as `TagFormat.named` does; an empty name if it is too long."""
        return self.form.named(header) if len(header) <= HEADER_CHARS_MAX else ("", "")


class TagCallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool], form: TagFormat, stops: Sequence[str] = ()) -> None:
        super().__init__(tools, form.markers, stops)
        self._tags = Tags(self, form)
        self._openers = tuple(opener for opener, _ in form.blocks)
        self._call = form.call[0]

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        if mark in self._openers:
            yield from self._tags.block()
        elif mark == self._call:
            yield from self._tags.bare()


_TAG_ENDS = landmarks(">", "<", "\n")


def plain(header: str) -> tuple[str, str]:
    """Return the name of `<function=get_weather>`, with or without quotes."""
    return header.strip().strip("\"'"), ""


def attributes(header: str) -> tuple[str, str]:
    """Return the name of `<invoke name="get_weather">`, whose header begins after `name=`."""
    found = {match[1]: match[2] or match[3] or match[4] or "" for match in ATTRIBUTE.finditer("name=" + header)}
    return found.get("name", "").strip(), found.get("string", "")


QWEN = TagFormat(
    blocks=(("<tool_call>", "</tool_call>"),),
    call=("<function=", "</function>"),
    parameter=("<parameter=", "</parameter>"),
    named=plain,
    ends=("</function>", "</tool_call>"),
    is_framed=True,
    strays=("</parameter>", "</function>"),
)
MINIMAX = TagFormat(
    blocks=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    call=("<invoke name=", "</invoke>"),
    parameter=("<parameter name=", "</parameter>"),
    named=attributes,
    ends=("</minimax:tool_call>",),
    strays=("</parameter>", "</invoke>"),
)
MUSE_HEADER = ("<|start|>", "<|message|>")
MUSE_ENDS = ("<|eom|>", "<|eot|>")
MUSE = TagFormat(
    blocks=(("<atem:function_calls>", "</atem:function_calls>"),),
    call=("<atem:invoke name=", "</atem:invoke>"),
    parameter=("<atem:parameter name=", "</atem:parameter>"),
    named=attributes,
    ends=("</atem:invoke>", "</atem:function_calls>"),
    unknown=ANYTHING,
    others=("</atem:invoke>", "<atem:parameter name=", "</atem:parameter>", *MUSE_HEADER, *MUSE_ENDS),
)


def dsml(block: str, between: str = "") -> TagFormat:
    """Return DeepSeek's format. Version 4.1 writes a space in every tag except its separator."""
    start, end = f"<｜DSML｜{between}", f"</｜DSML｜{between}"
    return TagFormat(
        blocks=((f"{start}{block}>", f"{end}{block}>"),),
        call=(f"{start}invoke name=", f"{end}invoke>"),
        parameter=(f"{start}parameter name=", f"{end}parameter>"),
        named=attributes,
        ends=(f"{end}invoke>", f"{end}{block}>"),
        unknown=ANYTHING,
        is_json=True,
        others=(f"{end}invoke>", f"{start}parameter name=", f"{end}parameter>"),
    )


class QwenCallParser(JsonCallParser):
    """Parser of one choice of Qwen 3: tags, as in Coder and 3.5, or objects as in Hermes, as in the first version."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, HERMES, (QWEN.call[0],))
        self._tags = Tags(self, QWEN)

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        if mark == QWEN.call[0]:
            yield from self._tags.bare()
        else:
            yield from super().marked(mark)

    def block(self, opener: str) -> Reading[None]:
        """See `JsonCallParser.block`."""
        yield from self.reader.space()
        if (yield from self.reader.peek()) in BARE:
            yield from super().block(opener)
        else:
            yield from self._tags.block()


class MuseCallParser(TagCallParser):
    """Parser of one choice of Muse: messages with recipients, the first one without its beginning."""

    def __init__(self, tools: Sequence[Tool], form: TagFormat) -> None:
        super().__init__(tools, form, (RECIPIENT,))

    def read(self) -> Reading[None]:
        """See `CallParser.read`."""
        space = yield from self.reader.space()
        if not (yield from self.reader.at_any(landmarks(RECIPIENT))):
            self.content(space)
        yield from super().read()

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`. The model sometimes begins the next message without ending the last one."""
        if mark == RECIPIENT:
            tape = [mark, (yield from self.reader.word(_RECIPIENT_NAME)), (yield from self.reader.space())]
            if (yield from self.reader.at_any(self.marks)) != MUSE_HEADER[1]:
                self.content("".join(tape))
        elif mark == MUSE_HEADER[0]:
            yield from self.drop()
        else:
            yield from super().marked(mark)


RECIPIENT = "to="
_RECIPIENT_NAME = re.compile(r"[^\s<]*")


def family(name: str, form: TagFormat, example: str, aliases: tuple[str, ...] = ()) -> ToolCallFamily:
    """Return a family of this kind."""
    return ToolCallFamily(
        name=name,
        make=lambda tools: TagCallParser(tools, form),
        markers=form.markers,
        example=example,
        aliases=aliases,
    )


def example(form: TagFormat, name: str, city: str, days: str, line: str = "") -> str:
    """Return the example of a format, given its tags without their openers."""
    (opener, closer), call, parameter = form.blocks[0], form.call, form.parameter
    cities = f"{parameter[0]}{city}>{line}Oslo{line}{parameter[1]}"
    number = f"{parameter[0]}{days}>{line}2{line}{parameter[1]}"
    return "\n".join((opener, f"{call[0]}{name}>", cities, number, call[1], closer))


DSML_V3_2, DSML_V4, DSML_V4_1 = dsml("function_calls"), dsml("tool_calls"), dsml("calls", " ")
_DSML_NAMES = '"get_weather"', '"city" string="true"', '"days" string="false"'
_NAMES = '"get_weather"', '"city"', '"days"'

FAMILIES = (
    family("qwen3_coder", QWEN, example(QWEN, "get_weather", "city", "days", "\n"), aliases=("nemotron_nano",)),
    ToolCallFamily(
        name="qwen3",
        make=QwenCallParser,
        markers=QWEN.markers,
        example=f"<tool_call>\n{EXAMPLE}\n</tool_call>",
    ),
    family("minimax_m2", MINIMAX, example(MINIMAX, *_NAMES)),
    family("deepseek_v3_2", DSML_V3_2, example(DSML_V3_2, *_DSML_NAMES)),
    family("deepseek_v4", DSML_V4, example(DSML_V4, *_DSML_NAMES), aliases=("deepseek-v4", "deepseekv4")),
    family("deepseek_v41", DSML_V4_1, example(DSML_V4_1, *_DSML_NAMES)),
    ToolCallFamily(
        name="muse",
        make=lambda tools: MuseCallParser(tools, MUSE),
        markers=MUSE.markers,
        example=f"to=get_weather<|message|>{example(MUSE, *_NAMES)}<|eom|>",
        aliases=("muse_glimmer",),
    ),
)
