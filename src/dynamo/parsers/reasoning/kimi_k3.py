"""Kimi K3: channels between tags of three tokens each (XTML). Pure.

    <|open|>think<|sep|>Two and two.<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>…<|close|>call<|sep|><|close|>tools<|sep|>

The channel `tools` is passed on unchanged if a parser of tool calls follows, and counts as reasoning otherwise.
"""

from dynamo.parsers.base import ContentDelta, ReasoningDelta
from dynamo.parsers.markers import MarkedText, Output, Scanner, TextKind

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)

THINK, TOOLS = "think", "tools"

TAG_CHARS_MAX = 4096  # Longer than any tag.


class KimiK3Parser(MarkedText):
    """Parser of one choice."""

    def __init__(self, is_inside: bool, leaves_calls: bool) -> None:
        """`leaves_calls`: a parser of tool calls follows, and needs their channel unchanged."""
        self._scanner = Scanner(MARKERS)
        self._output = Output(MARKERS)
        self._leaves_calls = leaves_calls
        self._kind: TextKind = ReasoningDelta if is_inside else ContentDelta
        self._is_in_tools = False
        self._tag: str | None = None
        """The tag being read, from its first marker on."""

    def _end(self) -> None:
        if self._tag is not None and self._is_in_tools and self._leaves_calls:
            self._output.emit_as_is(ContentDelta, self._tag)

    def _read(self, text: str) -> None:
        if self._tag is None:
            self._emit(text)
            return
        self._tag += text
        if len(self._tag) > TAG_CHARS_MAX:
            self._not_a_tag()

    def _not_a_tag(self) -> None:
        tag, self._tag = self._tag or "", None
        self._emit(tag if self._is_in_tools and self._leaves_calls else tag.removeprefix(OPEN).removeprefix(CLOSE))

    def _pass(self, marker: str) -> None:
        if not (self._is_in_tools and self._leaves_calls):
            self._output.cut()
        if marker == SEP and self._tag is not None:
            tag, self._tag = self._tag, None
            self._enter(tag)
            return
        if self._tag is not None:
            self._not_a_tag()
            if not (self._is_in_tools and self._leaves_calls):
                self._output.cut()
        if marker in (OPEN, CLOSE):
            self._tag = marker
        elif self._is_in_tools and self._leaves_calls:
            self._emit(marker)

    def _enter(self, tag: str) -> None:
        """Process a tag that is complete except for its last marker."""
        is_opening = tag.startswith(OPEN)
        words = tag.removeprefix(OPEN).removeprefix(CLOSE).split()
        name = words[0] if words else ""
        if name == TOOLS:
            if is_opening:
                self._is_in_tools, self._kind = True, ReasoningDelta
            self._emit_tag(tag)
            if not is_opening:
                self._is_in_tools, self._kind = False, ContentDelta
        elif self._is_in_tools:
            self._emit_tag(tag)
        else:
            self._kind = ReasoningDelta if is_opening and name == THINK else ContentDelta

    def _emit_tag(self, tag: str) -> None:
        if self._leaves_calls:
            self._output.emit_as_is(ContentDelta, tag + SEP)

    def _emit(self, text: str) -> None:
        if self._is_in_tools and self._leaves_calls:
            self._output.emit_as_is(ContentDelta, text)
        else:
            self._output.emit(self._kind, text)
