"""Coast: consecutive steps of a rank in which no prompt is computed and no sequence ends, computed together.

    steps   0 1 2 3 4 5 6 7 8 9 …                a border: a step in which sequences need another block
                  │       └ border: blocks are allocated when it begins, and reported when it ends
                  └ done: steps that the simulation has executed

The end times of all steps are known from the start, because a decode step's duration follows from the cached tokens. A border changes
no time, so that the coast continues after it; its cache events leave the rank at the end of its step.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.blocks import Change
from dynamo.protocols.load import ForwardPass, ScheduledRequests
from dynamo.replay.outcome import Flight


class CompletedSteps(NamedTuple):
    """Completed steps."""

    forward_pass: ForwardPass
    """The mean of the steps' forward passes."""
    steps: int
    tokens: int
    """Number of tokens generated for all answers."""
    ends: Sequence[float] = ()
    """End times of the steps of a coast, in each of which every answer gets a token."""


@dataclass(slots=True)
class Coast:
    """Steps `0` to `len(ends) - 1`, counted from `since_ms`."""

    simulation: Batching[Flight]
    since_ms: float
    ends: Sequence[float]
    """End times of the steps."""
    done: int = field(init=False, default=0)
    """Steps that the simulation has executed."""
    noted: int = field(init=False, default=0)
    """Steps that are in the statistics."""
    border: int = field(init=False, default=0)
    """Number of the next border; `len(ends)` or more: there is none."""
    crossing_ms: float = field(init=False, default=math.inf)
    """Time at which the next border begins."""
    _sequences: int = field(init=False)
    _context_tokens: int = field(init=False)
    """Cached tokens at the start."""

    def __post_init__(self) -> None:
        self._sequences, self._context_tokens = len(self.simulation.decoding), self.simulation.context_tokens
        self._expect_border()

    def begin_of(self, step: int) -> float:
        """Return the time at which a step begins."""
        return self.ends[step - 1] if step else self.since_ms

    def begun(self, now_ms: float) -> int:
        """Return the number of steps that have begun before a time, at least one."""
        return min(bisect_left(self.ends, now_ms) + 1, len(self.ends))

    def cross(self) -> list[Change]:
        """Execute the steps up to the next border and that one; return the changes that leave the rank at its end."""
        border = self.border
        if border > self.done:
            self.simulation.skip(border - self.done)
        changes = self.simulation.cross(self.crossing_ms)
        self.done = border + 1
        self._expect_border()
        return changes

    def advance(self, steps: int) -> None:
        """Execute the steps up to number `steps`, of which none is a border."""
        if steps > self.done:
            assert steps <= self.border, "a step needs a block"
            self.simulation.skip(steps - self.done)
            self.done = steps

    def passed(self, steps: int) -> CompletedSteps:
        """Return the mean of the steps that are not in the statistics yet, up to number `steps`, and count them as noted."""
        first, self.noted = self.noted, steps
        count, sequences = steps - first, self._sequences
        if not count:
            return CompletedSteps(ForwardPass(), 0, 0)
        ends = self.ends if count == len(self.ends) else self.ends[first:steps]
        context = self._context_tokens + sequences * first + sequences * (count + 1) // 2
        seconds = (self.ends[steps - 1] - self.begin_of(first)) / 1000 / count
        scheduled = ScheduledRequests(num_decode_requests=sequences, sum_decode_kv_tokens=context)
        return CompletedSteps(ForwardPass(seconds, scheduled), count, count * sequences, ends)

    def _expect_border(self) -> None:
        self.border = border = self.done + self.simulation.border_in
        if border >= len(self.ends):
            self.crossing_ms = math.inf
        else:
            self.crossing_ms = self.ends[border - 1] if border else self.since_ms
