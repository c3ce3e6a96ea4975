"""Policies: two planners of few words, to plan by and to try the hook with: a timetable, and thresholds of load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import (
    EngineCapabilities,
    Planner,
    PlannerEffects,
    RankKey,
    ScalingDecision,
    ScheduledTick,
    TickInput,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """From a time on, so many workers."""

    at_s: float
    decision: ScalingDecision


@dataclass(slots=True)
class Timetable:
    """Does what is written down (`--scale-at`)."""

    entries: Sequence[Entry]
    name: str = "timetable"
    _rest: list[Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._rest = sorted(self.entries, key=lambda entry: entry.at_s)

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """The first entry's time. Raises `ConfigError` where there is one for workers that the cluster has not."""
        for entry in self._rest:
            if (entry.decision.num_prefill is not None) != (prefill is not None):
                form = "SECONDS=PREFILL/DECODE" if prefill is not None else "SECONDS=WORKERS"
                raise ConfigError(f"--scale-at: expected {form}")
        return ScheduledTick(at_s=self._rest[0].at_s) if self._rest else None

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """It is an entry's time."""
        entry = self._rest.pop(0)
        return PlannerEffects(
            scale_to=entry.decision, next_tick=ScheduledTick(at_s=self._rest[0].at_s) if self._rest else None
        )


def entry(words: str) -> Entry:
    """`60=4`: from 60 s on four workers; `60=2/4`: two that prefill, four that decode."""
    at, _, counts = words.partition("=")
    try:
        at_s, numbers = float(at), [int(part) for part in counts.split("/")]
    except ValueError:
        at_s, numbers = -1.0, []
    if at_s < 0 or not 1 <= len(numbers) <= 2 or min(numbers) < 1:
        raise ConfigError(f"--scale-at {words}: expected SECONDS=WORKERS or SECONDS=PREFILL/DECODE")
    prefill = numbers[0] if len(numbers) == 2 else None
    return Entry(at_s, ScalingDecision(num_prefill=prefill, num_decode=numbers[-1]))


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to take one more or one less. Defaults are those of upstream's target `throughput` (control-plane.md §1.6)."""

    interval_s: float = 5.0
    min_workers: int = 1
    max_workers: int = 8
    """Of each role."""
    prefill_up: float = 1.0
    """Queued prompt tokens of some worker, over the largest batch: as much or more asks for another worker …"""
    prefill_down: float = 0.1
    """… and less on all of them allows one less."""
    decode_up: float = 1.0
    """The same for what decodes or waits to, over what the cache holds."""
    decode_down: float = 0.6

    def check(self) -> "Thresholds":
        """Itself. Raises `ConfigError` for numbers that contradict each other."""
        if not self.interval_s > 0:
            raise ConfigError(f"--scale-load: interval_s {self.interval_s:g}: expected more than 0")
        if not 1 <= self.min_workers <= self.max_workers:
            raise ConfigError("--scale-load: expected min_workers from 1 to max_workers")
        if self.prefill_down > self.prefill_up or self.decode_down > self.decode_up:
            raise ConfigError("--scale-load: what allows one less must be below what asks for one more")
        return self


@dataclass(slots=True)
class LoadThresholds:
    """One more where any worker is over a threshold, one less where all are below and would stay so with one less.

    While workers start or leave it only looks on, and so it does until every worker in service has told of a step.
    """

    thresholds: Thresholds
    name: str = "load thresholds"
    _prefill: EngineCapabilities | None = field(init=False, default=None)
    _decode: EngineCapabilities = field(init=False, default_factory=EngineCapabilities)

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """The first tick."""
        self._prefill, self._decode = prefill, decode
        return self._next(0.0)

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """One step, at most, for each role."""
        assert seen.worker_counts is not None
        assert seen.fpm_observations is not None
        counts, fpm = seen.worker_counts, seen.fpm_observations
        reasons: dict[str, str] = {}
        decision = ScalingDecision()
        if counts.ready_num_prefill is not None and self._prefill is not None:
            batch = self._prefill.max_num_batched_tokens or 1
            loads = {key: passed.queued_requests.sum_prefill_tokens / batch for key, passed in fpm.prefill.items()}
            wanted, reasons["prefill"] = self._step(
                counts.ready_num_prefill,
                counts.prefill_scaling_in_progress,
                [(loads, self.thresholds.prefill_up, self.thresholds.prefill_down)],
            )
            decision = replace(decision, num_prefill=wanted)
        if counts.ready_num_decode is not None:
            signals = [(self._held(fpm.decode), self.thresholds.decode_up, self.thresholds.decode_down)]
            if self._prefill is None:
                batch = self._decode.max_num_batched_tokens or 1
                loads = {key: passed.queued_requests.sum_prefill_tokens / batch for key, passed in fpm.decode.items()}
                signals.append((loads, self.thresholds.prefill_up, self.thresholds.prefill_down))
            wanted, reasons["decode"] = self._step(counts.ready_num_decode, counts.decode_scaling_in_progress, signals)
            decision = replace(decision, num_decode=wanted)
        scale_to = None if decision == ScalingDecision() else decision
        return PlannerEffects(scale_to=scale_to, next_tick=self._next(seen.now_s), diagnostics=reasons)

    def _held(self, passes: Mapping[RankKey, ForwardPassMetrics]) -> dict[RankKey, float]:
        """The part of each cache that is, or will be, in use."""
        room = self._decode.max_kv_tokens or 1
        found: dict[RankKey, float] = {}
        for key, passed in passes.items():
            tokens = passed.scheduled_requests.sum_decode_kv_tokens + passed.queued_requests.sum_decode_kv_tokens
            if self._prefill is None:
                tokens += passed.queued_requests.sum_prefill_tokens
            found[key] = tokens / room
        return found

    def _step(
        self, ready: int, is_scaling: bool, signals: Sequence[tuple[Mapping[RankKey, float], float, float]]
    ) -> tuple[int | None, str]:
        """How many of a role there should be, None for no change, and why."""
        if is_scaling:
            return None, "scaling_in_progress"
        loads = signals[0][0]
        if not loads:
            return None, "no_fpm_data"
        if len({worker for worker, _ in loads}) != ready:
            return None, "worker_count_mismatch"
        if any(load >= up for found, up, _ in signals for load in found.values()):
            return (ready + 1, "scale_up") if ready < self.thresholds.max_workers else (None, "no_change")
        if ready > self.thresholds.min_workers and all(
            load < down and load * ready / (ready - 1) < up for found, up, down in signals for load in found.values()
        ):
            return ready - 1, "scale_down"
        return None, "no_change"

    def _next(self, now_s: float) -> ScheduledTick:
        return ScheduledTick(
            at_s=now_s + self.thresholds.interval_s,
            run_load_scaling=True,
            need_worker_states=True,
            need_worker_fpm=True,
        )


def load_thresholds(text: str) -> Planner:
    """The planner of `--scale-load`: JSON, or `on` for the defaults."""
    try:
        found = Thresholds() if text == "on" else msgspec.json.decode(text, type=Thresholds)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--scale-load: {error}") from None
    return LoadThresholds(found.check())
