"""Harmony: gpt-oss's channels, read by one parser for reasoning, content and tool calls. Pure.

    <|channel|>analysis<|message|>Two and two.<|end|>                               reasoning
    <|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>           content
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
    <|start|>assistant<|channel|>final<|message|>Four.<|return|>                    content

A message addressed to a tool that the request does not offer (`to=python`) is not for the user: it counts as reasoning.
Several messages to the same output are separated by a line break. A call that was cut off is closed: its arguments are
completed to an object.
"""

import re
from collections.abc import Sequence
from enum import Enum

from dynamo.parsers.base import (
    CallArguments,
    CallBegin,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
    ReasoningFamily,
    Tool,
    ToolCallFamily,
)
from dynamo.parsers.json_object import JsonObject
from dynamo.parsers.markers import Output, Scanner, TextKind

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

ANALYSIS = "analysis"
FUNCTIONS = "functions."

HEADER_CHARS_MAX = 1024  # Longer than any header; longer text is not one.

SEPARATOR = "\n"  # Between two messages to the same output.

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


class _HarmonyState(Enum):
    """Position in the format."""

    OUTSIDE = "between messages"
    HEADER = "in a message's header"
    TEXT = "in a message"
    CALL = "in the arguments of a call"


class HarmonyParser:
    """Parser of one choice."""

    def __init__(self, tools: Sequence[Tool] | None = None, is_inside: bool = False) -> None:
        """`tools` None: calls are not parsed. `is_inside`: the prompt has opened a message of reasoning."""
        self._scanner = Scanner(MARKERS)
        self._output = Output(MARKERS)
        self._has_calls = tools is not None
        self._tools = frozenset(tool.name for tool in tools or ())
        self._at = _HarmonyState.TEXT if is_inside else _HarmonyState.OUTSIDE
        self._header = ""
        self._channel_at: int | None = None
        """Offset of the channel in the header; None if there is none yet."""
        self._kind: TextKind = ReasoningDelta if is_inside else ContentDelta
        self._is_new = False
        """Whether a message has begun of which nothing was emitted."""
        self._spoken: set[TextKind] = set()
        self._calls = 0
        self._arguments = JsonObject()

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        for stretch, marker in self._scanner.feed(text):
            if stretch:
                self._read(stretch)
            if marker:
                self._output.cut()
                self._pass(marker)
        return self._output.take()

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        if held := self._scanner.finish():
            self._read(held)
        self._end_message()
        return self._output.finish()

    def _read(self, text: str) -> None:
        match self._at:
            case _HarmonyState.CALL:
                self._argue(self._arguments.feed(text))
            case _HarmonyState.HEADER:
                self._read_header(text)
            case _HarmonyState.OUTSIDE:
                self._output.emit(ContentDelta, text)
                self._spoken.add(ContentDelta)
            case _HarmonyState.TEXT:
                if self._is_new and self._kind in self._spoken:
                    self._output.emit(self._kind, SEPARATOR)
                self._is_new = False
                self._spoken.add(self._kind)
                self._output.emit(self._kind, text)

    def _read_header(self, text: str) -> None:
        self._header += text
        if len(self._header) > HEADER_CHARS_MAX:
            self._open(ContentDelta)
            text, self._header = self._header, ""
            self._read(text)

    def _pass(self, marker: str) -> None:
        if marker in (START, CHANNEL):
            if self._at is not _HarmonyState.HEADER or marker == START:
                self._end_message()
                self._at, self._header, self._channel_at = _HarmonyState.HEADER, "", None
            if marker == CHANNEL:
                self._header += " "
                self._channel_at = len(self._header)
        elif marker == MESSAGE:
            if self._at is _HarmonyState.HEADER:
                self._begin_message()
            elif self._at is _HarmonyState.OUTSIDE:
                self._open(ContentDelta)
        elif marker == CONSTRAIN:
            if self._at is _HarmonyState.HEADER:
                self._header += " "
        else:
            self._end_message()

    def _begin_message(self) -> None:
        """Process a complete header."""
        channel = [] if self._channel_at is None else self._header[self._channel_at :].split()
        found = _RECIPIENT.search(self._header)
        recipient = found[1] if found else None
        name = self._tool_of(recipient)
        if name is not None:
            self._output.add(CallBegin(self._calls, name))
            self._at, self._arguments = _HarmonyState.CALL, JsonObject()
        elif recipient is not None or channel[:1] == [ANALYSIS]:
            self._open(ReasoningDelta)
        else:
            self._open(ContentDelta)

    def _tool_of(self, recipient: str | None) -> str | None:
        """Return the tool that a message calls, or None if it is no call."""
        if recipient is None or not self._has_calls:
            return None
        name = recipient.removeprefix(FUNCTIONS)
        return name if name and (name != recipient or name in self._tools) else None

    def _open(self, kind: TextKind) -> None:
        self._at, self._kind, self._is_new = _HarmonyState.TEXT, kind, True

    def _end_message(self) -> None:
        if self._at is _HarmonyState.CALL:
            self._argue(self._arguments.close())
            self._calls += 1
        self._at = _HarmonyState.OUTSIDE

    def _argue(self, text: str) -> None:
        if text:
            self._output.add(CallArguments(self._calls, text))


def harmony(tools: Sequence[Tool], is_reasoning: bool = False) -> Parser:
    """Return the parser of a choice that may call tools."""
    return HarmonyParser(tools, is_reasoning)


TOOL_CALLS = ToolCallFamily(
    name="harmony",
    make=harmony,
    markers=MARKERS,
    example=(
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}<|call|>'
    ),
)

THOUGHTS = ReasoningFamily(
    name="gpt_oss",
    make=lambda is_inside: HarmonyParser(None, is_inside),
    markers=MARKERS,
    starts_inside=False,
    example=(
        "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    ),
    opened_by=("<|channel|>analysis<|message|>",),
    closed_by=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
)
