"""Performance model of one role's engines: time to first token, inter-token latency and capacity from predicted steps.

All times are in seconds, except where the name has another unit; token counts are per engine. The model of a step is a regression over
observed steps (`StepRegression`), or any other `StepModel`.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.regression import RegressionState, StepLoad, StepRegression
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import EngineCapabilities, RankKey

BATCHED_TOKENS, SEQUENCES, KV_TOKENS = 8192, 512, 2_000_000
"""Limits of an engine that does not report its own."""
HIT_RATE_MAX = 0.95
"""Cached fraction beyond which a prompt is not discounted further: some tokens are always computed."""
CANDIDATES_MAX = 128
"""Batch sizes that a capacity search evaluates."""
TOKENS_MAX = 2**32 - 1
"""Lengths beyond this are measurement errors."""


class StepModel(Protocol):
    """Predicts the seconds of an engine step."""

    @property
    def is_ready(self) -> bool:
        """Return whether it has enough data."""
        ...

    def seconds(self, load: StepLoad) -> float | None:
        """Return the seconds of a step; None if unknown."""
        ...

    def add(self, step: ForwardPassMetrics) -> None:
        """Learn from an observed step."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Batch limits of one engine."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Requests per second of one engine, and the latencies at that rate; None: not defined for the role."""

    rps: float
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    is_eligible: bool = True
    """Whether the latencies meet the objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityQuery:
    """Traffic and objectives of a capacity search; objectives that are None are not checked."""

    isl: float
    osl: float
    ttft_s: float | None = None
    itl_s: float | None = None
    kv_hit_rate: float | None = None
    accept_length: float = 1.0


def limits_of(capabilities: EngineCapabilities | None) -> EngineLimits | None:
    """Return an engine's limits, with defaults for those that it does not report; None if they are unusable."""
    if capabilities is None:
        return None
    found = [
        default if value is None else value
        for value, default in (
            (capabilities.max_num_batched_tokens, BATCHED_TOKENS),
            (capabilities.max_num_seqs, SEQUENCES),
            (capabilities.max_kv_tokens, KV_TOKENS),
        )
    ]
    return EngineLimits(*found) if min(found) > 0 else None


def uncached_fraction(kv_hit_rate: float | None) -> float:
    """Return the fraction of prompt tokens to compute; an unknown hit rate is no discount."""
    if kv_hit_rate is None or math.isnan(kv_hit_rate):
        return 1.0
    return 1.0 - min(max(kv_hit_rate, 0.0), HIT_RATE_MAX)


def accepted(accept_length: float | None) -> float:
    """Return the tokens per decode step; 1 unless speculation reports more."""
    return accept_length if accept_length is not None and accept_length > 1.0 else 1.0


class MovingAverage:
    """Mean of the last values, without the zeros before the first other value."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        """Add a value."""
        if value > 0 or self._values:
            self._values.append(value)

    @property
    def values(self) -> tuple[float, ...]:
        """The values, the oldest first."""
        return tuple(self._values)

    def restore(self, values: Iterable[float]) -> None:
        """Set the values."""
        self._values.clear()
        self._values.extend(values)

    @property
    def value(self) -> float:
        """The mean; 0 without values."""
        return math.fsum(self._values) / len(self._values) if self._values else 0.0


def candidates(batch_max: int) -> list[int]:
    """Return the batch sizes to evaluate: all up to 128, else 128 evenly spaced ones."""
    if batch_max <= CANDIDATES_MAX:
        return list(range(1, batch_max + 1))
    return [1 + index * (batch_max - 1) // (CANDIDATES_MAX - 1) for index in range(CANDIDATES_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModelState:
    """State of a performance model as plain data."""

    steps: RegressionState | None
    """None for a step model that does not learn."""
    averages: tuple[tuple[float, ...], ...]


@dataclass(slots=True)
class EngineModel:
    """Predictions for the engines of one role."""

    role: EngineRole
    steps: StepModel
    window: int
    """Steps over which typical lengths are averaged."""
    capabilities: EngineCapabilities | None = None
    _prompt_length: MovingAverage = field(init=False)
    _context_length: MovingAverage = field(init=False)
    _prefill_tokens: MovingAverage = field(init=False)
    _prefill_requests: MovingAverage = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_length, self._context_length = MovingAverage(self.window), MovingAverage(self.window)
        self._prefill_tokens, self._prefill_requests = MovingAverage(self.window), MovingAverage(self.window)

    @property
    def is_ready(self) -> bool:
        """Return whether there are enough observations."""
        return self.steps.is_ready

    def observe(self, steps: Mapping[RankKey, ForwardPassMetrics]) -> None:
        """Learn from the latest step of each rank."""
        for key in sorted(steps):
            step = steps[key]
            self.steps.add(step)
            scheduled = step.scheduled_requests
            prompts, decodes = scheduled.num_prefill_requests, scheduled.num_decode_requests
            self._prompt_length.add(scheduled.sum_prefill_tokens / prompts if prompts > 0 else 0.0)
            if decodes > 0:
                self._context_length.add(scheduled.sum_decode_kv_tokens / decodes)
            self._prefill_tokens.add(scheduled.sum_prefill_tokens)
            self._prefill_requests.add(prompts)

    def learn(self, steps: Sequence[ForwardPassMetrics]) -> None:
        """Learn the times of steps that are not typical: selected ones, or those measured before the deployment."""
        for step in steps:
            self.steps.add(step)

    @property
    def _averages(self) -> tuple[MovingAverage, ...]:
        return self._prompt_length, self._context_length, self._prefill_tokens, self._prefill_requests

    def state(self) -> EngineModelState:
        """Return the state for a checkpoint."""
        return EngineModelState(
            steps=self.steps.state() if isinstance(self.steps, StepRegression) else None,
            averages=tuple(one.values for one in self._averages),
        )

    def restore(self, state: EngineModelState) -> None:
        """Set the state to that of a checkpoint."""
        if isinstance(self.steps, StepRegression) and state.steps is not None:
            self.steps.restore(state.steps)
        for average, values in zip(self._averages, state.averages, strict=True):
            average.restore(values)

    # Latency of an engine now

    def ttft_s(
        self,
        step: ForwardPassMetrics,
        *,
        kv_hit_rate: float | None = None,
        queue_scale: float = 1.0,
        decode_scale: float = 1.0,
        with_queued_decode: bool = False,
    ) -> float | None:
        """Return the time to compute the queued prompts and one more of typical length; None if unknown.

        The scales multiply the queue and the decode requests: the load of N engines on N - 1 is scaled by N / (N - 1).
        """
        limits = limits_of(self.capabilities)
        if self.role is EngineRole.DECODE or limits is None:
            return None
        queued = step.queued_requests.sum_prefill_tokens * queue_scale
        tokens = math.ceil((queued + self._prompt_length.value) * uncached_fraction(kv_hit_rate))
        requests = math.ceil(step.queued_requests.num_prefill_requests * queue_scale) + 1
        decode, kv = self._decode_load(step, decode_scale, with_queued=with_queued_decode)
        if self.role is EngineRole.PREFILL:
            decode, kv = 0, 0.0
        return self._chunked_s(tokens, requests, decode, math.ceil(kv), limits.max_num_batched_tokens)

    def itl_s(
        self,
        step: ForwardPassMetrics,
        *,
        decode_scale: float = 1.0,
        with_queued_prefill: bool = False,
    ) -> float | None:
        """Return the step time with the scheduled and queued decode requests and one more of typical length.

        Without a typical length, which no step has shown yet, no request is added.
        """
        if self.role is EngineRole.PREFILL or limits_of(self.capabilities) is None:
            return None
        requests, kv = self._decode_load(step, decode_scale, with_queued=True, with_queued_prefill=with_queued_prefill)
        prefill_tokens = prefill_requests = 0
        if self.role is EngineRole.AGGREGATED:
            prefill_tokens = math.ceil(self._prefill_tokens.value)
            prefill_requests = math.ceil(self._prefill_requests.value) if prefill_tokens else 0
        typical = self._context_length.value
        requests += 1 if typical > 0 else 0
        return self.steps.seconds(StepLoad(prefill_requests, prefill_tokens, requests, math.ceil(kv + typical)))

    def _decode_load(
        self, step: ForwardPassMetrics, scale: float, *, with_queued: bool, with_queued_prefill: bool = False
    ) -> tuple[int, float]:
        requests = step.scheduled_requests.num_decode_requests
        kv = step.scheduled_requests.sum_decode_kv_tokens
        if with_queued:
            requests += step.queued_requests.num_decode_requests
            kv += step.queued_requests.sum_decode_kv_tokens
        if with_queued_prefill:
            requests += step.queued_requests.num_prefill_requests
            kv += step.queued_requests.sum_prefill_tokens
        return math.ceil(requests * scale), kv * scale

    def _chunked_s(self, tokens: int, requests: int, decode: int, kv: int, chunk: int) -> float | None:
        """Return the time of a prefill in chunks of the token limit, each together with the decode requests."""
        full, rest = divmod(tokens, chunk)
        total = 0.0
        if full:
            seconds = self.steps.seconds(StepLoad(requests, chunk, decode, kv))
            if seconds is None:
                return None
            total += seconds * full
        if rest:
            seconds = self.steps.seconds(StepLoad(requests, rest, decode, kv))
            if seconds is None:
                return None
            total += seconds
        return total

    # Capacity

    def capacity(self, query: CapacityQuery) -> EngineCapacity | None:
        """Return the best batch size's throughput; None if the model or the traffic is unusable.

        A batch that meets the objectives is better than any that does not; among equals the higher rate is better. If
        none meets them, the best of the others is returned with `is_eligible` false.
        """
        limits = limits_of(self.capabilities)
        needed = (query.isl,) if self.role is EngineRole.PREFILL else (query.isl, query.osl)
        if limits is None or not all(0 < value <= TOKENS_MAX for value in needed):
            return None
        isl = math.ceil(query.isl)
        osl = 1 if self.role is EngineRole.PREFILL else math.ceil(query.osl)
        best: EngineCapacity | None = None
        for batch in candidates(self._batch_max(isl, osl, query, limits)):
            found = self._at_batch(batch, isl, osl, query, limits)
            if found is None:
                continue
            if best is None or (found.is_eligible, found.rps) > (best.is_eligible, best.rps):
                best = found
        return best

    def _batch_max(self, isl: int, osl: int, query: CapacityQuery, limits: EngineLimits) -> int:
        if self.role is EngineRole.PREFILL:
            uncached = _uncached_length(isl, query)
            if uncached > limits.max_num_batched_tokens:
                return 1
            return min(limits.max_num_seqs, limits.max_num_batched_tokens // uncached)
        decode = min(limits.max_num_seqs, limits.max_kv_tokens // _context(isl, osl))
        return decode if self.role is EngineRole.DECODE else min(decode, limits.max_num_batched_tokens - 1)

    def _at_batch(
        self, batch: int, isl: int, osl: int, query: CapacityQuery, limits: EngineLimits
    ) -> EngineCapacity | None:
        uncached = _uncached_length(isl, query)
        kv = batch * _context(isl, osl)
        accept = accepted(query.accept_length)
        chunk = limits.max_num_batched_tokens
        if self.role is EngineRole.PREFILL:
            ttft = self._chunked_s(batch * uncached, batch, 0, 0, chunk)
            return None if not ttft else _judged(EngineCapacity(batch / ttft, ttft_s=ttft, e2e_s=ttft), query)
        if self.role is EngineRole.DECODE:
            step = self.steps.seconds(StepLoad(0, 0, batch, kv))
            if not step:
                return None
            return _judged(EngineCapacity(batch / (osl * (step / accept)), itl_s=step / accept), query)
        prefill = math.ceil(batch * accept * uncached / osl)
        if prefill > chunk - batch:
            return None
        step = self.steps.seconds(StepLoad(1, prefill, batch, kv))
        ttft = self._chunked_s(prefill + uncached, 1, batch, kv, chunk)
        if not step or not ttft:
            return None
        itl = step / accept
        return _judged(EngineCapacity(batch / (osl * itl), ttft, itl, ttft + itl * (osl - 1)), query)


def _context(isl: int, osl: int) -> int:
    """Return the mean KV tokens of a decoding request: its prompt and half of its output."""
    return max(1, isl + osl // 2)


def _uncached_length(isl: int, query: CapacityQuery) -> int:
    return max(1, math.ceil(isl * uncached_fraction(query.kv_hit_rate)))


def _judged(found: EngineCapacity, query: CapacityQuery) -> EngineCapacity:
    """Return the capacity with its eligibility; a latency that is unknown does not meet an objective."""
    is_eligible = all(
        objective is None or (value is not None and value <= objective)
        for value, objective in ((found.ttft_s, query.ttft_s), (found.itl_s, query.itl_s))
    )
    return EngineCapacity(found.rps, found.ttft_s, found.itl_s, found.e2e_s, is_eligible)
