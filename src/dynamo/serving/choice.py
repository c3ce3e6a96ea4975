"""Choice: one sequence of output text, from tokens to the pieces written to the response.

Pieces are JSON-escaped and ready to write. A choice with a parser (`text.answer_parsing`) has events instead of pieces.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from dynamo.core.codec import json_decode
from dynamo.parsers.base import ContentDelta, Event
from dynamo.serving.postprocessor import TOOL_CALLS, TokenEntry
from dynamo.text.answer_parsing import Reading, joined
from dynamo.text.detokenizer import Detokenizer, json_text


class Touched(Protocol):
    """Response that is notified of new text."""

    def touch(self, choice: "Choice") -> None:
        """Handle the first new pieces of a choice."""


class Frame:
    """Fixed text around the pieces of a choice, and the response that they are written to."""

    __slots__ = ("exchange", "head", "separator", "size", "state", "tail")

    def __init__(self, head: bytes, tail: bytes, exchange: object = None, state: object = None) -> None:
        """`exchange` and `state` are those of the response; the compiled `token_path` reads them here."""
        self.exchange = exchange
        self.state = state
        self.head = head
        self.tail = tail
        self.separator = tail + head
        """Text between two pieces that are written together."""
        self.size = len(head) + len(tail)
        """Bytes of head and tail."""


class Choice:
    """One sequence of output text."""

    __slots__ = (
        "answer",
        "chars",
        "detokenizer",
        "entries",
        "fast",
        "finish_reason",
        "frame",
        "has_spoken",
        "ids",
        "index",
        "is_closed",
        "is_open",
        "is_plain",
        "pieces",
        "prompt_logprobs",
        "queue",
        "reading",
        "score",
        "stop_reason",
    )

    def __init__(
        self,
        index: int,
        answer: Touched,
        detokenizer: Detokenizer,
        *,
        fast: bool,
        logprobs: bool,
        reading: Reading | None = None,
        keeps_ids: bool = False,
    ) -> None:
        self.index = index
        self.answer = answer
        self.queue: list[Choice] | tuple[()] = ()
        """Choices that the response writes in this loop tick; if there are any, the choice appends itself. See `join`."""
        self.detokenizer = detokenizer
        self.fast = fast
        """Whether tokens may be looked up in the table: no stop strings, no logprobs, no parser."""
        self.is_plain = fast
        """`fast`, and the detokenizer holds no text back at the moment."""
        self.pieces: list[bytes] = []
        """JSON-escaped text that is not written yet; empty if a parser reads the text."""
        self.reading = reading
        """Parser of the text, if any."""
        self.entries: list[TokenEntry] | None = [] if logprobs else None
        self.ids: list[int] | None = [] if keeps_ids else None
        """Tokens that are not reported yet, if the response reports token ids."""
        self.score: float | None = None
        """Sum of the log-probabilities of all tokens, if the worker reports it."""
        self.prompt_logprobs: list[Any] | None = None
        """Log-probabilities of the prompt in vLLM's form, if the response shows them."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_spoken = False
        """Whether the worker has sent output for this choice; bare tokens belong to choice 0."""
        self.frame: Frame | None = None
        """Fixed text of its plain events, once open. Set by the response."""
        self.is_open = False
        """Whether the response has opened the choice. Set by the response."""
        self.is_closed = False
        """Whether the response has written the end of the choice. Set by the response."""
        self.chars = 0
        """Characters written so far. Set by the response."""

    # What the worker reports.

    def received(self, score: float | None) -> None:
        """Record output of the worker for this choice; `score` is the sum of log-probabilities so far, if reported."""
        self.has_spoken = True
        if score is not None:
            self.score = score

    def push(self, token_id: int) -> bool:
        """Add one token of the slow path. Return whether a stop string ended the choice."""
        if self.ids is not None:
            self.ids.append(token_id)
        detokenizer = self.detokenizer
        self.add(detokenizer.push(token_id))
        self.is_plain = self.fast and not detokenizer.is_pending
        if detokenizer.stopped_by is None:
            return False
        self.stop_reason = detokenizer.stopped_by
        return True

    def add(self, text: str) -> None:
        """Add the text of one token of the slow path; it may be empty."""
        reading = self.reading
        if reading is not None:
            before = len(reading.events)
            if reading.feed(text) and not before:
                self.answer.touch(self)
        elif text:
            self.add_piece(json_text(text))

    def add_piece(self, piece: bytes) -> None:
        """Add JSON-escaped text; the first since the last write puts the choice into the response's queue."""
        if not self.pieces:
            if self.queue:
                self.queue.append(self)
            else:
                self.answer.touch(self)
        self.pieces.append(piece)

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """Handle the worker's finish reason; a choice that has ended keeps its own."""
        self.stop_reason = stop_reason
        if self.finish_reason is None:
            self.close(reason)

    def cut(self) -> None:
        """End the choice at a stop condition that the worker did not report."""
        self.is_plain = False
        self.close("stop")

    def close(self, reason: str) -> None:
        """End the choice and release the text held back."""
        text = self.detokenizer.flush()
        if self.reading is None:
            self.add(text)
        else:
            self.reading.close(text)
            if self.reading.calls and reason == "stop":
                reason = TOOL_CALLS
        self.finish_reason = reason
        self.answer.touch(self)

    # What the response shows.

    def join(self, queue: "list[Choice]") -> None:
        """Set the list of choices that the response writes in a loop tick; `touch` is then called for the first one only."""
        self.queue = queue

    def open(self, frame: Frame | None) -> None:
        """Record that the response has opened the choice; `frame` is the fixed text of its plain events, if any."""
        self.is_open = True
        self.frame = frame

    def take_pieces(self) -> list[bytes]:
        """Return the pieces that are not written yet; they count as written."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def take_entries(self) -> tuple[list[TokenEntry], int]:
        """Return the log-probabilities that are not written yet, and the number of characters before them."""
        entries, offset = self.entries or [], self.chars
        if entries:
            self.entries = []
            self.chars += sum(len(entry.text) for entry in entries)
        return entries, offset

    def take_ids(self) -> list[int]:
        """Return the tokens that are not reported yet; they count as reported."""
        ids, self.ids = self.ids or [], []
        return ids

    def mark_closed(self) -> None:
        """Record that the response has written the end of the choice."""
        self.is_closed = True

    def renumber(self, index: int) -> None:
        """Set the index under which the response shows the choice."""
        self.index = index

    def show_prompt_logprobs(self, rows: list[Any]) -> None:
        """Show these log-probabilities of the prompt."""
        self.prompt_logprobs = rows

    def precede_entries(self, entries: Sequence[TokenEntry]) -> None:
        """Show these log-probabilities before those of the text."""
        self.entries = [*entries, *(self.entries or ())]

    def hide_entries(self) -> None:
        """Show no log-probabilities: they were requested only to rank the choices."""
        self.entries = None

    def text(self) -> str:
        """Return all text for the user that is not written yet."""
        if self.reading is not None:
            return "".join(event.text for event in self.reading.events if isinstance(event, ContentDelta))
        whole: str = json_decode(b'"' + b"".join(self.pieces) + b'"')
        return whole

    def events(self) -> list[Event]:
        """Return all events that are not written yet; without a parser, the text as content."""
        if self.reading is not None:
            return joined(self.reading.events)
        text = self.text()
        return [ContentDelta(text)] if text else []
