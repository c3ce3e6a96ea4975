"""Regression of forward-pass times: seconds of an engine step as a linear function of its tokens and requests.

Ordinary least squares with intercept over a bounded set of observed steps. Samples are kept in buckets over the observed range
of each feature, so that a long steady phase does not displace the rare steps of other sizes that determine the slope.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from math import isqrt

import numpy as np

from dynamo.planner.config.perf_model import EngineRole
from dynamo.protocols.load import ForwardPassMetrics

SECONDS_MIN = 1e-6
"""Lower bound of a predicted step."""
RELAXED_COEFFICIENT = -1e-6
"""A coefficient of the decode requests below this is set to 0: their number is nearly collinear with their KV tokens."""

RANK_TOLERANCE = 1e-6
"""Ratio to the largest singular value below which a direction of the features is treated as not observed."""

Features = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of one rank in one step."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0


def features_of(role: EngineRole, load: StepLoad) -> Features:
    """Return the regression features of a role."""
    if role is EngineRole.PREFILL:
        return (float(load.prefill_tokens),)
    if role is EngineRole.DECODE:
        return (float(load.decode_requests), float(load.decode_kv_tokens))
    return (float(load.prefill_tokens), float(load.decode_kv_tokens))


def scheduled_load(step: ForwardPassMetrics) -> StepLoad:
    """Return the work that a step computed."""
    scheduled = step.scheduled_requests
    return StepLoad(
        scheduled.num_prefill_requests,
        scheduled.sum_prefill_tokens,
        scheduled.num_decode_requests,
        scheduled.sum_decode_kv_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    number: int
    features: Features
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionState:
    """Samples of a regression by bucket, each as its features and its seconds, in the order of their arrival."""

    buckets: tuple[tuple[tuple[int, ...], tuple[tuple[float, ...], ...]], ...]
    bounds: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class StepRegression:
    """Least-squares model of one role's step times. Not thread-safe; one owner."""

    role: EngineRole
    samples_max: int
    bucket_count: int
    samples_min: int
    is_bounded: bool = False
    """Whether a negative slope is set to 0 and the others are fitted again; otherwise the fit is rejected, as upstream does."""
    _buckets: dict[tuple[int, ...], deque[_Sample]] = field(default_factory=dict)
    _bounds: list[tuple[float, float]] = field(default_factory=list)
    _size: int = 0
    _numbers: "count[int]" = field(default_factory=count)
    _coefficients: tuple[float, ...] | None = None
    """Intercept, then one per feature; None if the fit was rejected."""
    _is_stale: bool = True

    @property
    def size(self) -> int:
        """Number of samples."""
        return self._size

    @property
    def is_ready(self) -> bool:
        """Return whether there are enough samples."""
        return self._size >= self.samples_min

    def add(self, step: ForwardPassMetrics) -> None:
        """Add an observed step; idle heartbeats (no time) are not samples."""
        if step.wall_time <= 0:
            return
        sample = _Sample(next(self._numbers), features_of(self.role, scheduled_load(step)), step.wall_time)
        if self._widen(sample.features):
            self._rebuild()
        self._buckets.setdefault(self._key(sample.features), deque()).append(sample)
        self._size += 1
        if self._size > self.samples_max:
            fullest = max(self._buckets, key=lambda key: len(self._buckets[key]))
            self._buckets[fullest].popleft()
            if not self._buckets[fullest]:
                del self._buckets[fullest]
            self._size -= 1
        self._is_stale = True

    def add_all(self, steps: Iterable[ForwardPassMetrics]) -> None:
        """Add observed or profiled steps in order."""
        for step in steps:
            self.add(step)

    def state(self) -> RegressionState:
        """Return the samples for a checkpoint."""
        return RegressionState(
            buckets=tuple(
                (key, tuple((*sample.features, sample.seconds) for sample in bucket))
                for key, bucket in self._buckets.items()
            ),
            bounds=tuple(self._bounds),
        )

    def restore(self, state: RegressionState) -> None:
        """Set the samples to those of a checkpoint."""
        self._bounds = list(state.bounds)
        self._buckets = {
            key: deque(_Sample(next(self._numbers), row[:-1], row[-1]) for row in rows) for key, rows in state.buckets
        }
        self._size = sum(map(len, self._buckets.values()))
        self._is_stale = True

    def seconds(self, load: StepLoad) -> float | None:
        """Return the predicted seconds of a step; None without a valid fit."""
        if not self.is_ready:
            return None
        if self._is_stale:
            self._coefficients = self._fit()
            self._is_stale = False
        if self._coefficients is None:
            return None
        intercept, *slopes = self._coefficients
        terms = zip(slopes, features_of(self.role, load), strict=True)
        return max(SECONDS_MIN, intercept + sum(slope * value for slope, value in terms))

    def _widen(self, features: Features) -> bool:
        """Extend the bounds to contain the features; return whether they moved."""
        if not self._bounds:
            self._bounds = [(value, value) for value in features]
            return True
        wider = [(min(low, value), max(high, value)) for (low, high), value in zip(self._bounds, features, strict=True)]
        moved = wider != self._bounds
        self._bounds = wider
        return moved

    def _key(self, features: Features) -> tuple[int, ...]:
        per_axis = self.bucket_count if len(features) == 1 else isqrt(self.bucket_count)
        key = []
        for value, (low, high) in zip(features, self._bounds, strict=True):
            position = (value - low) / (high - low) * per_axis if high > low else 0.0
            key.append(min(int(position), per_axis - 1))
        return tuple(key)

    def _rebuild(self) -> None:
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        self._buckets = {}
        for sample in samples:
            self._buckets.setdefault(self._key(sample.features), deque()).append(sample)

    def _fit(self) -> tuple[float, ...] | None:
        """Return the least-squares solution of smallest norm over centred features; None for a negative slope."""
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        features = np.array([sample.features for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        centre, mean = features.mean(axis=0), float(seconds.mean())
        slopes = _slopes(features - centre, seconds - mean)
        while self.is_bounded and min(slopes) < 0:
            features[:, slopes.index(min(slopes))] = 0.0
            centre = features.mean(axis=0)
            slopes = _slopes(features - centre, seconds - mean)
        intercept = mean - float(sum(slope * value for slope, value in zip(slopes, centre, strict=True)))
        if self.role is EngineRole.DECODE and slopes[0] < RELAXED_COEFFICIENT:
            slopes[0] = 0.0
        rejected = slopes[1:] if self.role is EngineRole.DECODE else slopes
        return None if any(slope < 0 for slope in rejected) else (intercept, *slopes)


def _slopes(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the least-squares slopes; exactly 0 for a feature that does not vary."""
    found = np.linalg.lstsq(features, seconds, rcond=RANK_TOLERANCE)[0]
    return [float(value) if column.any() else 0.0 for value, column in zip(found, features.T, strict=True)]
