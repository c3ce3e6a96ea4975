"""PageData: the points of a page's plots: distributions of latencies, and levels of the workers over time."""

import math
from collections.abc import Mapping, Sequence

from dynamo.replay.charts import Points
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.report import RequestRow, percentile
from dynamo.replay.timeline import Timeline

POINTS = 240  # Maximum points per line; screens cannot show more.


def distributions(rows: Mapping[str, Sequence[RequestRow]], metric: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, of_run in rows.items():
        values = sorted(value for row in of_run if (value := getattr(row, metric)) is not None)
        if values:
            parts = [at / POINTS for at in range(POINTS + 1)]
            found[name] = [(max(percentile(values, part), 0.01), part) for part in parts]
    return found


def sums(outcomes: Mapping[str, RunOutcome], level: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        timeline = outcome.timeline
        sums = [sum(values) for values in zip(*_all(timeline, level), strict=True)]
        found[name] = _over_time(timeline, sums)
    return found


def rates(outcomes: Mapping[str, RunOutcome], count: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        seconds = outcome.timeline.interval_ms / 1000
        found[name] = _over_time(outcome.timeline, [value / seconds for value in _counted(outcome.timeline, count)])
    return found


def hits(outcomes: Mapping[str, RunOutcome]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        timeline = outcome.timeline
        bins = max(1, math.ceil(timeline.length / 60))
        admitted, reused = (binned(_counted(timeline, what), bins) for what in ("admitted_tokens", "reused_tokens"))
        seconds = timeline.interval_ms / 1000 * bins
        pairs = enumerate(zip(admitted, reused, strict=True))
        found[name] = [((at + 0.5) * seconds, 100 * hit / all_) for at, (all_, hit) in pairs if all_]
    return found


def router_queues(outcomes: Mapping[str, RunOutcome], rows: Mapping[str, Sequence[RequestRow]]) -> dict[str, Points]:
    """Return the number of requests that wait in the router, from their arrivals and waits."""
    found: dict[str, Points] = {}
    for name, of_run in rows.items():
        timeline = outcomes[name].timeline
        levels = Timeline(timeline.interval_ms)
        for row in of_run:
            if row.wait_ms > 0:
                levels.hold(0, 1, 0, 0, row.arrival_ms, row.arrival_ms + row.wait_ms)
        values = levels.level("running", 0) if levels.places else []
        found[name] = _over_time(timeline, values + [0.0] * (timeline.length - len(values)))
    return found


def prefill_places(outcome: RunOutcome) -> set[int]:
    """Return the places of the prefill workers of a disaggregated cluster."""
    return {flight.prefill_slot for flight in outcome.flights if flight.prefill_slot >= 0}


def imbalances(outcomes: Mapping[str, RunOutcome]) -> Mapping[str, Points]:
    """Return the requests of the busiest worker over the mean of the workers of its role, where there are requests."""
    found: dict[str, Points] = {}
    for name, outcome in outcomes.items():
        prefill = prefill_places(outcome)
        decode = set(range(outcome.timeline.places)) - prefill
        if prefill:
            found[f"{name}: prefill"] = _imbalance(outcome.timeline, prefill)
        found[f"{name}: decode" if prefill else name] = _imbalance(outcome.timeline, decode)
    return found


def _imbalance(timeline: Timeline, places: set[int]) -> Points:
    """Return the imbalance of some workers over time."""
    bins = max(1, math.ceil(timeline.length / POINTS))
    seconds = timeline.interval_ms / 1000 * bins
    loads = [
        binned(
            [sum(one) for one in zip(*(timeline.level(level, at) for level in ("running", "waiting")), strict=True)],
            bins,
        )
        for at in sorted(places)
    ]
    spans = [_span(values) for values in loads]
    found: list[tuple[float, float]] = []
    for at in range(len(loads[0]) if loads else 0):
        there = [values[at] for values, (first, last) in zip(loads, spans, strict=True) if first <= at <= last]
        if sum(there) > 0:
            found.append(((at + 0.5) * seconds, max(there) * len(there) / sum(there)))
    return found


def worker_counts(outcome: RunOutcome) -> Points:
    """Return the number of workers in service over time."""
    assert outcome.planner is not None
    count, found = 0, list[tuple[float, float]]()
    for row in outcome.planner.lifecycle_operations:
        change = {"worker_ready": 1, "worker_draining": -1, "worker_failed": -1}.get(row["operation"], 0)
        if change and row["at_s"]:
            found.append((row["at_s"], float(count)))
        count += change
        if change and row["at_s"]:
            found.append((row["at_s"], float(count)))
        elif change:
            found = [(0.0, float(count))]
    return [*found, (outcome.duration_ms / 1000, float(count))]


def replicas(outcome: RunOutcome) -> dict[str, Points]:
    """Return ready and expected workers at the planner's ticks; empty for a run without worker counts."""
    ticks = [] if outcome.planner is None else [row for row in outcome.planner.ticks if row["worker_counts"]]
    found: dict[str, Points] = {}
    for kind in ("ready", "expected"):
        for role in ("prefill", "decode"):
            key = f"{kind}_num_{role}"
            points = [(row["at_s"], float(row["worker_counts"][key])) for row in ticks if row["worker_counts"][key]]
            if points:
                found[f"{kind} {role}"] = points
    return found


def binned(values: Sequence[float], bins: int) -> list[float]:
    return [sum(values[at : at + bins]) for at in range(0, len(values), bins)]


def _span(values: Sequence[float]) -> tuple[int, int]:
    """Return the first and the last index of a value above zero: the time in which a worker is at the place."""
    above = [at for at, value in enumerate(values) if value > 0]
    return (above[0], above[-1]) if above else (0, -1)


def _all(timeline: Timeline, level: str) -> list[list[float]]:
    return [timeline.level(level, at) for at in range(timeline.places)]


def _counted(timeline: Timeline, name: str) -> list[int]:
    return [sum(values) for values in zip(*(timeline.counted(name, at) for at in range(timeline.places)), strict=True)]


def _over_time(timeline: Timeline, values: Sequence[float]) -> Points:
    bins = max(1, math.ceil(len(values) / POINTS))
    seconds = timeline.interval_ms / 1000 * bins
    sums = binned(values, bins)
    last = len(values) - (len(sums) - 1) * bins
    return [((at + 0.5) * seconds, value / (last if at == len(sums) - 1 else bins)) for at, value in enumerate(sums)]
