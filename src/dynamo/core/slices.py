"""Slices: long sequences in parts, so that no single call of a C function holds the interpreter lock for long.

A pass over a million values takes 10 to 40 ms. Between two parts other threads, such as the event loop's, may run.
"""

from collections.abc import Iterator
from typing import Any

SLICE_VALUES = 1 << 16
"""Values of a part: a pass over them takes one or two milliseconds."""


def slices(values: Any) -> Iterator[Any]:
    """Yield a sequence in parts, at least one. A short sequence is its own part, and not copied."""
    if len(values) <= SLICE_VALUES:
        yield values
        return
    for start in range(0, len(values), SLICE_VALUES):
        yield values[start : start + SLICE_VALUES]


def joined(values: Any) -> list[Any]:
    """Return a list of the values of a library's sequence."""
    found: list[Any] = []
    for part in slices(values):
        found += part
    return found
