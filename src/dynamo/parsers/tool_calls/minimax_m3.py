"""MiniMax M3: tags with a special token before each, and parameters named by their tags, which may be nested.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Tags inside a parameter make an object, `<item>` tags an array, and a repeated tag makes its value an array.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo.parsers.base import Tool, ToolCallFamily
from dynamo.parsers.tool_calls.arguments import Arguments, Parameter
from dynamo.parsers.tool_calls.calls import CallParser
from dynamo.parsers.tool_calls.reader import Reading, Write, ignore
from dynamo.parsers.tool_calls.schemas import STRING, typed_json, types_of
from dynamo.parsers.tool_calls.tagged_calls import HEADER_CHARS_MAX, attributes
from dynamo.parsers.tool_calls.values import quoted

MARK = "]<]minimax[>["
MARKERS = (MARK,)
ITEM, TEXT = "item", "$text"
DEPTH_MAX = 32  # Deeper than any tool's parameters; tags nested deeper are dropped.

_TAG = re.compile(r"<?[^<>\[\]\n]*")
_PARTS = re.compile(r"<(/?)([^\s<>/]+)(?:\s([^<>]*))?")


@dataclass(slots=True)
class Element:
    """A parameter, or a part of one, that is being read."""

    tag: str
    schema: Mapping[str, Any]
    texts: list[str] = field(default_factory=list)
    children: dict[str, list[str]] = field(default_factory=dict)
    """JSON of the values of each child tag."""

    def json(self, root: Mapping[str, Any]) -> str:
        """Return its value as JSON."""
        text = "".join(self.texts)
        if not self.children:
            return typed_json(text, types_of(self.schema, root) or STRING)
        types = types_of(self.schema, root)
        if set(self.children) == {ITEM} and (not types or "array" in types):
            return f"[{','.join(self.children[ITEM])}]"
        members = [f"{quoted(tag)}:{folded(values)}" for tag, values in self.children.items()]
        if text.strip():
            members.append(f"{quoted(TEXT)}:{quoted(text)}")
        return f"{{{','.join(members)}}}"

    def schema_of(self, tag: str) -> Mapping[str, Any]:
        """Return the schema of a child."""
        items, properties = self.schema.get("items"), self.schema.get("properties")
        child = items if tag == ITEM and items is not None else None
        if child is None and isinstance(properties, Mapping):
            child = properties.get(tag)
        return child if isinstance(child, Mapping) else {}


def folded(values: Sequence[str]) -> str:
    """Return the values of a tag as JSON: an array if there are several."""
    return values[0] if len(values) == 1 else f"[{','.join(values)}]"


class MiniMaxM3CallParser(CallParser):
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, MARKERS)

    def marked(self, mark: str) -> Reading[None]:
        """See `CallParser.marked`."""
        tag = yield from self.tag(self.content)
        if tag != Tag("tool_call"):
            return
        while tag != BLOCK_END and (yield from self.reader.until(self.marks, ignore)):
            tag = yield from self.tag(ignore)
            if tag.name == "invoke" and not tag.is_end and tag.called:
                tag = yield from Invoke(self, tag.called).read()
        self.cut()
        yield from self.separate()

    def tag(self, write: Write) -> Reading["Tag"]:
        """Return the tag after its token; a nameless one if it is none, and then its text is written."""
        text = yield from self.reader.word(_TAG)
        is_closed = bool(text) and (yield from self.reader.peek()) == ">"
        found = _PARTS.fullmatch(text) if is_closed and len(text) <= HEADER_CHARS_MAX else None
        if found is None:
            write(text)
            return Tag("")
        self.reader.skip()
        called = attributes((found[3] or "").removeprefix("name="))[0] if found[2] == "invoke" else ""
        return Tag(found[2], is_end=bool(found[1]), called=called)


class Tag(NamedTuple):
    """A tag."""

    name: str
    is_end: bool = False
    called: str = ""
    """Tool called by an `invoke`."""


CALL_END, BLOCK_END = Tag("invoke", is_end=True), Tag("tool_call", is_end=True)


class Invoke:
    """One call that is being read."""

    def __init__(self, host: MiniMaxM3CallParser, tool: str) -> None:
        self._host = host
        self._tool = tool
        self._root = host.schemas.root(tool)
        self._arguments = Arguments(host.argue)
        self._open: list[Element] = []
        """The parameter, and the elements open in it."""
        self._text: Parameter | None = None
        """The parameter, if it is a string and thus written while it is read."""
        self._folding: tuple[str, list[str]] = "", []
        """The last parameter, and the JSON of its values: written when another tag follows."""
        host.begin(tool)

    def read(self) -> Reading[Tag]:
        """Read the whole call; return the tag that ended it, or a nameless one at the end of the text."""
        host, tag = self._host, Tag("")
        while (yield from host.reader.until(host.marks, self._piece)):
            tag = yield from host.tag(self._piece)
            if tag in (CALL_END, BLOCK_END):
                self._end(0)
                break
            if tag.is_end:
                self._close(tag.name)
            elif tag.name:
                self._begin(tag.name)
        else:
            tag = Tag("")
            if self._text is not None:
                self._text.end(is_whole=False)
        self._fold("")
        self._arguments.close()
        return tag

    def _piece(self, text: str) -> None:
        if self._text is not None:
            self._text.piece(text)
        elif self._open:
            self._open[-1].texts.append(text)

    def _begin(self, name: str) -> None:
        if self._text is not None or len(self._open) >= DEPTH_MAX:
            return
        if self._open:
            self._open.append(Element(name, self._open[-1].schema_of(name)))
            return
        self._open.append(Element(name, self._host.schemas.schema(self._tool, name)))
        types = self._host.schemas.types(self._tool, name)
        if types and types <= STRING | {"null"}:
            self._fold("")
            self._text = self._arguments.parameter(name, types)

    def _close(self, name: str) -> None:
        depth = next((depth for depth in range(len(self._open) - 1, -1, -1) if self._open[depth].tag == name), None)
        if depth is not None:
            self._end(depth)

    def _end(self, depth: int) -> None:
        """End the open elements down to a depth."""
        while len(self._open) > depth:
            ended = self._open.pop()
            if self._open:
                self._open[-1].children.setdefault(ended.tag, []).append(ended.json(self._root))
            elif self._text is not None:
                self._text.end(is_whole=True)
                self._text = None
            else:
                self._fold(ended.tag)
                self._folding[1].append(ended.json(self._root))

    def _fold(self, name: str) -> None:
        """Add a value to the last parameter, or, if its name differs, write the last parameter."""
        last, values = self._folding
        if name and name == last:
            return
        if values:
            self._arguments.key(last)
            self._arguments.put(folded(values))
        self._folding = name, []


def example(*lines: str) -> str:
    """Return the tags, each with its token."""
    return "".join(line.replace("<", f"{MARK}<") for line in lines)


FAMILIES = (
    ToolCallFamily(
        name="minimax_m3",
        make=MiniMaxM3CallParser,
        markers=MARKERS,
        example=example(
            "<tool_call>\n",
            '<invoke name="get_weather"><city>Oslo</city><days>2</days></invoke>\n',
            "</tool_call>",
        ),
        aliases=("minimax-m3", "minimax_m3_nom", "minimax-m3-nom"),
    ),
)
