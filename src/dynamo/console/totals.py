"""Totals: cumulative numbers of the requests of one frontend, and of several processes that share a port."""

from collections.abc import Iterable

import msgspec

from dynamo.core.metrics import Histogram
from dynamo.serving.metrics import FrontendMetrics


class Buckets(msgspec.Struct):
    """A histogram: upper bounds, the number of observations in each bucket and beyond the last bound, and their sum."""

    bounds: list[float] = []
    counts: list[float] = []
    sum: float = 0.0

    @classmethod
    def of(cls, histogram: Histogram) -> "Buckets":
        """Return a copy of a histogram's state."""
        return cls(histogram.bounds, list(histogram.counts), histogram.sum)

    def plus(self, other: "Buckets") -> "Buckets":
        """Return the sum of two histograms; of different bounds, the first."""
        if not self.counts:
            return other
        if self.bounds != other.bounds:
            return self
        counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        return Buckets(self.bounds, counts, self.sum + other.sum)

    def since(self, earlier: "Buckets") -> "Buckets":
        """Return the observations after an earlier state; those of a process that restarted count from its start."""
        if self.bounds != earlier.bounds:
            return self
        counts = [max(0.0, one - two) for one, two in zip(self.counts, earlier.counts, strict=True)]
        return Buckets(self.bounds, counts, max(0.0, self.sum - earlier.sum))

    def quantile(self, share: float) -> float | None:
        """Return the value below which `share` of the observations are, linear within a bucket; None without any.

        Observations beyond the last bound count as that bound, as in Prometheus.
        """
        total = sum(self.counts)
        if not total:
            return None
        rank, before = share * total, 0.0
        for place, count in enumerate(self.counts):
            if count and before + count >= rank:
                if place >= len(self.bounds):
                    break
                low = self.bounds[place - 1] if place else min(0.0, self.bounds[0])
                return low + (self.bounds[place] - low) * (rank - before) / count
            before += count
        return self.bounds[-1] if self.bounds else None


class ModelTotals(msgspec.Struct):
    """Cumulative numbers of one model; `in_flight` and `queued` are present values."""

    succeeded: float = 0.0
    failed: float = 0.0
    input_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    """Requests without a first token."""
    ttft: Buckets = msgspec.field(default_factory=Buckets)
    itl: Buckets = msgspec.field(default_factory=Buckets)

    def plus(self, other: "ModelTotals") -> "ModelTotals":
        """Return the sum of both."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in NUMBERS}
        return ModelTotals(**sums, ttft=self.ttft.plus(other.ttft), itl=self.itl.plus(other.itl))


NUMBERS = ("succeeded", "failed", "input_tokens", "cached_tokens", "output_tokens", "in_flight", "queued")

Totals = dict[str, ModelTotals]
"""By model."""


def totals_of(metrics: FrontendMetrics) -> Totals:
    """Return the totals of this process."""
    found: Totals = {}
    for name, series in metrics.models().items():
        found[name] = ModelTotals(
            input_tokens=series.input_tokens.sum,
            cached_tokens=series.cached_tokens.sum,
            output_tokens=series.output_tokens_total.value,
            in_flight=series.inflight.value,
            queued=series.queued.value,
            ttft=Buckets.of(series.ttft),
            itl=Buckets.of(series.itl),
        )
    for name, (succeeded, failed) in metrics.ended().items():
        totals = found.setdefault(name, ModelTotals())
        totals.succeeded, totals.failed = succeeded, failed
    return found


def merged(all_totals: Iterable[Totals]) -> Totals:
    """Return the sum of the totals of several processes."""
    found: Totals = {}
    for totals in all_totals:
        for name, one in totals.items():
            found[name] = found[name].plus(one) if name in found else one
    return found
