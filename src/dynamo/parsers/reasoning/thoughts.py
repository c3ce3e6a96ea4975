"""Reasoning between an opening and a closing marker. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.parsers.base import ContentDelta, Event, ReasoningDelta
from dynamo.parsers.markers import MarkedText, Output, Scanner


@dataclass(frozen=True, slots=True)
class Brackets:
    """Markers of a format's reasoning."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    leaves: tuple[str, ...] = ()
    """Beginnings of a tool call. Models may write one without closing their reasoning; it ends it and is content."""
    label: str = ""
    """Text after the opening marker that only announces the reasoning."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers used for reasoning only."""
        return (*self.opens, *self.closes)


def blocks_of(call_markers: Sequence[str], brackets: Brackets) -> dict[str, str]:
    """Return the markers that begin a block of tool calls in a format, with the markers that end it."""
    ours = {*brackets.markers, *brackets.leaves}
    blocks: dict[str, str] = {}
    for opening in call_markers:
        for closing in _closings(opening):
            pair = (opening, closing)
            clashes = any(one != mine and (one in mine or mine in one) for one in pair for mine in ours)
            if closing in call_markers and not clashes and not {*pair} & {*brackets.markers}:
                blocks.setdefault(*pair)
    return blocks


def _closings(opening: str) -> list[str]:
    """Return the possible closing markers for an opening one."""
    found = [opening.replace("begin", "end")] if "begin" in opening else []
    if opening[0] in "<[":
        found.append(f"{opening[0]}/{opening[1:]}")
    if opening.startswith("<|") and opening.endswith(">") and not opening.endswith("|>"):
        found.append(f"<{opening[2:-1]}|>")
    return found


class BracketParser(MarkedText):
    """Parser of one choice. A marker that opens an open section, or closes a closed one, is dropped.

    Markers of reasoning are ignored inside a block of tool calls, because arguments may contain them. `blocks` are the
    blocks that the next parser handles, as returned by `blocks_of`.
    """

    def __init__(self, brackets: Brackets, is_inside: bool, blocks: Mapping[str, str] | None = None) -> None:
        self._brackets = brackets
        self._is_inside = is_inside
        self._blocks = blocks or {}
        self._until: str | None = None
        """The marker that ends the block being passed on."""
        every = (*brackets.markers, *brackets.leaves, *self._blocks, *self._blocks.values())
        self._scanner = Scanner(tuple(dict.fromkeys(every)))
        self._output = Output(brackets.markers)
        self._label = brackets.label if is_inside else ""
        """The label that may still follow."""
        self._label_read = ""

    def _end(self) -> None:
        self._end_label()

    def _read(self, text: str) -> None:
        if self._until is not None:
            self._output.emit_as_is(ContentDelta, text)
            return
        if self._label:
            text = self._without_label(text)
        self._output.emit(ReasoningDelta if self._is_inside else ContentDelta, text)

    def _pass(self, marker: str) -> None:
        brackets = self._brackets
        if self._until is not None:
            self._output.emit_as_is(ContentDelta, marker)
            self._until = None if marker == self._until else self._until
            return
        self._end_label()
        if marker in brackets.leaves and self._is_inside:
            self._is_inside = False
            self._output.cut()
        if marker not in brackets.markers:
            self._output.emit(ReasoningDelta if self._is_inside else ContentDelta, marker)
            if not self._is_inside:
                self._until = self._blocks.get(marker)
            return
        self._output.cut()
        self._is_inside = marker in brackets.opens
        self._label = brackets.label if self._is_inside else ""

    def _without_label(self, text: str) -> str:
        text = self._label_read + text
        if len(text) < len(self._label) and self._label.startswith(text):
            self._label_read = text
            return ""
        text = text.removeprefix(self._label)
        self._label = self._label_read = ""
        return text

    def _end_label(self) -> None:
        """Emit the beginning of a label that was not completed as reasoning."""
        text, self._label, self._label_read = self._label_read, "", ""
        self._output.emit(ReasoningDelta, text)


class InlineParser:
    """MiniMax's `append_think`: reasoning stays in the content, after the opening marker from the prompt."""

    def __init__(self, opening: str) -> None:
        self._opening = opening

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        if not text:
            return []
        opening, self._opening = self._opening, ""
        return [ContentDelta(opening + text)]

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        return []
