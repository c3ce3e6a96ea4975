"""JSON lengths: where a number or a string of JSON has to end although its grammar lets it go on for ever. Pure.

A schema such as `{"type": "integer"}` sets no limit, and a model that never chooses the end of a number writes digits up
to `max_tokens`. Two limits apply wherever the grammar allows the end, so that a schema that demands more still gets it:

* a number ends after `DIGITS_MAX` digits;
* a string that repeats a few tokens over and over ends after `REPEATED_TOKENS_MAX` of them.
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
    """Which tokens of a vocabulary begin with which kind of character."""

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
    """The lengths of what one choice has written last."""

    def __init__(self, starts: TokenStarts) -> None:
        self._starts = starts
        self._digits = 0
        """Of the number at the end of the text."""
        self._last: deque[int] = deque(maxlen=PERIOD_MAX)
        self._repeated = [0] * PERIOD_MAX
        """Tokens at the end of the text that equal the one so many places before them, by the distance less one."""

    def fresh(self) -> "JsonLengths":
        """Return the same limits for another choice."""
        return JsonLengths(self._starts)

    def take(self, token: int) -> None:
        """Add the token that was chosen."""
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
        """Return the tokens that may come, of those that the grammar allows; `may_end`: the text may end here."""
        starts = self._starts
        if self._digits >= DIGITS_MAX and not (allowed & (starts.letter | starts.quote)).any():
            ending = allowed & ~starts.number  # In a number: neither a letter nor a quote may follow a digit.
            return ending if may_end or ending.any() else allowed
        if max(self._repeated) >= REPEATED_TOKENS_MAX and (allowed & starts.letter).any():
            closing = allowed & starts.quote  # In a string: any letter may follow.
            return closing if closing.any() else allowed
        return allowed
