"""JSON calls: formats whose calls are JSON objects with the tool's name in them.

    <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>
    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]

A block contains one object, a list of them, or several in a row. The arguments are passed on as written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Landmarks, Reading, ignore, landmarks
from dynamo.parsers.tool_calls.schemas import NAME
from dynamo.parsers.tool_calls.values import NEXT_ITEM, object_value, quoted

BARE = ("{", "[")
EXAMPLE = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """Markers around the objects, and names of their keys."""

    openers: tuple[str, ...]
    """`functools[` opens a list itself."""
    closers: tuple[str, ...] = ()
    unclosed: tuple[str, ...] = ()
    """Openers without a closer: a block ends with its JSON."""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    is_bare: bool = True
    """Whether a call may also appear in the text without a marker."""


class JsonCallParser(CallParser):
    """Parser of one choice."""

    def __init__(
        self, tools: Sequence[Tool], form: JsonCallFormat, markers: Sequence[str] = (), stops: Sequence[str] = ()
    ) -> None:
        """`markers` and `stops` are those that the format has in addition to its openers and closers."""
        super().__init__(tools, (*form.openers, *form.closers, *markers), (*stops, *(BARE if form.is_bare else ())))
        self.form = form
        self._items = landmarks("{", *self.marks.texts)

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        if mark in BARE:
            yield from self.bare(mark)
        elif mark in self.form.openers:
            yield from self.block(mark)

    def block(self, opener: str) -> Reading[None]:
        """Read the text between an opener and its closer, or after an opener that has none."""
        reader = self.reader
        is_closed = opener not in self.form.unclosed
        depth = int(opener.endswith("["))
        has_call = False
        while True:
            space = yield from reader.space()
            mark = yield from reader.at_any(self.marks)
            char = yield from reader.peek()
            if mark:
                if mark in self.form.closers:
                    reader.skip(len(mark))
                    self.cut()
                break
            if char == "{":
                reader.skip()
                has_call = True
                if not (yield from self.members()):
                    yield from self.recover()
            elif char == "[" or (char in ",;" and char and (is_closed or depth or (char == ";" and has_call))):
                reader.skip()
                depth += char == "["
            elif char == "]" and (is_closed or depth):
                reader.skip()
                depth -= 1
                if not is_closed and depth <= 0:
                    break
            elif not char:
                return
            elif is_closed or depth:
                if not (yield from self.values.value(ignore)):
                    yield from self.recover()
            else:
                self.content(space)
                return
        yield from self.separate()

    def recover(self) -> Reading[bool]:
        """Read the next call to an offered tool after text that is no call; return whether there was one.

        A marker ends the search and is not consumed.
        """
        reader = self.reader
        mark = ""
        if (yield from reader.at_any(NEXT_ITEM)):
            reader.restore('"')
            mark = "{"
        while mark or (mark := (yield from reader.until(self._items, ignore))) == "{":
            mark = ""
            tape: list[str] = []
            name = yield from self._bare_name(tape)
            if not name:
                reader.restore("".join(tape))
                continue
            self.begin(name)
            whole = yield from object_value(self.values, self.argue)
            if whole and (yield from self.members(name, has_begun=True)):
                return True
        reader.back(mark)
        return False

    def members(self, name: str = "", *, has_begun: bool = False) -> Reading[bool]:
        """Read the members of a call's object, and its end; return whether it was complete."""
        reader, values = self.reader, self.values
        held: list[str] = []
        while True:
            yield from reader.space()
            char = yield from reader.peek()
            if char == ",":
                reader.skip()
                continue
            if char == "}":
                reader.skip()
                if name and not has_begun:
                    self.begin(name)
                    self.argue("{}")
                return True
            key = yield from values.key()
            yield from reader.space()
            if not key or (yield from reader.peek()) != ":":
                return False
            reader.skip()
            yield from reader.space()
            key = key[1:-1]
            if key == "name" and not name and (yield from reader.at_any(values.quotes)):
                parts: list[str] = []
                if not (yield from values.text(parts.append)):
                    return False
                name = "".join(parts)
                if held and name:
                    self.begin(name)
                    self.argue("".join(held))
                    has_begun = True
                whole = bool(name)
            elif key in self.form.argument_keys and not has_begun and not held:
                if name:
                    self.begin(name)
                    has_begun = True
                whole = yield from object_value(values, self.argue if name else held.append)
            else:
                whole = yield from values.value(ignore)
            if not whole:
                return False

    def bare(self, mark: str) -> Reading[None]:
        """Read a possible call, or list of calls, without a marker: content unless it names a tool."""
        tape = [mark]
        is_list = mark == "["
        if is_list:
            tape.append((yield from self.reader.space()))
            if (yield from self.reader.peek()) != "{":
                self.unstop(tape)
                return
            self.reader.skip()
            tape.append("{")
        name = yield from self._bare_name(tape)
        if not name:
            self.unstop(tape)
            return
        self.begin(name)
        whole = yield from object_value(self.values, self.argue)
        whole = whole and (yield from self.members(name, has_begun=True))
        while is_list and (whole or (yield from self.recover())):
            whole = True
            yield from self.reader.space()
            char = yield from self.reader.peek()
            self.reader.skip(len(char))
            if char == "]":
                break
            if char == "{":
                whole = yield from self.members()
            elif char != ",":
                self.reader.back(char)
                whole = yield from self.values.value(ignore)
        if not whole and not is_list:
            yield from self.recover()
        yield from self.separate()

    def _bare_name(self, tape: list[str]) -> Reading[str]:
        """Read up to the arguments of a call; return its name, or an empty string if this is no call."""
        name = ""
        for expected in (landmarks('"name"'), landmarks(":"), landmarks('"'), None, landmarks('"'), landmarks(","),
                         self._argument_keys(), landmarks(":"), landmarks("{")):  # fmt: skip
            if expected is None:
                name = yield from self.reader.word(NAME)
                tape.append(name)
                if not self.schemas.has(name):
                    return ""
                continue
            tape.append((yield from self.reader.space()))
            found = yield from self.reader.at_any(expected)
            if not found:
                return ""
            if found != "{":
                self.reader.skip(len(found))
                tape.append(found)
        return name

    def _argument_keys(self) -> Landmarks:
        return landmarks(*map(quoted, self.form.argument_keys))


MESSAGE, TEXT, INVOKE = "<|message_model|>", "<|content_text|>", "<|content_invoke_tool_json|>"
END, END_SAMPLING, THINKING = "<|end_message|>", "<|content_model_end_sampling|>", "<|content_thinking|>"


class InklingCallParser(JsonCallParser):
    """Parser of one choice of Inkling: a marker gives each message's kind, and a call's name precedes its marker."""

    def read(self) -> Reading[None]:
        """See `CallParser.read`. The prompt ends with the marker that begins a message."""
        yield from self.headed()
        yield from super().read()

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        yield from super().marked(mark)
        if mark == MESSAGE:
            yield from self.headed()

    def headed(self) -> Reading[None]:
        """Read the tool's name before a call, which is repeated in the call."""
        name = yield from self.reader.word(NAME)
        if (yield from self.reader.at_any(self.marks)) != INVOKE:
            self.content(name)


TOOL_CALLS_MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralCallParser(JsonCallParser):
    """Parser of one choice of Mistral: a list of objects, or, since 2025, the name before the arguments."""

    def block(self, opener: str) -> Reading[None]:
        """See `JsonCallParser.block`."""
        space = yield from self.reader.space()
        name = yield from self.reader.word(NAME)
        if not name:
            yield from super().block(opener)
            return
        after = yield from self.reader.space()
        mark = yield from self.reader.at_any(self.marks)
        if mark == CALL_ID:
            self.reader.skip(len(mark))
            yield from self.reader.word(NAME)
            mark = yield from self.reader.at_any(self.marks)
        if mark == ARGS:
            self.reader.skip(len(mark))
        elif (yield from self.reader.peek()) != "{":
            self.content(space + name + after)
            return
        self.begin(name)
        if not (yield from object_value(self.values, self.argue)):
            yield from self.drop()
        yield from self.separate()


FUNCTOOLS = "functools"
_FUNCTOOLS_SPACE = re.compile(r"[ \t\r\n:=]*")


class Phi4CallParser(JsonCallParser):
    """Parser of one choice of Phi 4: a list after `functools[`; the model also writes white space, or no list, after it."""

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`. The word alone is a marker only if JSON that may be a call follows."""
        if mark != FUNCTOOLS:
            yield from super().marked(mark)
            return
        reader = self.reader
        space = yield from reader.word(_FUNCTOOLS_SPACE)
        opening = yield from reader.peek()
        if opening not in BARE:
            self.unstop([mark, space])
            return
        reader.skip()
        inside = yield from reader.space()
        following = yield from reader.peek()
        if following and following in ("{]" if opening == "[" else '"'):
            reader.restore(opening + inside)
            self.cut()
            yield from self.block(FUNCTOOLS)
        else:
            self.unstop([mark, space, opening, inside])


def family(name: str, form: JsonCallFormat, example: str, aliases: tuple[str, ...] = ()) -> ToolCallFamily:
    """Return a family of this kind."""
    return ToolCallFamily(
        name=name,
        make=lambda tools: JsonCallParser(tools, form),
        markers=(*form.openers, *form.closers),
        example=example,
        aliases=aliases,
    )


HERMES = JsonCallFormat(openers=("<tool_call>",), closers=("</tool_call>",))
MISTRAL = JsonCallFormat(openers=(TOOL_CALLS_MARK,), closers=("[/TOOL_CALLS]",), unclosed=(TOOL_CALLS_MARK,))
PHI4 = JsonCallFormat(openers=("functools[",), unclosed=("functools[", FUNCTOOLS))
INKLING = JsonCallFormat(openers=(INVOKE,), closers=(END,), argument_keys=("args", "arguments"), is_bare=False)
_INKLING_OTHERS = (MESSAGE, TEXT, THINKING, END_SAMPLING)

FAMILIES = (
    family("hermes", HERMES, f"<tool_call>\n{EXAMPLE}\n</tool_call>", aliases=("qwen25",)),
    family(
        "default",
        JsonCallFormat(("<TOOLCALL>", "<|python_tag|>"), ("</TOOLCALL>",), unclosed=("<|python_tag|>",)),
        EXAMPLE,
    ),
    family("nemotron_deci", JsonCallFormat(("<TOOLCALL>",), ("</TOOLCALL>",)), f"<TOOLCALL>[{EXAMPLE}]</TOOLCALL>"),
    family(
        "llama3_json",
        JsonCallFormat(("<|python_tag|>",), unclosed=("<|python_tag|>",)),
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
    ),
    ToolCallFamily(
        name="mistral",
        make=lambda tools: MistralCallParser(tools, MISTRAL, (ARGS, CALL_ID)),
        markers=(*MISTRAL.openers, *MISTRAL.closers, ARGS, CALL_ID),
        example=f"[TOOL_CALLS][{EXAMPLE}]",
    ),
    family("jamba", JsonCallFormat(("<tool_calls>",), ("</tool_calls>",)), f"<tool_calls>[{EXAMPLE}]</tool_calls>"),
    ToolCallFamily(
        name="phi4",
        make=lambda tools: Phi4CallParser(tools, PHI4, stops=(FUNCTOOLS,)),
        markers=PHI4.openers,
        example=f"functools[{EXAMPLE}]",
    ),
    ToolCallFamily(
        name="inkling",
        make=lambda tools: InklingCallParser(tools, INKLING, _INKLING_OTHERS),
        markers=(*INKLING.openers, *INKLING.closers, *_INKLING_OTHERS),
        example=(f'{MESSAGE}get_weather{INVOKE}{{"name": "get_weather", "args": {{"city": "Oslo", "days": 2}}}}{END}'),
    ),
)
