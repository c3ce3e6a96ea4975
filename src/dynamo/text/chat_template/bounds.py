"""Bounds: the steps, sizes and time that one rendering of a chat template may use. Pure.

`QUICK` and `LONG` are for rendering in the serving process, `FULL` for a child process. What exceeds the first two raises
`OverBudget`: the rendering is repeated with `FULL`, whose excess raises `TemplateRefused`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined

INT_BITS_MAX = 512  # Far beyond any count or hash; products of larger numbers are slow.
INT_MAX = 1 << INT_BITS_MAX
NODE_CHARS = 8  # Characters charged for an entry of a list or a dictionary, in addition to its text.
TIMED_CHARS = 4096  # An operation on at least this many characters checks the clock.
TIMED_TURNS = 16  # A loop checks the clock after this many iterations.
BOUNDS_KEY = "_dynamo_bounds"
"""Name under which a rendering's context carries its bounds."""


class TemplateRefused(TemplateError):
    """A template called `raise_exception`, or exceeded a bound."""


class OverBudget(TemplateError):
    """A template needs more than its budget in this process; it must be rendered in a child process."""


class Unlisted(OverBudget):
    """A template uses an operation that is only allowed in a child process."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one rendering."""

    turns: int
    """Iterations of loops and calls of macros."""
    chars: int
    """Characters produced by all operations in total."""
    value_chars: int
    """Maximum characters of one value."""
    seconds: float
    is_local: bool = False
    """Whether the budget is for the serving process."""


QUICK = Budget(turns=20_000, chars=4 << 20, value_chars=64 << 10, seconds=0.02, is_local=True)
"""On the event loop: an ordinary conversation takes 0.1 ms."""

LONG = Budget(turns=1_000_000, chars=256 << 20, value_chars=16 << 20, seconds=1.0, is_local=True)
"""In a thread: a conversation of a million characters takes about 10 ms."""

FULL = Budget(turns=10_000_000, chars=1 << 30, value_chars=64 << 20, seconds=10.0)
"""In a child process: enough to compare each of 3,000 messages with each."""

_SCALARS = frozenset({int, float, bool, type(None)})


class Bounds:
    """Remaining budget of one rendering."""

    __slots__ = ("_chars", "_deadline_s", "_is_wall", "_now", "_turns", "budget", "is_local", "value_chars")

    def __init__(self, budget: Budget = FULL, now: Callable[[], float] | None = None) -> None:
        """`now` is a clock; the default one measures processor time once `seconds` of wall time are over.

        Other threads and processes thus do not use up the budget, and a short rendering, which is over before, needs no
        system call. One that takes long may use up to twice the budget.
        """
        self.budget = budget
        self.is_local = budget.is_local
        self.value_chars = budget.value_chars
        self._turns = budget.turns
        self._chars = budget.chars
        self._is_wall = now is None
        self._now = time.perf_counter if now is None else now
        self._deadline_s = self._now() + budget.seconds

    def loop(self, values: Any) -> Any:
        """Return the values to iterate over. Raise `TemplateRefused` or `OverBudget`."""
        self._check_time()
        try:
            turns = len(values)
        except TypeError:
            return self._each(iter(values))
        if turns <= TIMED_TURNS:
            self.step(turns)
            return values
        return self._each(iter(values))

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        count = 0
        for value in values:
            count += 1
            if count == TIMED_TURNS:
                self.step(count)
                self._check_time()
                count = 0
            yield value
        self.step(count)

    def call(self) -> None:
        """Count one call of a macro."""
        self.step(1)
        self._check_time()

    def step(self, turns: int) -> None:
        """Count iterations of a loop."""
        self._turns -= turns
        if self._turns < 0:
            self.fail(f"its loops and macros take more than {self.budget.turns} steps")

    def charge(self, chars: int) -> None:
        """Count characters that an operation produces or reads."""
        if chars > self.value_chars:
            self.too_large()
        self._chars -= chars
        if self._chars < 0:
            self.fail(f"it makes more than {self.budget.chars} characters in total")
        if chars > TIMED_CHARS:
            self._check_time()

    def check(self, value: Any) -> Any:
        """Count and return the result of an operation."""
        kind = value.__class__
        if kind is str:
            self.charge(len(value))
        elif kind is int:
            if not -INT_MAX < value < INT_MAX:
                self.fail(f"it computes a number of more than {INT_BITS_MAX} bits")
        elif kind in (list, tuple, dict):
            self.charge(self.weight(value))
        elif isinstance(value, str):
            self.charge(len(value))
        return value

    def weight(self, value: Any) -> int:
        """Return the approximate number of characters of a value when written. Raise if it is too large."""
        total = 0
        waiting = [value]
        while waiting:
            one = waiting.pop()
            total += NODE_CHARS
            kind = one.__class__
            if kind is str:
                total += len(one)
            elif kind is dict:
                waiting += one
                waiting += one.values()
            elif kind is list or kind is tuple:
                waiting += one
            elif isinstance(one, str):
                total += len(one)
            elif self.is_local and kind not in _SCALARS and not isinstance(one, Undefined):
                self.unlisted(f"a {kind.__name__} within a list")
            if total > self.value_chars:
                self.too_large()
        return total

    def unlisted(self, what: str) -> None:
        """Raise `Unlisted` if only listed operations are allowed."""
        if self.is_local:
            raise Unlisted(what)

    def too_large(self) -> NoReturn:
        """Raise because a value is larger than one value may be."""
        self.fail(f"it makes a value of more than {self.value_chars} characters")

    def fail(self, reason: str) -> NoReturn:
        """Raise `OverBudget` in the serving process, where the rendering is repeated elsewhere, else `TemplateRefused`."""
        if self.is_local:
            raise OverBudget(reason)
        raise TemplateRefused(reason)

    def _check_time(self) -> None:
        if self._now() <= self._deadline_s:
            return
        if self._is_wall:
            self._is_wall, self._now = False, time.thread_time
            self._deadline_s = self._now() + self.budget.seconds
            return
        self.fail(f"it takes longer than {self.budget.seconds:g} s")
