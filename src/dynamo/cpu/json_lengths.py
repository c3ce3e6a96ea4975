"""JSON lengths: bounds on numbers and strings of JSON where the grammar allows unlimited length. Pure.

A schema such as `{"type": "integer"}` sets no limit, and a model that never chooses the end of a number writes digits up
to `max_tokens`. Two limits apply wherever the grammar allows the end, so that schemas that require more are still satisfied:

* a number ends after `DIGITS_MAX` digits;
* a string that repeats a short token sequence ends after `REPEATED_TOKENS_MAX` repeated tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

DIGITS_MAX = 20  # As many as an unsigned integer of 64 bits has; a double has 17.
PERIOD_MAX = 8  # Tokens that are repeated together.
REPEATED_TOKENS_MAX = 256  # Thirty-two repetitions at least: beyond what a text contains on purpose.

DIGITS, NUMBER = frozenset(b"0123456789"), frozenset(b"0123456789.eE+-")
LETTERS = frozenset(b"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ")  # Without those of an exponent.


@dataclass(frozen=True, slots=True)
class TokenStarts:
    """Masks of the vocabulary by the kind of character with which a token begins."""

    texts: Sequence[bytes]
    number: Bools
    letter: Bools
    quote: Bools

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> "TokenStarts":
        """Classify the tokens, given the text of each."""
        first = [text[0] if text else -1 for text in texts]
        kinds = (NUMBER, LETTERS, frozenset(b'"'))
        number, letter, quote = (np.array([one in kind for one in first], np.bool_) for kind in kinds)
        return cls(texts, number, letter, quote)


class JsonLengths:
    """Length counters of one choice's output."""

    def __init__(self, starts: TokenStarts) -> None:
        self._starts = starts
        self._digits = 0
        """Digits of the number at the end of the text."""
        self._last: deque[int] = deque(maxlen=PERIOD_MAX)
        self._repeated = [0] * PERIOD_MAX
        """For each distance d + 1: trailing tokens that equal the token that many places before them."""

    def fresh(self) -> "JsonLengths":
        """Return new counters with the same limits for another choice."""
        return JsonLengths(self._starts)

    def take(self, token: int) -> None:
        """Count the chosen token."""
        text = self._starts.texts[token]
        rest = text
        while rest and rest[-1] in NUMBER:
            rest = rest[:-1]
        digits = sum(one in DIGITS for one in text[len(rest) :])
        self._digits = digits if rest else self._digits + digits
        for distance in range(1, PERIOD_MAX + 1):
            is_repeated = len(self._last) >= distance and self._last[-distance] == token
            self._repeated[distance - 1] = self._repeated[distance - 1] + 1 if is_repeated else 0
        self._last.append(token)

    def limited(self, allowed: Bools, *, may_end: bool) -> Bools:
        """Return the allowed tokens reduced by the limits; `may_end`: the text may end here."""
        starts = self._starts
        if self._digits >= DIGITS_MAX and not (allowed & (starts.letter | starts.quote)).any():
            ending = allowed & ~starts.number  # In a number: neither a letter nor a quote may follow a digit.
            return ending if may_end or ending.any() else allowed
        if max(self._repeated) >= REPEATED_TOKENS_MAX and (allowed & starts.letter).any():
            closing = allowed & starts.quote  # In a string: any letter may follow.
            return closing if closing.any() else allowed
        return allowed
