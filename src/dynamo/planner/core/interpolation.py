"""Interpolation of measured profiles: latency and throughput of an engine at lengths and loads between the measured ones.

As in releases before 1.0: a cubic spline over the prompt length for prefill, a grid over KV usage and context length for decode. Inputs
outside the measured range are set to its bounds. Extra `planner` (scipy).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dynamo.core.errors import ConfigError

GRID = 100
"""Points of the decode grid on each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProfile:
    """Measured prefills: one prompt at a time."""

    isl: Sequence[float]
    """Prompt lengths in tokens."""
    ttft_ms: Sequence[float]
    thpt_per_gpu: Sequence[float]
    """Prompt tokens per second and GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """Measured decode steps, at scattered loads."""

    kv_usage: Sequence[float]
    """Used fraction of the KV cache."""
    context_length: Sequence[float]
    itl_ms: Sequence[float]
    thpt_per_gpu: Sequence[float]
    """Output tokens per second and GPU."""
    max_kv_tokens: float


class BestDecode(NamedTuple):
    """Highest throughput at which a latency objective is met, or the lowest load if none meets it."""

    thpt_per_gpu: float
    itl_ms: float
    kv_usage: float


class PrefillInterpolator:
    """Time to first token and throughput of a prefill engine by prompt length."""

    def __init__(self, profile: PrefillProfile) -> None:
        """Raise `ConfigError` without two different lengths, and without the library."""
        lengths, order = np.unique(np.asarray(profile.isl, dtype=float), return_index=True)
        if len(lengths) < 2:
            raise ConfigError(f"prefill_isl: {len(lengths)} different lengths: must be at least 2")
        spline = _scipy().make_interp_spline
        degree = min(3, len(lengths) - 1)
        self._bounds = float(lengths[0]), float(lengths[-1])
        self._ttft = spline(lengths, np.asarray(profile.ttft_ms, dtype=float)[order], k=degree)
        self._thpt = spline(lengths, np.asarray(profile.thpt_per_gpu, dtype=float)[order], k=degree)

    def interpolate_ttft(self, isl: float) -> float:
        """Return the time to first token in milliseconds."""
        return float(self._ttft(self._clamped(isl)))

    def interpolate_thpt_per_gpu(self, isl: float) -> float:
        """Return the prompt tokens per second and GPU."""
        return float(self._thpt(self._clamped(isl)))

    def capacity_rps(self, isl: float, gpus: int) -> float:
        """Return the requests per second of an engine of `gpus` GPUs."""
        return self.interpolate_thpt_per_gpu(isl) * gpus / max(1.0, isl)

    def _clamped(self, isl: float) -> float:
        return min(max(isl, self._bounds[0]), self._bounds[1])


class DecodeInterpolator:
    """Inter-token latency and throughput of a decode engine by KV usage and context length."""

    def __init__(self, profile: DecodeProfile) -> None:
        """Raise `ConfigError` for points that span no area, and without the library."""
        if not profile.max_kv_tokens > 0:
            raise ConfigError(f"max_kv_tokens: {profile.max_kv_tokens}: must be greater than 0")
        self._max_kv_tokens = profile.max_kv_tokens
        self._usage = np.linspace(0.0, 1.0, GRID)
        self._context = np.linspace(0.0, max(profile.context_length), GRID)
        points = np.column_stack((profile.kv_usage, profile.context_length))
        if np.linalg.matrix_rank(points - points.mean(axis=0)) < 2:
            raise ConfigError("x_kv_usage, y_context_length: must be at least 3 points that are not on one line")
        self._itl = self._on_grid(points, profile.itl_ms)
        self._thpt = self._on_grid(points, profile.thpt_per_gpu)

    def _on_grid(self, points: Any, values: Sequence[float]) -> Any:
        """Return the values at the grid, cubic between the points and that of the nearest point around them."""
        griddata = _scipy().griddata
        axes = tuple(np.meshgrid(self._usage, self._context))
        cubic = griddata(points, values, axes, method="cubic", rescale=True)
        nearest = griddata(points, values, axes, method="nearest", rescale=True)
        return np.where(np.isnan(cubic), nearest, cubic)

    def interpolate_itl(self, concurrency: float, context_length: float) -> float:
        """Return the inter-token latency in milliseconds."""
        return float(self._itl[self._cell(concurrency, context_length)])

    def interpolate_thpt_per_gpu(self, concurrency: float, context_length: float) -> float:
        """Return the output tokens per second and GPU."""
        return float(self._thpt[self._cell(concurrency, context_length)])

    def find_best_throughput_per_gpu(self, itl: float, context_length: float) -> BestDecode:
        """Return the highest KV usage whose latency is at most `itl` milliseconds; the lowest one if none is."""
        row = _nearest(self._context, context_length)
        met = np.flatnonzero(self._itl[row] <= itl)
        column = int(met[-1]) if len(met) else 0
        return BestDecode(float(self._thpt[row, column]), float(self._itl[row, column]), float(self._usage[column]))

    def capacity_rps(self, itl: float, isl: float, osl: float, gpus: int) -> float:
        """Return the requests per second of an engine of `gpus` GPUs within an inter-token latency."""
        best = self.find_best_throughput_per_gpu(itl, isl + osl / 2)
        return best.thpt_per_gpu * gpus / max(1.0, osl)

    def _cell(self, concurrency: float, context_length: float) -> tuple[int, int]:
        usage = concurrency * context_length / self._max_kv_tokens
        return _nearest(self._context, context_length), _nearest(self._usage, usage)


def _nearest(axis: Any, value: float) -> int:
    step = float(axis[1] - axis[0])
    return int(np.clip(round((value - float(axis[0])) / step), 0, len(axis) - 1))


def _scipy() -> Any:
    """Return the library's interpolation functions. Raise `ConfigError` if it is not installed."""
    try:
        from scipy import interpolate
    except ImportError:
        raise ConfigError(
            "profile_results_dir: interpolation requires the package scipy; install dynamo-serve[planner]"
        ) from None
    return interpolate
