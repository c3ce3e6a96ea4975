"""Inkling: messages whose kind is given by a marker: reasoning, text, tool calls. Pure.

    <|content_thinking|>Two and two.<|end_message|><|message_model|><|content_text|>Four.<|end_message|>
    <|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {…}}<|end_message|>

The prompt ends with `<|message_model|>`, so the first message comes without it. A tool call is passed on unchanged if a
parser of tool calls follows, and counts as reasoning otherwise. Images and audio are dropped.
"""

import re
from collections import deque
from enum import Enum

from dynamo.parsers.base import ContentDelta, ReasoningDelta
from dynamo.parsers.json_object import JsonObject
from dynamo.parsers.markers import MarkedText, Output, Scanner

MESSAGE, END, END_SAMPLING = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
THINKING, TEXT, INVOKE = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
IMAGE, AUDIO = "<|content_image|>", "<|content_audio_input|>"
MARKERS = (MESSAGE, END, END_SAMPLING, THINKING, TEXT, INVOKE, IMAGE, AUDIO)

NAME_CHARS_MAX = 256  # Longer than a tool's name may be.

_INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_MAY_BE_NAME = re.compile(r"[ \t]*[\w.:-]*")


class _InklingState(Enum):
    """Position in the format."""

    HEAD = "at the beginning of a message, where a tool's name may follow"
    CONTENT = "in a message of text, or between messages"
    THOUGHTS = "in a message of reasoning"
    TOOL = "in a tool call"
    DROPPED = "in a message that is not text"


class StringEnd:
    """Text from a marker in a JSON string on, read until it is decided whether the string is closed after it.

    It is closed if a quote follows with a character after it that may follow a string. A call whose last string is not
    closed in this way ends at its marker, as in the parsers of tool calls.
    """

    __slots__ = ("_is_escaped", "has_quote")

    def __init__(self) -> None:
        self.has_quote = False
        """Whether the quote was found."""
        self._is_escaped = False

    def feed(self, text: str) -> bool | None:
        """Return whether the string is closed; None while that is undecided."""
        at = 0
        if not self.has_quote:
            inside = _INSIDE.match(text, int(self._is_escaped and bool(text)))
            assert inside is not None, "the pattern matches any text"
            at = inside.end()
            self._is_escaped = text[at:] == "\\" or (self._is_escaped and not text)
            self.has_quote = text[at : at + 1] == '"'
            if not self.has_quote:
                return None
            at += 1
        following = text[at:].lstrip(" \t\r\n")
        return following[0] in ",}]:" if following else None


class InklingParser(MarkedText):
    """Parser of one choice."""

    def __init__(self, is_inside: bool, leaves_calls: bool) -> None:
        """`leaves_calls`: a parser of tool calls follows, and needs their messages unchanged."""
        self._scanner = Scanner(MARKERS)
        self._output = Output(MARKERS)
        self._leaves_calls = leaves_calls
        self._at = _InklingState.THOUGHTS if is_inside else _InklingState.HEAD
        self._name = ""
        """Text that may be the name of a tool."""
        self._call = JsonObject()
        self._undecided: list[tuple[str, str]] = []
        """Texts and markers from a marker in a string of a call on, until it is decided whether the string is closed."""
        self._string_end = StringEnd()
        self._waiting: deque[tuple[str, str]] = deque()
        """Texts and markers still to be read."""

    def _end(self) -> None:
        while self._undecided:
            self._decide(is_closed=self._string_end.has_quote)
            self._go_on()
        self._release()

    def _read(self, text: str) -> None:
        self._waiting.append((text, ""))
        self._go_on()

    def _pass(self, marker: str) -> None:
        self._waiting.append(("", marker))
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            text, marker = self._waiting.popleft()
            if self._undecided:
                self._undecided.append((text, marker))
                is_closed = self._string_end.feed(text or marker)
                if is_closed is not None:
                    self._decide(is_closed=is_closed)
            elif not marker:
                self._read_text(text)
            elif self._at is _InklingState.TOOL and self._call.is_in_string:
                self._string_end = StringEnd()
                self._undecided.append(("", marker))
            else:
                self._read_marker(marker)

    def _decide(self, *, is_closed: bool) -> None:
        """Read what was held back: as text of the string if that is closed, otherwise as markers and what follows them."""
        pieces, self._undecided = self._undecided, []
        if not is_closed:
            self._read_marker(pieces[0][1])
            self._waiting.extendleft(reversed(pieces[1:]))
            return
        for text, marker in pieces:
            self._read_in_string(text, marker)

    def _read_in_string(self, text: str, marker: str) -> None:
        self._call.feed(text or marker)
        if text:
            self._emit_call(text)
        elif self._leaves_calls:
            self._output.emit_as_is(ContentDelta, marker)
        else:
            self._output.cut()

    def _read_text(self, text: str) -> None:
        match self._at:
            case _InklingState.HEAD:
                self._name += text
                if len(self._name) > NAME_CHARS_MAX or not _MAY_BE_NAME.fullmatch(self._name):
                    self._release()
                    self._at = _InklingState.CONTENT
            case _InklingState.CONTENT:
                self._output.emit(ContentDelta, text)
            case _InklingState.THOUGHTS:
                self._output.emit(ReasoningDelta, text)
            case _InklingState.TOOL:
                self._call.feed(text)
                self._emit_call(text)
            case _InklingState.DROPPED:
                pass

    def _read_marker(self, marker: str) -> None:
        if marker == INVOKE and self._at is _InklingState.HEAD:
            self._output.cut()
            self._begin_call()
            return
        self._release()
        self._output.cut()
        if self._at is _InklingState.TOOL:
            self._emit_call(END if self._leaves_calls else "")
        self._at = _AFTER.get(marker, _InklingState.CONTENT)

    def _begin_call(self) -> None:
        name, self._name = self._name, ""
        self._at, self._call = _InklingState.TOOL, JsonObject()
        if self._leaves_calls:
            self._emit_call(MESSAGE + name + INVOKE)

    def _emit_call(self, text: str) -> None:
        if self._leaves_calls:
            self._output.emit_as_is(ContentDelta, text)
        else:
            self._output.emit(ReasoningDelta, text)

    def _release(self) -> None:
        """Emit the text held back, which is no name."""
        text, self._name = self._name, ""
        self._output.emit(ContentDelta, text)


_AFTER = {
    MESSAGE: _InklingState.HEAD,
    THINKING: _InklingState.THOUGHTS,
    TEXT: _InklingState.CONTENT,
    IMAGE: _InklingState.DROPPED,
    AUDIO: _InklingState.DROPPED,
}
"""Position after each marker; the others end a message."""
