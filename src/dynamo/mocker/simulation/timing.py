"""Timing: estimated duration of a GPU step by upstream's default polynomials, a fitted model or a profiler's points."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, cast

LEAST_STEP_MS = 1.0
"""Least duration of a decode step by upstream's models."""
ARRAY_STEPS = 16
"""Steps from which arrays are faster."""


class StepTimes(Protocol):
    """The duration of a step: the sum of a prefill and a decode part."""

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the milliseconds to compute `new_tokens` uncached prompt tokens."""
        ...

    def decode_ms(self, context_tokens: int, capacity_tokens: int, sequences: int) -> float:
        """Return the milliseconds for one more token of each sequence, given the cached tokens that are read."""
        ...


def decode_ends(
    times: StepTimes, start_ms: float, contexts: range, capacity_tokens: int, sequences: int
) -> Sequence[float]:
    """Return the end times of consecutive decode steps with these numbers of cached tokens, of which the first begins at `start_ms`."""
    is_polynomial = isinstance(times, Timing) and times.decode_ratio and contexts.start
    if not is_polynomial or len(contexts) < ARRAY_STEPS or contexts[-1] > capacity_tokens:
        durations = [times.decode_ms(context, capacity_tokens, sequences) for context in contexts]
        return list(accumulate(durations, initial=start_ms))[1:]
    import numpy as np

    assert isinstance(times, Timing)
    # `Timing.decode_ms` with the same operations in the same order, so that no bit differs. It is above `LEAST_STEP_MS` here.
    used = np.arange(contexts.start, contexts.stop, contexts.step, dtype=np.float64)
    used /= capacity_tokens
    ends = -25.74 * used
    ends *= used
    used *= 54.01
    ends += used
    ends += 5.74
    ends /= times.decode_ratio
    ends[0] += start_ms
    np.add.accumulate(ends, out=ends)
    return cast(Sequence[float], ends.data)  # Few of the times are read: a list would make an object for each.


@dataclass(frozen=True, slots=True)
class ScaledTimes:
    """Step times of a worker that is `speed` times as fast as `times`."""

    times: StepTimes
    speed: float

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the milliseconds to compute `new_tokens` uncached prompt tokens."""
        return self.times.prefill_ms(new_tokens) / self.speed

    def decode_ms(self, context_tokens: int, capacity_tokens: int, sequences: int) -> float:
        """Return the milliseconds for one more token of each running sequence."""
        return self.times.decode_ms(context_tokens, capacity_tokens, sequences) / self.speed


@dataclass(frozen=True, slots=True)
class Timing:
    """Upstream's polynomials, divided by a speedup ratio; a ratio of 0 means no delay."""

    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0

    @property
    def decode_ratio(self) -> float:
        """The speedup of decode steps."""
        return self.speedup_ratio * self.decode_speedup_ratio

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the milliseconds to compute `new_tokens` uncached prompt tokens."""
        if new_tokens == 0 or self.speedup_ratio == 0:
            return 0.0
        return (4.209989e-07 * new_tokens * new_tokens + 1.518344e-02 * new_tokens + 16.50142) / self.speedup_ratio

    def decode_ms(self, context_tokens: int, capacity_tokens: int, sequences: int = 0) -> float:
        """Return the milliseconds for one more token of each sequence, given the cached tokens that are read."""
        ratio = self.decode_ratio
        if context_tokens == 0 or ratio == 0:
            return 0.0
        used = min(context_tokens / capacity_tokens, 1.0)
        return max(LEAST_STEP_MS, -25.74 * used * used + 54.01 * used + 5.74) / ratio


@dataclass(frozen=True, slots=True)
class FittedTiming:
    """A model linear in the content of a step, in milliseconds (`dynamo replay fit`)."""

    step_ms: float
    """Constant part of a decode step."""
    request_ms: float
    """Decode time per sequence."""
    kv_token_ms: float
    """Decode time per token that is read from the cache."""
    prompt_ms: float = 0.0
    """Constant part of prefill."""
    prompt_token_ms: float = 0.0
    """Prefill time per token."""

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the milliseconds to compute `new_tokens` uncached prompt tokens."""
        return self.prompt_ms + self.prompt_token_ms * new_tokens if new_tokens else 0.0

    def decode_ms(self, context_tokens: int, capacity_tokens: int, sequences: int) -> float:
        """Return the milliseconds for one more token of each running sequence."""
        if sequences == 0:
            return 0.0
        return self.step_ms + self.request_ms * sequences + self.kv_token_ms * context_tokens


@dataclass(frozen=True, slots=True)
class ProfiledTiming:
    """Linear interpolation between a profiler's points, and extrapolation beyond them, as in the released mocker.

    A table with one point has that value everywhere.
    """

    prefill_tokens: Sequence[float]
    prefill_times_ms: Sequence[float]
    kv_tokens: Sequence[float]
    context_lengths: Sequence[float]
    step_times_ms: Sequence[Sequence[float]]
    """Step times by cached tokens, then by the mean context length of a sequence."""
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the milliseconds to compute `new_tokens` uncached prompt tokens."""
        if new_tokens == 0 or self.speedup_ratio == 0:
            return 0.0
        times, (at, part) = self.prefill_times_ms, _between(self.prefill_tokens, new_tokens)
        if part is None:
            return times[at] / self.speedup_ratio
        return max(0.0, times[at] + (times[at + 1] - times[at]) * part) / self.speedup_ratio

    def decode_ms(self, context_tokens: int, capacity_tokens: int, sequences: int) -> float:
        """Return the milliseconds for one more token of each running sequence."""
        ratio = self.speedup_ratio * self.decode_speedup_ratio
        if sequences == 0 or ratio == 0:
            return 0.0
        rows, (at, part) = self.step_times_ms, _between(self.kv_tokens, context_tokens)
        column, share = _between(self.context_lengths, context_tokens / sequences)
        found = _along(rows[at], column, share)
        if part is not None:
            found += (_along(rows[at + 1], column, share) - found) * part
        return (found if part is share is None else max(LEAST_STEP_MS, found)) / ratio


def _between(points: Sequence[float], value: float) -> tuple[int, float | None]:
    """Return the interval of a value or the one nearest to it, and the place in it: 0 at its begin, 1 at its end.

    The place is None if there is one point only.
    """
    if len(points) == 1:
        return 0, None
    at = min(max(bisect_left(points, value) - 1, 0), len(points) - 2)
    return at, (value - points[at]) / (points[at + 1] - points[at])


def _along(row: Sequence[float], at: int, part: float | None) -> float:
    return row[at] if part is None else row[at] + (row[at + 1] - row[at]) * part
