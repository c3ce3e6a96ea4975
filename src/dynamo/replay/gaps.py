"""GapHistogram: times between the tokens of all requests, in constant memory.

A bin is 0.05 % wide, so that a percentile differs from the exact one by at most half of that. Mean and extremes are exact.
"""

import math
from dataclasses import dataclass, field

BINS_PER_E = 2000
"""Bins for each factor of e."""
SHORTEST_MS = 1e-6
"""Shorter gaps count as this one, a nanosecond."""
PERCENTILES = {"median": 0.5, "p99": 0.99, "p95": 0.95, "p90": 0.90, "p75": 0.75}


@dataclass(slots=True)
class Moments:
    """Count, sums and extremes of values."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = 0.0

    def add(self, value: float, count: int) -> None:
        """Add a value that occurred `count` times."""
        self.count += count
        self.total += value * count
        self.squares += value * value * count
        if not self.least <= value <= self.most:  # Rare: no calls otherwise.
            self.least, self.most = min(self.least, value), max(self.most, value)

    def add_many(self, mean: float, variance: float, least: float, most: float, count: int) -> None:
        """Add `count` values of this mean and variance."""
        self.count += count
        self.total += mean * count
        self.squares += (mean * mean + variance) * count
        if least < self.least or most > self.most:
            self.least, self.most = min(self.least, least), max(self.most, most)

    def statistics(self) -> dict[str, float | None]:
        """Return mean, extremes and population standard deviation."""
        mean = self.total / self.count
        deviation = math.sqrt(max(0.0, self.squares / self.count - mean * mean))
        return {"mean": mean, "min": self.least, "max": self.most, "std": deviation}


@dataclass(slots=True)
class GapHistogram:
    """Times between tokens in milliseconds, and their inverse: tokens per second and user."""

    gaps: Moments = field(default_factory=Moments)
    rates: Moments = field(default_factory=Moments)
    _bins: dict[int, int] = field(default_factory=dict)

    def add(self, gap_ms: float, count: int = 1) -> None:
        """Add a gap that `count` requests had."""
        gap_ms = max(gap_ms, SHORTEST_MS)
        self.gaps.add(gap_ms, count)
        self.rates.add(1000 / gap_ms, count)
        place = math.floor(math.log(gap_ms) * BINS_PER_E)
        self._bins[place] = self._bins.get(place, 0) + count

    def add_steps(self, first_ms: float, last_ms: float, total_ms: float, steps: int, count: int) -> None:
        """Add the gaps of `count` requests in consecutive steps whose durations change evenly from the first to the last.

        The cost does not depend on the number of steps: a bin gets the steps whose durations are in it.
        """
        least, most = sorted((max(first_ms, SHORTEST_MS), max(last_ms, SHORTEST_MS)))
        low, high = math.floor(math.log(least) * BINS_PER_E), math.floor(math.log(most) * BINS_PER_E)
        done, bins = 0, self._bins
        for place in range(low, high):
            below = round(steps * (math.exp((place + 1) / BINS_PER_E) - least) / (most - least))
            if below > done:
                bins[place] = bins.get(place, 0) + (below - done) * count
                done = below
        if steps > done:
            bins[high] = bins.get(high, 0) + (steps - done) * count
        mean_ms = max(total_ms / steps, SHORTEST_MS)
        spread = (most - least) ** 2 * (steps + 1) / (12 * (steps - 1)) if steps > 1 else 0.0
        self.gaps.add_many(mean_ms, spread, least, most, steps * count)
        rate, slope = 1000 / mean_ms, (1000 / mean_ms**2) ** 2
        self.rates.add_many(rate * (1 + spread / mean_ms**2), spread * slope, 1000 / most, 1000 / least, steps * count)

    def itl_ms(self) -> dict[str, float | None]:
        """Return the statistics of the gaps, under the names of `report.statistics`."""
        return self.gaps.statistics() | {
            name: self._percentile(part, self.gaps.least, self.gaps.most) for name, part in PERCENTILES.items()
        }

    def tokens_per_s(self) -> dict[str, float | None]:
        """Return the statistics of the tokens per second and user."""
        longest, shortest = self.gaps.most, self.gaps.least
        return self.rates.statistics() | {
            name: 1000 / self._percentile(1 - part, shortest, longest) for name, part in PERCENTILES.items()
        }

    def _percentile(self, part: float, least: float, most: float) -> float:
        """Return the middle of the bin with the value of the nearest rank."""
        rank, seen = nearest_rank(self.gaps.count, part), 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen > rank:
                return min(max(math.exp((place + 0.5) / BINS_PER_E), least), most)
        return most


def nearest_rank(count: int, part: float) -> int:
    """Return the index of a percentile in `count` sorted values."""
    return min(count - 1, math.floor(part * (count - 1) + 0.5))
