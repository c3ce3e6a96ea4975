"""CorePlanner: the production planner (`PlannerCore`) attached to a simulated cluster, with optional metric faults and a record."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode, PlannerConfig, SweepMode, parse
from dynamo.planner.config.source import read_argument
from dynamo.planner.core.engine import PlannerCore, TickDecision
from dynamo.planner.core.record import Start, encode, recorded
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import EngineCapabilities, PlannerEffects, ScheduledTick, TickInput
from dynamo.replay.engine import EngineArgs

Sink = Callable[[bytes], None]

BOOTSTRAP_PROMPTS = (0, 256, 1024, 4096, 8192)
"""Prompt tokens of the steps with which performance models start."""
BOOTSTRAP_FILLS = (0.0, 0.1, 0.3, 0.6, 0.9)
"""Fractions of the KV cache that these steps read."""
BOOTSTRAP_CONTEXT = 2048
"""Tokens of each sequence in these steps."""
DELAYED_MAX = 4096
"""Observations kept for a delay: more than an hour of ticks at 1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFaults:
    """Faults of the planner's observations."""

    delay_s: float = 0.0
    """Age of the forward passes and of the traffic."""
    loss: float = 0.0
    """Probability that a tick receives neither forward passes nor traffic."""
    seed: int = 42

    def __post_init__(self) -> None:
        if self.delay_s < 0:
            raise ConfigError(f"--planner-metrics-delay {self.delay_s:g}: must be 0 or more seconds")
        if not 0 <= self.loss <= 1:
            raise ConfigError(f"--planner-metrics-loss {self.loss:g}: must be a probability from 0 to 1")


@dataclass(slots=True)
class FaultyObserver:
    """Applies faults to observations. Worker counts come from another source and are exact."""

    faults: MetricFaults
    _rng: random.Random = field(init=False)
    _kept: deque[TickInput] = field(init=False, default_factory=lambda: deque(maxlen=DELAYED_MAX))

    def __post_init__(self) -> None:
        self._rng = random.Random(self.faults.seed)

    def observed(self, seen: TickInput) -> TickInput:
        """Return what the planner receives of an observation."""
        if self.faults.delay_s:
            self._kept.append(seen)
            due_s = seen.now_s - self.faults.delay_s
            while len(self._kept) > 1 and self._kept[1].now_s <= due_s:
                self._kept.popleft()
            old = self._kept[0] if self._kept[0].now_s <= due_s else None
            seen = replace(
                seen,
                traffic=seen.traffic and (old.traffic if old else None),
                fpm_observations=old.fpm_observations if old else None,
            )
        if self.faults.loss and self._rng.random() < self.faults.loss:
            seen = replace(seen, traffic=None, fpm_observations=None)
        return seen


@dataclass(slots=True)
class CorePlanner:
    """Drives `PlannerCore` in virtual time."""

    config: PlannerConfig
    engines: dict[EngineRole, EngineArgs]
    """Simulated engines, whose step times are the performance data from before the deployment."""
    faults: MetricFaults = field(default_factory=MetricFaults)
    sink: Sink | None = None
    """Receives the lines of the decision record."""
    name: str = "planner"
    _core: PlannerCore = field(init=False)
    _observer: FaultyObserver = field(init=False)

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        """Create the planner and return its first tick. Raise `ConfigError` for a mode that the cluster does not have."""
        config = self.config
        if (prefill is None) != (config.mode is Mode.AGG):
            expected = "agg" if prefill is None else "disagg, prefill or decode"
            raise ConfigError(f"--planner-config: mode {config.mode.value}: must be {expected} for these workers")
        known = WorkerCapabilities(
            prefill=prefill and replace(prefill, num_gpu=config.prefill_engine_num_gpu or 1),
            decode=replace(decode, num_gpu=config.decode_engine_num_gpu or 1),
        )
        is_profiled = config.pre_deployment_sweeping_mode not in (None, SweepMode.NONE)
        bootstrap = {role: measured_steps(role, engine) for role, engine in self.engines.items() if is_profiled}
        start = Start(config=config.as_json(), capabilities=known, bootstrap=bootstrap)
        if self.sink is not None:
            self.sink(encode(start))
        self._core = start.planner()
        self._observer = FaultyObserver(self.faults)
        return self._core.first_tick(0.0)

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        """Decide one tick."""
        seen = self._observer.observed(seen)
        if self.sink is None:
            decision = self._core.tick(scheduled, seen)
        else:
            recording = recorded(self._core, scheduled, seen)
            assert recording.decision is not None, "a simulated planner has no external plugins"
            decision = recording.decision
            self.sink(encode(recording.tick))
        return PlannerEffects(
            scale_to=None if self.config.advisory else decision.scale_to,
            next_tick=self._core.next_tick(scheduled, seen.now_s),
            diagnostics=diagnostics(decision),
        )


def diagnostics(decision: TickDecision) -> dict[str, Any]:
    """Return the reasons of a decision for a report."""
    load, throughput = decision.load, decision.throughput
    found: dict[str, Any] = {
        "action": decision.action.value,
        "load_reason": load.reason.value,
        "throughput_reason": throughput.reason.value,
        "estimated_ttft_ms": load.estimated_ttft_ms,
        "estimated_itl_ms": load.estimated_itl_ms,
        "lower_bounds": decision.lower_bounds,
        "clamped": list(decision.clamped),
    }
    if decision.predictions is not None:
        found["predictions"] = msgspec.to_builtins(decision.predictions)
    if decision.forecast is not None:
        found["forecast"] = msgspec.to_builtins(decision.forecast)
    return found


def measured_steps(role: EngineRole, engine: EngineArgs) -> list[ForwardPassMetrics]:
    """Return steps of a simulated engine, as measured before a deployment."""
    limits, timing = engine.limits(), engine.timing()
    capacity = limits.num_blocks * limits.block_tokens
    prompts = (0,) if role is EngineRole.DECODE else BOOTSTRAP_PROMPTS
    fills = (0.0,) if role is EngineRole.PREFILL else BOOTSTRAP_FILLS
    found: list[ForwardPassMetrics] = []
    for prompt in sorted({min(tokens, limits.max_num_batched_tokens) for tokens in prompts}):
        for fill in fills:
            kv = int(fill * capacity)
            sequences = min(limits.max_num_seqs, max(1, kv // BOOTSTRAP_CONTEXT)) if kv else 0
            wall_s = (timing.prefill_ms(prompt) + timing.decode_ms(kv, capacity, sequences)) / 1000
            if wall_s > 0:
                scheduled = ScheduledRequests(
                    num_prefill_requests=int(prompt > 0),
                    sum_prefill_tokens=prompt,
                    num_decode_requests=sequences,
                    sum_decode_kv_tokens=kv,
                )
                found.append(
                    ForwardPassMetrics(
                        FORWARD_PASS_VERSION, "profile", 0, len(found), wall_s, scheduled, QueuedRequests()
                    )
                )
    return found


class Lines:
    """A file of lines, emptied at the first one. A second run in the same process replaces the first."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._is_begun = False

    def write(self, line: bytes) -> None:
        """Append a line. Raise `ConfigError` if the file cannot be written."""
        try:
            with self._path.open("ab" if self._is_begun else "wb") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"--planner-record: cannot write {self._path}: {error.strerror or error}") from None
        self._is_begun = True


def planner_config(argument: str, *, is_disaggregated: bool) -> PlannerConfig:
    """Return the configuration of `--planner-config`; the mode defaults to that of the cluster. Raise `ConfigError`."""
    try:
        raw = read_argument(argument)
        if isinstance(raw, dict):
            raw = {"mode": "disagg" if is_disaggregated else "agg", **raw}
        return parse(raw)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(
            f"--planner-{text[2:]}" if text.startswith("--config") else f"--planner-config: {text}"
        ) from None
