"""Choice: one sequence of output text, from its tokens to the pieces that an answer takes.

Pieces are JSON-escaped, ready to be written. A choice that is read (`llm.reading`) has events in place of pieces.
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
    """Who makes a response out of generations."""

    def touch(self, choice: "Choice") -> None:
        """The choice has pieces and had none before."""

    def ended(self, generation: "Generation") -> None:
        """The generation is complete: every choice of it has its finish reason."""

    def failed(self, generation: "Generation", error: Exception) -> None:
        """The generation broke off."""


class Frame:
    """The fixed text around the pieces of a choice."""

    __slots__ = ("head", "separator", "size", "tail", "tail_of_chunk")

    def __init__(self, head: bytes, tail: bytes) -> None:
        self.head = head
        self.tail = tail
        self.separator = tail + head
        """Between two pieces that are written together."""
        self.tail_of_chunk = tail + b"\r\n"
        """The tail where an HTTP chunk ends with it."""
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
        """Whether tokens may be looked up in the table: no stop strings, no logprobs, no reading."""
        self.is_plain = fast
        """The same, and the detokenizer holds nothing back at the moment."""
        self.pieces: list[bytes] = []
        """JSON-escaped text that the answer has not taken yet; none where the text is read."""
        self.reading = reading
        """What a parser finds in the text, where one reads it."""
        self.entries: list[TokenEntry] | None = [] if logprobs else None
        self.ids: list[int] | None = [] if keeps_ids else None
        """The tokens that the answer has not taken yet, where it wants them."""
        self.score: float | None = None
        """The log-probability of all its tokens together, where the worker says it."""
        self.prompt_logprobs: list[Any] | None = None
        """Those of its prompt in vLLM's form, where the answer shows them."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_spoken = False
        """Whether the worker has answered this choice at all; bare tokens are choice 0's."""
        self.frame: Frame | None = None
        """The fixed text of its plain events, once it is open (an answer's own mark)."""
        self.is_open = False
        """Whether the answer has opened it (an answer's own mark)."""
        self.is_closed = False
        """Whether the answer has written its end (an answer's own mark)."""
        self.chars = 0
        """How many characters the answer has written (an answer's own mark)."""

    def add(self, text: str) -> None:
        """What one token of the slow path made certain; it may be nothing."""
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
        """The choice ends: what was held back is said."""
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
        """All text for the user that was not taken."""
        if self.reading is not None:
            return "".join(event.text for event in self.reading.events if isinstance(event, Content))
        whole: str = json_decode(b'"' + b"".join(self.pieces) + b'"')
        return whole

    def events(self) -> list[Event]:
        """All that was found and not taken; of a text that nobody read, its content."""
        if self.reading is not None:
            return joined(self.reading.events)
        text = self.text()
        return [Content(text)] if text else []


def best_choices(choices: Sequence[Choice], count: int, first_index: int) -> list[Choice]:
    """The likeliest of the choices of one request, likeliest first and numbered anew."""
    ranked = sorted(choices, key=likelihood, reverse=True)[:count]
    for index, choice in enumerate(ranked, first_index):
        choice.index = index
    return ranked


def likelihood(choice: Choice) -> float:
    """The log-probability of a choice's text: the worker's own sum, else that of the tokens."""
    if choice.score is not None:
        return choice.score
    return sum(entry.logprob or 0.0 for entry in choice.entries or ())
