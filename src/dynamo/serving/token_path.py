"""Token path: the functions that run for every plain token of every stream, from its arrival to the client's socket.

`on_token` is a method of `Generation`; `write_waiting` is called by the `Flusher` once per loop tick, for all choices with
new pieces. The Python functions are the definition. `_token_path.c` has equivalents, which are built where a compiler is
available (docs/decisions/0012): real tokens arrive after pauses that emptied the processor's caches, so the cost of a token
is the amount of memory that is touched, and the interpreter touches several times as much as they do.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from dynamo.core.metrics import Histogram
from dynamo.serving.choice import Choice


class TokenReceiver(Protocol):
    """What `on_token` needs of a `Generation`."""

    _choice: Choice
    _texts: list[bytes | None]
    received_ids: list[int] | None
    tokens: int

    def on_slow_token(self, choice: Choice, token_id: int) -> None:
        """Handle a token that is not a complete text, or not one of a plain choice."""


class WrittenResponse(Protocol):
    """What `write_waiting` needs of a response (`answers`)."""

    exchange: Any
    state: Any
    is_over: bool

    def flush(self, choice: Choice, now_s: float) -> None:
        """Write the pieces of a choice that is not plain, or not open."""

    def fail(self, error: Exception) -> None:
        """End the response with the error response for `error`."""


def python_on_token(self: TokenReceiver, token_id: int) -> None:
    """Handle one token of a generation."""
    choice = self._choice
    self.tokens += 1
    if self.received_ids is not None:
        self.received_ids.append(token_id)
    if choice.is_plain:
        try:
            piece = self._texts[token_id]
        except IndexError:
            return
        if piece is not None:
            if piece:
                choice.add_piece(piece)
            return
    self.on_slow_token(choice, token_id)


def python_write_waiting(waiting: Sequence[Choice], now_s: float) -> None:
    """Write the pieces of all choices; an error ends the response of its choice only.

    Kept flat, because it runs for every token of every stream. Streams last written together waited equally long: their
    gaps are observed as one.
    """
    gaps: Histogram | None = None
    since_s, together = 0.0, 0
    for choice in waiting:
        answer: WrittenResponse = choice.answer  # type: ignore[assignment]  # only streamed responses add choices
        frame, pieces = choice.frame, choice.pieces
        try:
            if frame is None or not pieces or answer.is_over:
                answer.flush(choice, now_s)
                continue
            answer.exchange.write_framed(frame, pieces[0] if len(pieces) == 1 else frame.separator.join(pieces))
        except Exception as error:  # noqa: BLE001 - request boundary: any failure ends this response only; the others are written
            answer.fail(error)
            continue
        state = answer.state
        last_s = state.written(now_s)
        if len(pieces) == 1 and last_s == since_s and gaps is state.metrics.itl:
            together += 1
        else:
            if gaps is not None:
                gaps.observe_many(now_s - since_s, together)
            gaps, since_s, together = state.metrics.itl, last_s, 1
            if len(pieces) > 1:
                gaps.observe_many((now_s - last_s) / len(pieces), len(pieces))
                gaps = None
        pieces.clear()
    if gaps is not None:
        gaps.observe_many(now_s - since_s, together)


def _write_one(choice: Choice, now_s: float) -> None:
    python_write_waiting((choice,), now_s)


on_token, write_waiting = python_on_token, python_write_waiting
try:
    from dynamo.serving import _token_path
except ImportError:  # Not built where no compiler was available.
    IS_COMPILED = False
else:
    IS_COMPILED = True
    on_token = _token_path.on_token

    def write_waiting(waiting: Sequence[Choice], now_s: float) -> None:
        """See `python_write_waiting`."""
        _token_path.write_waiting(waiting, now_s, _write_one)
