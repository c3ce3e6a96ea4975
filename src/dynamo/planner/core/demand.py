"""Demand: the distribution of a role's future work, from its measured past and the measured errors of earlier forecasts.

Work is the busy time that arriving requests cause, in seconds per second, which is a number of replicas. The forecast is the mean of
the longest window that no shorter one contradicts, plus a trend that is reduced by its uncertainty; its quantiles are those of the errors
of earlier forecasts, whatever their distribution: bursts have none that is normal.
"""

import math
from collections import deque
from dataclasses import dataclass, field

LEVEL_WINDOWS_S = (5.0, 20.0, 60.0, 180.0)
"""Windows of the present level: a long one has less noise, a short one follows a change."""
CONTRADICTION = 3.0
"""Standard deviations of the arrivals' noise by which a shorter window contradicts a longer one."""
GRAIN_FACTOR = 2.0
"""Second moment of a request's work over its squared mean: 1 for equal requests, 2 for exponentially distributed ones."""
TREND_WINDOW_S = 60.0
"""Window of the slope."""
HISTORY_S = 600.0
"""Longest time for which errors are remembered: the variance follows a change of the load's kind within minutes."""
HISTORY_HORIZONS, HISTORY_MIN_S = 20.0, 120.0
"""Errors are remembered for this many horizons: where replicas start in seconds, a removal that was wrong costs little."""
TREND_DAMPING = 0.5
"""Fraction of the slope that is extrapolated from a window shorter than that of the slope."""
SAMPLES_MAX = 4096
"""Samples kept, more than a minute of ticks per 20 ms."""
ERRORS_MIN = 6
"""Errors before they replace `RELATIVE_PRIOR`."""
PEAK_GROWTH = 0.15
"""Growth over the mean that is possible beyond the peak of the past: the noise of Poisson arrivals over a horizon."""
RELATIVE_PRIOR = 0.3
"""Error over the level, for any quantile, until errors are measured."""


@dataclass(frozen=True, slots=True)
class DemandForecast:
    """Distribution of the mean work over a horizon, in replicas kept busy."""

    mean: float
    errors: tuple[float, ...]
    """Errors of earlier forecasts, ascending."""
    peak: float = math.inf
    """Largest mean over the horizon in the remembered past."""

    def quantile(self, part: float) -> float:
        """Return the value that the work does not exceed with a probability; never negative.

        Errors measured at low demand do not add to a high demand: the value is at most the peak of the past, or
        `PEAK_GROWTH` above the mean.
        """
        if not self.errors:
            return self.mean
        at = part * (len(self.errors) - 1)
        low = int(at)
        high = min(low + 1, len(self.errors) - 1)
        error = self.errors[low] + (self.errors[high] - self.errors[low]) * (at - low)
        return max(0.0, min(self.mean + error, max(self.mean * (1 + PEAK_GROWTH), self.peak)))


@dataclass(slots=True)
class DemandHistory:
    """Work over time. One owner."""

    _samples: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """Time of the end, duration and work of each interval."""
    _forecasts: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """Start, end and mean of forecasts whose horizon is not over."""
    _errors: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """Time of the end, actual mean and error of forecasts whose horizon is over."""
    _grain_s: float = 0.0
    """Variance of the mean work of a window, times its length, over the mean."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was measured."""
        return not self._samples

    def clear_after(self, now_s: float) -> None:
        """Forget what is later than a time, after the clock was set back."""
        for kept in (self._samples, self._forecasts, self._errors):
            while kept and kept[-1][0] > now_s:
                kept.pop()

    def add(self, now_s: float, duration_s: float, work: float, request_s: float = 0.0) -> None:
        """Add the work of the interval that ends now; `request_s` is the work of its mean request, the unit of its noise."""
        self._grain_s = GRAIN_FACTOR * request_s
        self._samples.append((now_s, duration_s, work))
        oldest_s = now_s - HISTORY_S
        while self._samples[0][0] < oldest_s:
            self._samples.popleft()
        while self._errors and self._errors[0][0] < oldest_s:
            self._errors.popleft()
        while self._forecasts and self._forecasts[0][1] <= now_s:
            begin_s, end_s, mean = self._forecasts.popleft()
            found = [one for at_s, _, one in self._samples if begin_s < at_s <= end_s]
            if found:
                actual = math.fsum(found) / len(found)
                self._errors.append((now_s, actual, actual - mean))

    def forecast(self, now_s: float, horizon_s: float) -> DemandForecast:
        """Return the distribution of the mean work from now to the horizon."""
        window_s, level = self._level(now_s)
        growth = self._slope(now_s, window_s) * (horizon_s + window_s) / 2
        mean = max(0.0, level + growth)
        self._forecasts.append((now_s, now_s + horizon_s, mean))
        since_s = now_s - min(HISTORY_S, max(HISTORY_MIN_S, HISTORY_HORIZONS * horizon_s))
        remembered = [(actual, error) for at_s, actual, error in self._errors if at_s >= since_s]
        if len(remembered) < ERRORS_MIN:
            return DemandForecast(mean, (RELATIVE_PRIOR * level,))
        peak = max(actual for actual, _ in remembered)
        return DemandForecast(mean, tuple(sorted(error for _, error in remembered)), peak)

    def _level(self, now_s: float) -> tuple[float, float]:
        """Return the longest window that no shorter one contradicts, and its mean work."""
        means: list[tuple[float, float]] = []
        for window_s in LEVEL_WINDOWS_S:
            mean = self._mean_since(now_s - window_s)
            if any(
                abs(one - mean) > CONTRADICTION * math.sqrt(self._grain_s * mean / shorter_s)
                for shorter_s, one in means
            ):
                break
            means.append((window_s, mean))
        return means[-1]

    def _mean_since(self, since_s: float) -> float:
        found = [work for at_s, _, work in self._samples if at_s > since_s]
        if not found:
            return self._samples[-1][2] if self._samples else 0.0
        return math.fsum(found) / len(found)

    def _slope(self, now_s: float, window_s: float) -> float:
        """Return the change of work per second that is expected to continue.

        The least-squares slope is multiplied by 1 - 1 / t², where t is its ratio to its standard error: noise has no trend.
        """
        points = [(at_s, work) for at_s, _, work in self._samples if at_s > now_s - max(window_s, TREND_WINDOW_S)]
        if len(points) < ERRORS_MIN or window_s == LEVEL_WINDOWS_S[0]:
            return 0.0
        centre = math.fsum(at_s for at_s, _ in points) / len(points)
        middle = math.fsum(work for _, work in points) / len(points)
        spread = math.fsum((at_s - centre) ** 2 for at_s, _ in points)
        if spread <= 0:
            return 0.0
        slope = math.fsum((at_s - centre) * work for at_s, work in points) / spread
        rest = math.fsum((work - middle - slope * (at_s - centre)) ** 2 for at_s, work in points) / (len(points) - 2)
        kept = max(0.0, 1 - rest / spread / slope**2) if slope else 0.0
        return slope * kept * (TREND_DAMPING if window_s < TREND_WINDOW_S else 1.0)
