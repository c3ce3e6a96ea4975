"""Spans: which rows of a step belong to which sequence, and where the tokens that they attend to are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]

Run = tuple[int, int]
"""First slot and the slot after the last."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Rows of one sequence in a batch: `count` rows from `row`, which attend to `context` tokens including themselves."""

    row: int
    count: int
    context: int
    runs: Sequence[Run]

    def part(self, first: int, end: int, row: int) -> "TokenSpan":
        """Return a span of the rows from `first` to `end` of this one, which starts at `row`."""
        context = self.context - self.count + end
        return TokenSpan(row, end - first, context, between(self.runs, 0, context))


def between(runs: Sequence[Run], first: int, end: int) -> list[Run]:
    """Return the runs of the slots from the `first` up to, but without, the `end`th of all runs."""
    found: list[Run] = []
    at = 0
    for start, stop in runs:
        low, high = max(start, start + first - at), min(stop, start + end - at)
        if low < high:
            found.append((low, high))
        at += stop - start
        if at >= end:
            break
    return found


def narrowed(spans: Sequence[TokenSpan], wanted: Ids) -> tuple[list[TokenSpan], Ids]:
    """Return spans of only the rows that contain the wanted ones, as spans of a batch, and the rows of that batch in this one."""
    order = np.sort(wanted)
    kept: list[tuple[TokenSpan, int, int]] = []
    for span in spans:
        low, high = np.searchsorted(order, (span.row, span.row + span.count))
        if low < high:
            kept.append((span, int(order[low]) - span.row, int(order[high - 1]) - span.row + 1))
    kept.sort(key=lambda one: (one[2] - one[1] > 1, one[0].context - one[0].count + one[2]))
    found: list[TokenSpan] = []
    rows: list[int] = []
    for span, first, end in kept:
        found.append(span.part(first, end, len(rows)))
        rows += range(span.row + first, span.row + end)
    return found, np.array(rows, dtype=np.intp)
