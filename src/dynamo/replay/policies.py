"""Policies: two simple planners: a timetable, and load thresholds."""

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
    """A number of workers from a time on."""

    at_s: float
    decision: ScalingDecision


@dataclass(slots=True)
class Timetable:
    """Sets worker counts at given times (`--scale-at`)."""

    entries: Sequence[Entry]
    name: str = "timetable"
    _rest: list[Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._rest = sorted(self.entries, key=lambda entry: entry.at_s)

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """Return the first tick. Raise `ConfigError` for an entry of a role that the cluster does not have."""
        for entry in self._rest:
            if (entry.decision.num_prefill is not None) != (prefill is not None):
                form = "SECONDS=PREFILL/DECODE" if prefill is not None else "SECONDS=WORKERS"
                raise ConfigError(f"--scale-at: expected {form}")
        return ScheduledTick(at_s=self._rest[0].at_s) if self._rest else None

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """Return the worker counts of the entry that is due."""
        entry = self._rest.pop(0)
        return PlannerEffects(
            scale_to=entry.decision, next_tick=ScheduledTick(at_s=self._rest[0].at_s) if self._rest else None
        )


def entry(words: str) -> Entry:
    """Parse `60=4`: from 60 s on four workers; `60=2/4`: two prefill and four decode workers."""
    at, _, counts = words.partition("=")
    try:
        at_s, numbers = float(at), [int(part) for part in counts.split("/")]
    except ValueError:
        at_s, numbers = -1.0, []
    if at_s < 0 or not 1 <= len(numbers) <= 2 or min(numbers) < 1:
        raise ConfigError(f"--scale-at {words}: expected SECONDS=WORKERS or SECONDS=PREFILL/DECODE")
    prefill = numbers[0] if len(numbers) == 2 else None
    return Entry(at_s, ScalingDecision(num_prefill=prefill, num_decode=numbers[-1]))


class ScalingThresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling thresholds. Defaults are those of upstream's target `throughput`."""

    interval_s: float = 5.0
    min_workers: int = 1
    max_workers: int = 8
    """Maximum workers of each role."""
    prefill_up: float = 1.0
    """Scale up if any worker's queued prompt tokens, divided by the maximum batch tokens, reach this."""
    prefill_down: float = 0.1
    """Scale down if that ratio is below this on all workers."""
    decode_up: float = 1.0
    """Scale up if the tokens of running and waiting decodes, divided by a worker's KV capacity, reach this."""
    decode_down: float = 0.6

    def check(self) -> "ScalingThresholds":
        """Return the thresholds. Raise `ConfigError` if they contradict each other."""
        if not self.interval_s > 0:
            raise ConfigError(f"--scale-load: interval_s {self.interval_s:g}: expected more than 0")
        if not 1 <= self.min_workers <= self.max_workers:
            raise ConfigError("--scale-load: expected min_workers from 1 to max_workers")
        if self.prefill_down > self.prefill_up or self.decode_down > self.decode_up:
            raise ConfigError("--scale-load: thresholds for scaling down must be below those for scaling up")
        return self


@dataclass(slots=True)
class LoadThresholds:
    """Scale up by one if any worker is over a threshold; scale down by one if all are below and would stay so.

    No decision is made while workers start or leave, or before every worker in service has reported a step.
    """

    thresholds: ScalingThresholds
    name: str = "load thresholds"
    _prefill: EngineCapabilities | None = field(init=False, default=None)
    _decode: EngineCapabilities = field(init=False, default_factory=EngineCapabilities)

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """Store the capabilities and return the first tick."""
        self._prefill, self._decode = prefill, decode
        return self._next(0.0)

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """Return a change of at most one worker for each role."""
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
        """Return the share of each KV cache that is used or will be used by queued requests."""
        capacity = self._decode.max_kv_tokens or 1
        found: dict[RankKey, float] = {}
        for key, passed in passes.items():
            tokens = passed.scheduled_requests.sum_decode_kv_tokens + passed.queued_requests.sum_decode_kv_tokens
            if self._prefill is None:
                tokens += passed.queued_requests.sum_prefill_tokens
            found[key] = tokens / capacity
        return found

    def _step(
        self, ready: int, is_scaling: bool, signals: Sequence[tuple[Mapping[RankKey, float], float, float]]
    ) -> tuple[int | None, str]:
        """Return the new number of workers of a role (None: no change) and the reason."""
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
    """Parse `--scale-load`: JSON, or `on` for the defaults."""
    try:
        found = ScalingThresholds() if text == "on" else msgspec.json.decode(text, type=ScalingThresholds)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--scale-load: {error}") from None
    return LoadThresholds(found.check())
