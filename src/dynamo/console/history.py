"""History: a bounded ring of samples, computed from successive totals. Pure."""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from dynamo.console.totals import ModelTotals, Totals

INTERVAL_S = 1.0
SAMPLES_MAX = 900
"""Fifteen minutes."""
RATE_WINDOW_S = 3.0
"""Time over which rates are averaged: shorter ones jump between whole requests."""
LATENCY_WINDOW_S = 15.0
"""Time over which percentiles are computed: shorter ones contain too few requests."""
GAP_S = 5.0
"""A longer pause between samples, in which no one watched, ends the windows."""


class Quantiles(msgspec.Struct):
    """Percentiles of a latency in milliseconds; None without observations."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Point(msgspec.Struct):
    """Activity at one time: rates per second, present numbers, latencies."""

    requests: float = 0.0
    failures: float = 0.0
    input_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    ttft: Quantiles = msgspec.field(default_factory=Quantiles)
    itl: Quantiles = msgspec.field(default_factory=Quantiles)


class ActivitySample(msgspec.Struct):
    """State of a frontend at one time."""

    at: float
    """Seconds since the epoch."""
    total: Point
    """All models together."""
    models: dict[str, Point]
    workers: int = 0
    kv_usage: float | None = None
    """Share of the workers' KV blocks in use, 0 to 1; None if unknown."""
    router_waiting: int = 0
    """Requests in the queues of KV routers."""


class SampleHistory:
    """Samples of one frontend, the newest last."""

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self.samples: deque[ActivitySample] = deque(maxlen=samples_max)
        self._totals: deque[tuple[float, Totals]] = deque()

    def add(self, at: float, totals: Totals) -> ActivitySample | None:
        """Add the totals at a time; return the sample, None for the first ones after a pause, which have no rates."""
        states = self._totals
        if states and at - states[-1][0] > GAP_S:
            states.clear()
        states.append((at, totals))
        while len(states) > 2 and at - states[1][0] >= LATENCY_WINDOW_S:
            states.popleft()
        if len(states) < 2 or at <= states[0][0]:
            return None
        names = totals.keys()
        points = {name: self._point([(when, one.get(name)) for when, one in states]) for name in names}
        everything = [(when, _sum(one)) for when, one in states]
        sample = ActivitySample(at, self._point(everything), points)
        self.samples.append(sample)
        return sample

    def last(self, count: int) -> list[ActivitySample]:
        """Return the last samples, the newest last."""
        return list(self.samples)[max(0, len(self.samples) - count) :]

    @staticmethod
    def _point(states: Sequence[tuple[float, ModelTotals | None]]) -> Point:
        """Return the activity at the end of a series of states."""
        at, now = states[-1]
        assert now is not None, "the last state has the models whose points are computed"
        oldest = states[0][1] or ModelTotals()
        began, before = next(
            (when, one) for when, one in _backwards(states) if at - when >= RATE_WINDOW_S or when == states[0][0]
        )
        before = before or ModelTotals()
        rate = 1 / (at - began)
        ttft, itl = now.ttft.since(oldest.ttft), now.itl.since(oldest.itl)
        return Point(
            requests=_rate(now.succeeded + now.failed, before.succeeded + before.failed, rate),
            failures=_rate(now.failed, before.failed, rate),
            input_tokens=_rate(now.input_tokens, before.input_tokens, rate),
            cached_tokens=_rate(now.cached_tokens, before.cached_tokens, rate),
            output_tokens=_rate(now.output_tokens, before.output_tokens, rate),
            in_flight=now.in_flight,
            queued=now.queued,
            ttft=Quantiles(*(_ms(ttft.quantile(share)) for share in (0.5, 0.95, 0.99))),
            itl=Quantiles(*(_ms(itl.quantile(share)) for share in (0.5, 0.95, 0.99))),
        )


def _backwards(states: Sequence[tuple[float, ModelTotals | None]]) -> Iterator[tuple[float, ModelTotals | None]]:
    """Yield the states before the last one, the newest first."""
    return iter(states[-2::-1])


def _sum(totals: Totals) -> ModelTotals:
    found = ModelTotals()
    for one in totals.values():
        found = found.plus(one)
    return found


def _rate(now: float, before: float, rate: float) -> float:
    """Return an increase per second; a total that a restart of a process lowered did not increase."""
    return round(max(0.0, now - before) * rate, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
