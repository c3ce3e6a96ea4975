"""Muse: messages with recipients; those to the model itself are its reasoning. Pure.

     to=self<|message|>Two and two.<|eom|><|start|>assistant to=user<|message|>Four.<|eot|>

The prompt ends with `<|start|>assistant`, so the first header comes without it. The model has been observed to end its
reasoning without `<|eom|>`, with the next header after a space or line break; that ends the reasoning too. Messages to
other recipients are tool calls: passed on unchanged if a parser of tool calls follows, reasoning otherwise.
"""

import re
from enum import Enum

from dynamo.parsers.base import ContentDelta, ReasoningDelta
from dynamo.parsers.markers import MarkedText, Output, Scanner

START, MESSAGE, EOM, EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
MARKERS = (START, MESSAGE, EOM, EOT)

HEADER_CHARS_MAX = 256  # Longer than any header; longer text is not one.

SEPARATOR = "\n"  # Between two messages of reasoning.

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)\s*\Z")
_MAY_BE_HEADER = re.compile(r"\s*(?:t|to|to=[^\s<]*\s*)?")
"""A header without its `<|start|>assistant`, or the beginning of one."""
_HEADER_IN_THOUGHTS = re.compile(r"(?:(?<=\s)|^)(?:t|to|to=[^\s<]*)\Z")


class _MuseState(Enum):
    """Position in the format."""

    BEGINNING = "where a header without its beginning may follow"
    HEADER = "in a header"
    CONTENT = "in a message to the user, or between messages"
    THOUGHTS = "in a message to the model itself"
    TOOL = "in a message to a tool"


class MuseParser(MarkedText):
    """Parser of one choice."""

    def __init__(self, is_inside: bool, leaves_calls: bool) -> None:
        """`leaves_calls`: a parser of tool calls follows, and needs their messages unchanged."""
        self._scanner = Scanner(MARKERS)
        self._output = Output(MARKERS)
        self._leaves_calls = leaves_calls
        self._at = _MuseState.THOUGHTS if is_inside else _MuseState.BEGINNING
        self._held = ""
        """Text that is, or may be, a header."""
        self._last = ""
        """Last character of the reasoning before the text held back."""
        self._has_thought = False

    def _end(self) -> None:
        self._release()

    def _read(self, text: str) -> None:
        match self._at:
            case _MuseState.CONTENT:
                self._output.emit(ContentDelta, text)
            case _MuseState.TOOL:
                self._call(text)
            case _MuseState.THOUGHTS:
                self._think(text)
            case _:
                self._read_header(text)

    def _read_header(self, text: str) -> None:
        self._held += text
        is_bare = self._at is _MuseState.BEGINNING
        if len(self._held) > HEADER_CHARS_MAX or (is_bare and not _MAY_BE_HEADER.fullmatch(self._held)):
            self._at = _MuseState.CONTENT
            self._release()

    def _think(self, text: str) -> None:
        """Emit reasoning, except for a possible header at its end."""
        text, self._held = self._held + text, ""
        found = _HEADER_IN_THOUGHTS.search(self._last + text[-HEADER_CHARS_MAX:], len(self._last))
        if found is not None and len(found[0]) < HEADER_CHARS_MAX:
            self._held = found[0]
            text = text[: len(text) - len(self._held)]
        if text:
            self._last = text[-1]
            self._output.emit(ReasoningDelta, text)

    def _release(self) -> None:
        """Emit the text held back, which is no header."""
        text, self._held = self._held, ""
        if self._at is _MuseState.THOUGHTS:
            self._output.emit(ReasoningDelta, text)
        elif self._at is not _MuseState.HEADER:
            self._output.emit(ContentDelta, text)

    def _pass(self, marker: str) -> None:
        if marker == MESSAGE:
            found = _RECIPIENT.search(self._held)
            if self._at in (_MuseState.HEADER, _MuseState.BEGINNING) or (
                self._at is _MuseState.THOUGHTS and found is not None
            ):
                if found is None:
                    self._release()
                self._output.cut()
                self._begin_message(found[1] if found else None)
                return
            if self._at is _MuseState.THOUGHTS:
                self._release()
            self._output.cut()
            return
        if self._at is not _MuseState.HEADER:
            self._release()
        self._output.cut()
        self._end_message(marker)
        self._at = _MuseState.HEADER if marker == START else _MuseState.CONTENT
        self._held = ""

    def _begin_message(self, recipient: str | None) -> None:
        self._held = self._last = ""
        if recipient == "self":
            self._at = _MuseState.THOUGHTS
            if self._has_thought:
                self._output.emit(ReasoningDelta, SEPARATOR)
            self._has_thought = True
        elif recipient in (None, "user"):
            self._at = _MuseState.CONTENT
        else:
            self._at = _MuseState.TOOL
            if self._leaves_calls:
                self._output.emit_as_is(ContentDelta, f"{START}assistant to={recipient}{MESSAGE}")

    def _end_message(self, marker: str) -> None:
        if self._at is _MuseState.TOOL and self._leaves_calls:
            self._output.emit_as_is(ContentDelta, marker if marker in (EOM, EOT) else EOM)

    def _call(self, text: str) -> None:
        if self._leaves_calls:
            self._output.emit_as_is(ContentDelta, text)
        else:
            self._output.emit(ReasoningDelta, text)
