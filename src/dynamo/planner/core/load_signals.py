"""Load signals: whether the latest forward passes of a role's engines call for one worker more or one less.

Two policies: latency objectives (target sla) with a consolidation test before a worker is removed, and static thresholds (all
other targets). `Signal.target` is None if the signal is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.planner.config.planner_config import OptimizationTarget, PlannerConfig
from dynamo.planner.core.perf_model import EngineModel, accepted
from dynamo.planner.core.reasons import LoadReason
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import EngineCapabilities


@dataclass(frozen=True, slots=True)
class Signal:
    """A wanted number of workers, with its reason and the estimate that it follows from.

    A reason SCALE_DOWN with the present number is a removal that the minimum prevents; it still cancels starts.
    """

    target: int | None
    reason: LoadReason
    estimate_ms: float | None = None

    @property
    def is_change(self) -> bool:
        """Return whether the load calls for another number of workers."""
        return self.reason in (LoadReason.SCALE_UP, LoadReason.SCALE_DOWN)

    @classmethod
    def missing(cls) -> "Signal":
        """Return the signal of engines whose load cannot be judged."""
        return cls(None, LoadReason.INSUFFICIENT_DATA)


@dataclass(frozen=True, slots=True)
class SignalThresholds:
    """Load at which a worker is added (by any engine) or removed (by all)."""

    up: float
    down: float
    up_is_inclusive: bool
    down_is_inclusive: bool

    def is_up(self, value: float) -> bool:
        """Return whether a load calls for another worker."""
        return value >= self.up if self.up_is_inclusive else value > self.up

    def is_down(self, value: float) -> bool:
        """Return whether a load allows one worker less."""
        return value <= self.down if self.down_is_inclusive else value < self.down


PREFILL_THRESHOLDS = {
    OptimizationTarget.THROUGHPUT: SignalThresholds(1.0, 0.1, up_is_inclusive=True, down_is_inclusive=False),
    OptimizationTarget.LATENCY: SignalThresholds(0.1, 0.0, up_is_inclusive=True, down_is_inclusive=True),
}
"""Queued prompt tokens per context length."""
DECODE_THRESHOLDS = {
    OptimizationTarget.THROUGHPUT: SignalThresholds(1.0, 0.6, up_is_inclusive=False, down_is_inclusive=False),
    OptimizationTarget.LATENCY: SignalThresholds(0.4, 0.1, up_is_inclusive=False, down_is_inclusive=False),
}
"""KV tokens in use or queued per KV capacity."""


def prefill_threshold_signal(
    steps: Sequence[ForwardPassMetrics], workers: int, config: PlannerConfig, capabilities: EngineCapabilities | None
) -> Signal:
    """Return the signal of the prefill queues."""
    queued = [float(step.queued_requests.sum_prefill_tokens) for step in steps]
    if config.optimization_target is OptimizationTarget.LOAD:
        up, down = config.prefill_scale_up_queue_tokens, config.prefill_scale_down_queue_tokens
        if up is None or down is None:
            return Signal.missing()
        thresholds = SignalThresholds(up, down, up_is_inclusive=True, down_is_inclusive=True)
        return _by_thresholds(queued, workers, config.prefill_floor, thresholds)
    context = capabilities.context_length if capabilities else None
    if not context or context < 0:
        return Signal.missing()
    thresholds = PREFILL_THRESHOLDS[config.optimization_target]
    return _by_thresholds([value / context for value in queued], workers, config.prefill_floor, thresholds)


def decode_threshold_signal(
    steps: Sequence[ForwardPassMetrics],
    workers: int,
    config: PlannerConfig,
    capabilities: EngineCapabilities | None,
    *,
    with_queued_prefill: bool,
) -> Signal:
    """Return the signal of the KV caches; aggregated engines also need space for their queued prompts."""
    capacity = capabilities.max_kv_tokens if capabilities else None
    if not capacity or capacity < 0:
        return Signal.missing()
    if config.optimization_target is OptimizationTarget.LOAD:
        up, down = config.decode_scale_up_kv_rate, config.decode_scale_down_kv_rate
        if up is None or down is None:
            return Signal.missing()
        thresholds = SignalThresholds(up / 100, down / 100, up_is_inclusive=True, down_is_inclusive=True)
    else:
        thresholds = DECODE_THRESHOLDS[config.optimization_target]
    used = [kv_tokens(step, with_queued_prefill=with_queued_prefill) / capacity for step in steps]
    return _by_thresholds(used, workers, config.decode_floor, thresholds)


def kv_tokens(step: ForwardPassMetrics, *, with_queued_prefill: bool) -> int:
    """Return the KV tokens of the scheduled and the queued requests."""
    queued = step.queued_requests
    tokens = step.scheduled_requests.sum_decode_kv_tokens + queued.sum_decode_kv_tokens
    return tokens + queued.sum_prefill_tokens if with_queued_prefill else tokens


def _by_thresholds(values: Sequence[float], workers: int, floor: int, thresholds: SignalThresholds) -> Signal:
    """Return the signal of static thresholds; a worker is removed only if the rest stays below the upper one."""
    if any(map(thresholds.is_up, values)):
        return Signal(workers + 1, LoadReason.SCALE_UP)
    if not all(map(thresholds.is_down, values)):
        return Signal(workers, LoadReason.NO_CHANGE)
    target = max(workers - 1, floor)
    if 0 < target < workers and max(values) * workers / target >= thresholds.up:
        return Signal(workers, LoadReason.NO_CHANGE)
    return Signal(target, LoadReason.SCALE_DOWN)


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Latency objectives, and the fraction of their slack that a consolidation may use."""

    ttft_s: float
    itl_s: float
    sensitivity: float

    @classmethod
    def of(cls, config: PlannerConfig) -> "LatencyObjectives":
        """Return the objectives of a configuration."""
        return cls(config.ttft_ms / 1000, config.itl_ms / 1000, config.load_scaling_down_sensitivity / 100)


def ttft_signal(
    steps: Sequence[ForwardPassMetrics],
    workers: int,
    model: EngineModel,
    config: PlannerConfig,
    *,
    kv_hit_rate: float | None,
    with_decode: bool,
) -> Signal:
    """Return the signal of the estimated times to first token.

    A worker is removed only if every engine, with its queue and (aggregated) its decode load scaled by N / (N - 1), stays
    within the fraction `sensitivity` of the slack between the objective and its time for a single prompt.
    """
    goals = LatencyObjectives.of(config)
    if not model.is_ready or model.capabilities is None or not model.capabilities.max_num_batched_tokens:
        return Signal.missing()
    estimates = [model.ttft_s(step, kv_hit_rate=kv_hit_rate) for step in steps]
    known = [one for one in estimates if one is not None]
    if not known or len(known) < len(estimates):
        return Signal.missing()
    estimate_ms = max(known) * 1000
    if all(one > goals.ttft_s for one in known):
        return Signal(workers + 1, LoadReason.SCALE_UP, estimate_ms)
    scale = workers / max(1, workers - 1)
    for step in steps:
        decode_scale = scale if with_decode else 1.0
        own = model.ttft_s(
            step, kv_hit_rate=kv_hit_rate, queue_scale=0.0, decode_scale=decode_scale, with_queued_decode=with_decode
        )
        scaled = model.ttft_s(
            step, kv_hit_rate=kv_hit_rate, queue_scale=scale, decode_scale=decode_scale, with_queued_decode=with_decode
        )
        if own is None or scaled is None:
            return Signal.missing()
        slack_s = (goals.ttft_s - own) * goals.sensitivity
        if slack_s <= 0 or scaled - own >= slack_s:
            return _refused(workers, estimate_ms)
    return Signal(max(1, workers - 1), LoadReason.SCALE_DOWN, estimate_ms)


def itl_signal(
    steps: Sequence[ForwardPassMetrics],
    workers: int,
    model: EngineModel,
    config: PlannerConfig,
    *,
    accept_length: float | None,
    with_queued_prefill: bool,
) -> Signal:
    """Return the signal of the estimated inter-token latencies.

    A worker is removed only if every engine, with its load scaled by N / (N - 1), fits its KV cache and keeps the latency
    below the fraction `sensitivity` of the objective.
    """
    goals = LatencyObjectives.of(config)
    if not model.is_ready:
        return Signal.missing()
    accept = accepted(accept_length)
    estimates = [model.itl_s(step) for step in steps]
    known = [one / accept for one in estimates if one is not None]
    if not known or len(known) < len(estimates):
        return Signal.missing()
    estimate_ms = max(known) * 1000
    if all(one > goals.itl_s for one in known):
        return Signal(workers + 1, LoadReason.SCALE_UP, estimate_ms)
    capacity = model.capabilities.max_kv_tokens if model.capabilities else None
    scale = workers / max(1, workers - 1)
    for step in steps:
        scaled = model.itl_s(step, decode_scale=scale, with_queued_prefill=with_queued_prefill)
        if scaled is None:
            return Signal.missing()
        tokens = kv_tokens(step, with_queued_prefill=with_queued_prefill) * scale
        is_full = capacity is not None and tokens >= capacity
        if is_full or scaled / accept >= goals.itl_s * goals.sensitivity:
            return _refused(workers, estimate_ms)
    return Signal(max(1, workers - 1), LoadReason.SCALE_DOWN, estimate_ms)


def _refused(workers: int, estimate_ms: float) -> Signal:
    """Return the signal of a failed consolidation test; the last worker is not a candidate for removal."""
    reason = LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION if workers > 1 else LoadReason.NO_CHANGE
    return Signal(workers, reason, estimate_ms)


def merge_aggregated(prefill: Signal, decode: Signal, workers: int) -> Signal:
    """Return the signal of engines with both phases: either may add a worker, both must agree to remove one."""
    targets = [one.target for one in (prefill, decode) if one.target is not None]
    if not targets:
        return Signal.missing()
    if any(target > workers for target in targets):
        return Signal(workers + 1, LoadReason.SCALE_UP)
    is_decode_down = decode.reason is LoadReason.SCALE_DOWN
    if prefill.target is None:
        is_down = is_decode_down and decode.target is not None and decode.target < workers
    else:
        is_down = is_decode_down and prefill.reason is LoadReason.SCALE_DOWN
    if is_down:
        return Signal(max(targets), LoadReason.SCALE_DOWN)
    refused = LoadReason.SCALE_DOWN_REFUSED_CONSOLIDATION
    is_refused = refused in (prefill.reason, decode.reason)
    return Signal(workers, refused if is_refused else LoadReason.NO_CHANGE)
