"""Choice: one sequence of output text, from tokens to the pieces written to the response.

Pieces are JSON-escaped and ready to write. A choice with a parser (`text.answer_parsing`) has events instead of pieces.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dynamo.core.codec import json_decode
from dynamo.parsers.base import Content, Event
from dynamo.serving.postprocessor import TOOL_CALLS, TokenEntry
from dynamo.text.answer_parsing import Reading, joined
from dynamo.text.detokenizer import Detokenizer, json_text

if TYPE_CHECKING:
    from dynamo.serving.generation import Generation


class Answer(Protocol):
    """Response made of generations."""

    def touch(self, choice: "Choice") -> None:
        """Handle the first new pieces of a choice."""

    def ended(self, generation: "Generation") -> None:
        """Handle a complete generation: each of its choices has a finish reason."""

    def failed(self, generation: "Generation", error: Exception) -> None:
        """Handle a failed generation."""


class Frame:
    """Fixed text around the pieces of a choice."""

    __slots__ = ("head", "separator", "size", "tail", "tail_of_chunk")

    def __init__(self, head: bytes, tail: bytes) -> None:
        self.head = head
        self.tail = tail
        self.separator = tail + head
        """Text between two pieces that are written together."""
        self.tail_of_chunk = tail + b"\r\n"
        """Tail that also ends an HTTP chunk."""
        self.size = len(head) + len(tail)


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
        "reading",
        "score",
        "stop_reason",
    )

    def __init__(
        self,
        index: int,
        answer: Answer,
        detokenizer: Detokenizer,
        *,
        fast: bool,
        logprobs: bool,
        reading: Reading | None = None,
        keeps_ids: bool = False,
    ) -> None:
        self.index = index
        self.answer = answer
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
        """Fixed text of its plain events, once open. Owned by the response."""
        self.is_open = False
        """Whether the response has opened the choice. Owned by the response."""
        self.is_closed = False
        """Whether the response has written the end of the choice. Owned by the response."""
        self.chars = 0
        """Characters written so far. Owned by the response."""

    def add(self, text: str) -> None:
        """Add the text of one token of the slow path; it may be empty."""
        reading = self.reading
        if reading is not None:
            before = len(reading.events)
            if reading.feed(text) and not before:
                self.answer.touch(self)
        elif text:
            if not self.pieces:
                self.answer.touch(self)
            self.pieces.append(json_text(text))

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

    def text(self) -> str:
        """Return all text for the user that is not written yet."""
        if self.reading is not None:
            return "".join(event.text for event in self.reading.events if isinstance(event, Content))
        whole: str = json_decode(b'"' + b"".join(self.pieces) + b'"')
        return whole

    def events(self) -> list[Event]:
        """Return all events that are not written yet; without a parser, the text as content."""
        if self.reading is not None:
            return joined(self.reading.events)
        text = self.text()
        return [Content(text)] if text else []


def best_choices(choices: Sequence[Choice], count: int, first_index: int) -> list[Choice]:
    """Return the most likely choices of one request, most likely first and renumbered."""
    ranked = sorted(choices, key=likelihood, reverse=True)[:count]
    for index, choice in enumerate(ranked, first_index):
        choice.index = index
    return ranked


def likelihood(choice: Choice) -> float:
    """Return the log-probability of a choice's text: the worker's sum if reported, else the sum over tokens."""
    if choice.score is not None:
        return choice.score
    return sum(entry.logprob or 0.0 for entry in choice.entries or ())
