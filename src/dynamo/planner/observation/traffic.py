"""Traffic window: requests and averages of an interval from cumulative counters of several frontends. Pure.

A number that cannot be known is None, never zero: without a frontend, while one of them cannot be read, or before two readings of
one exist. The window then continues, so that the next observation covers the time that was missed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dynamo.planner.core.router_queue import EMPTY, QueuedPrompts
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.observation.exposition import SeriesKey
from dynamo.protocols.planner import TrafficObservation

FRONTEND = "dynamo_frontend_"
STARTED, ENDED = FRONTEND + "requests_started_total", FRONTEND + "requests_total"
ISL, OSL = FRONTEND + "input_sequence_tokens", FRONTEND + "output_sequence_tokens"
TTFT, ITL = FRONTEND + "time_to_first_token_seconds", FRONTEND + "inter_token_latency_seconds"
DURATION = FRONTEND + "request_duration_seconds"
HIT_RATE = "dynamo_component_router_kv_hit_rate"
UPTIME = "dynamo_component_uptime_seconds"
AVERAGES = (ISL, OSL, TTFT, ITL, DURATION, HIT_RATE)
COUNTERS = frozenset({STARTED, ENDED, *(f"{name}_{part}" for name in AVERAGES for part in ("sum", "count"))})
QUEUED_REQUESTS, QUEUED_ISL, QUEUED_CACHED = (
    FRONTEND + "router_queue_pending_" + name for name in ("requests", "isl_tokens", "cached_tokens")
)
QUEUES = frozenset({QUEUED_REQUESTS, QUEUED_ISL, QUEUED_CACHED})
NAMES = COUNTERS | QUEUES | {UPTIME}

Samples = Mapping[SeriesKey, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraffic:
    """Traffic of one window with the latencies that clients saw; None: unknown."""

    traffic: TrafficObservation | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    request_duration_s: float | None = None
    unknown: str = ""
    """Why `traffic` is None."""


@dataclass(slots=True)
class _SourceTotals:
    """Readings of one frontend: the last one, and the increase since the window began."""

    last: dict[SeriesKey, float] = field(default_factory=dict)
    increase: dict[str, float] = field(default_factory=dict)
    queues: dict[SeriesKey, float] = field(default_factory=dict)

    def add(self, name: str, amount: float) -> None:
        self.increase[name] = self.increase.get(name, 0.0) + amount


@dataclass(frozen=True, slots=True)
class RouterQueues:
    """Requests that wait in the queues of KV routers, for prefill workers and for decode or aggregated ones."""

    prefill: QueuedPrompts = EMPTY
    decode: QueuedPrompts = EMPTY


def queues_of(samples: Iterable[tuple[SeriesKey, float]]) -> RouterQueues:
    """Return the sums of the queue gauges."""
    totals = dict.fromkeys(((role, name) for role in (PREFILL, DECODE) for name in QUEUES), 0.0)
    for key, value in samples:
        totals[PREFILL if key.label("worker_type") == PREFILL else DECODE, key.name] += value
    return RouterQueues(
        *(
            QueuedPrompts(
                round(totals[role, QUEUED_REQUESTS]),
                max(0, round(totals[role, QUEUED_ISL] - totals[role, QUEUED_CACHED])),
            )
            for role in (PREFILL, DECODE)
        )
    )


class TrafficWindow:
    """Increase of the counters of all frontends since the window began. One owner."""

    def __init__(self, start_s: float, model_name: str | None = None) -> None:
        self._start_s = start_s
        self._model = model_name.lower() if model_name else None
        self._sources: dict[str, _SourceTotals] = {}
        self._gone: dict[str, float] = {}
        self._unread: set[str] = set()

    def read(self, source: str, samples: Samples, now_s: float) -> None:
        """Add a reading of a frontend. A counter that decreased was reset: its value is the increase since."""
        self._unread.discard(source)
        counted = {key: value for key, value in samples.items() if key.name in COUNTERS and self._concerns(key)}
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _SourceTotals()
            uptime = next((value for key, value in samples.items() if key.name == UPTIME), None)
            if uptime is None or now_s - uptime < self._start_s:
                known.last = counted  # Older than the window: how much of its counters belongs to it is unknown.
        for key, value in counted.items():
            before = known.last.get(key, 0.0)
            known.add(key.name, value - before if value >= before else value)
        known.last = counted
        known.queues = {key: value for key, value in samples.items() if key.name in QUEUES and self._concerns(key)}

    def queues(self) -> RouterQueues:
        """Return the queues of the routers of all frontends at their last readings."""
        return queues_of(item for source in self._sources.values() for item in source.queues.items())

    def fail(self, source: str) -> None:
        """Record that a frontend that exists could not be read: the window is incomplete until it is read again."""
        self._unread.add(source)
        if source in self._sources:
            self._sources[source].queues = {}

    def retain(self, sources: Collection[str]) -> None:
        """Forget the frontends that no longer exist; what they counted remains in the window."""
        for source in [one for one in self._sources if one not in sources]:
            for name, amount in self._sources.pop(source).increase.items():
                self._gone[name] = self._gone.get(name, 0.0) + amount
        self._unread &= set(sources)

    def close(self, now_s: float, interval_s: float) -> ObservedTraffic:
        """Return the traffic since the window began, as requests per interval, and begin the next window if it is known."""
        elapsed_s = now_s - self._start_s
        if elapsed_s <= 0:
            return ObservedTraffic(unknown="the window is empty")
        if self._unread:
            return ObservedTraffic(unknown=f"metrics of {', '.join(sorted(self._unread))} could not be read")
        if not self._sources and not self._gone:
            return ObservedTraffic(unknown="no frontend registers its metrics")
        totals = dict(self._gone)
        for source in self._sources.values():
            for name, amount in source.increase.items():
                totals[name] = totals.get(name, 0.0) + amount
        found = _observed(totals, elapsed_s, interval_s)
        if found.traffic is not None:
            self._restart(now_s)
        return found

    def _restart(self, now_s: float) -> None:
        self._start_s = now_s
        self._gone.clear()
        for source in self._sources.values():
            source.increase.clear()

    def _concerns(self, key: SeriesKey) -> bool:
        model = key.label("model")
        return self._model is None or model is None or model.lower() == self._model


def _observed(totals: Mapping[str, float], elapsed_s: float, interval_s: float) -> ObservedTraffic:
    requests = totals.get(STARTED, totals.get(ENDED))
    if requests is None:
        requests = 0.0  # A frontend that was read has no such series before its first request.
    means = {name: _mean(totals, name) for name in AVERAGES}
    isl, osl = means[ISL], means[OSL]
    latencies = (_milliseconds(means[TTFT]), _milliseconds(means[ITL]), means[DURATION])
    if requests > 0 and (isl is None or osl is None):
        return ObservedTraffic(
            ttft_ms=latencies[0],
            itl_ms=latencies[1],
            request_duration_s=latencies[2],
            unknown="no request ended in the window: lengths are unknown",
        )
    return ObservedTraffic(
        traffic=TrafficObservation(
            duration_s=interval_s,
            num_req=requests * interval_s / elapsed_s,
            isl=isl or 0.0,
            osl=osl or 0.0,
            kv_hit_rate=means[HIT_RATE],
        ),
        ttft_ms=latencies[0],
        itl_ms=latencies[1],
        request_duration_s=latencies[2],
    )


def _mean(totals: Mapping[str, float], name: str) -> float | None:
    count = totals.get(f"{name}_count", 0.0)
    return totals.get(f"{name}_sum", 0.0) / count if count > 0 else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
