"""Calibration: efficiencies of engines from measured points, by damped least squares on the logarithms of the ratios.

A point is a closed loop: a constant number of concurrent requests of fixed lengths, with its mean TTFT and TPOT. The
prediction is

    TPOT = decode step + batch x prefill / answer tokens
    TTFT = request time + 1.5 decode steps + prefill x (prompts of a group + start x batch + queue)

A point may also be one step of an engine (a forward pass): the tokens that it computed and read, and its duration.

A fit starts from known efficiencies, and departs from them only as far as the points require: with few points it is a
correction, with many it is independent of its start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamo.profiler.perf.analytic_engine import AnalyticEngine, Efficiency

FITTED = (
    "compute", "memory", "layer_s", "step_s", "expert_layer_s", "request_s", "prompt_s", "closed_prompts", "closed_start",
)  # fmt: skip
LIMITS: Mapping[str, float] = {"compute": 0.9, "memory": 0.95}
"""Largest plausible shares of the peak rates."""
PRIOR_WEIGHT = 0.3
"""Weight of the start against one measured ratio: a departure by a factor of e counts as an error of 55 %."""
TTFT_WEIGHT = 0.5
"""Weight of TTFT against TPOT: TTFT also depends on the measuring client and on the order of requests."""
OUTLIER = 0.3
"""Logarithmic error from which a point's weight falls."""
ROUNDS = 10
NUDGE = 0.02
LEAP_MAX = 0.7
"""Largest change of a logarithm per round."""
CONVERGED = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePoint:
    """A measured closed loop on one engine."""

    engine: AnalyticEngine
    isl: int
    osl: int
    batch: int
    """Concurrent requests per data-parallel rank."""
    ttft_ms: float
    tpot_ms: float

    def log_ratios(self, efficiency: Efficiency) -> list[float]:
        """Return the weighted logarithms of predicted to measured TTFT and TPOT."""
        ((ttft_error, tpot_error),) = errors([self], efficiency)
        return [TTFT_WEIGHT * math.log1p(ttft_error), math.log1p(tpot_error)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """A measured step of one data-parallel rank of an engine."""

    engine: AnalyticEngine
    prompt_tokens: int
    """Prompt tokens that the step computed."""
    cached_tokens: int
    """Cached tokens of these prompts."""
    sequences: int
    """Running answers."""
    context_tokens: int
    """Cached tokens of the running answers."""
    wall_ms: float

    def log_ratios(self, efficiency: Efficiency) -> list[float]:
        """Return the logarithm of predicted to measured duration."""
        engine = replace(self.engine, efficiency=efficiency)
        prompts_ms = engine.prefill_ms(self.prompt_tokens, self.cached_tokens)
        return [math.log((prompts_ms + engine.decode_ms(self.context_tokens, 0, self.sequences)) / self.wall_ms)]


MeasuredPoint = EnginePoint | StepPoint


def closed_loop(engine: AnalyticEngine, isl: int, osl: int, batch: int) -> tuple[float, float]:
    """Return TTFT and TPOT in milliseconds of `batch` concurrent requests per rank."""
    parts = engine.efficiency
    decode_ms = engine.decode_ms(round(batch * (isl + osl / 2)), 0, batch)
    prefill_ms = engine.prefill_ms(isl)
    tpot_ms = decode_ms + batch * prefill_ms / osl
    busy = min(0.95, batch * prefill_ms / (osl * tpot_ms))
    waiting = parts.closed_prompts + parts.closed_start * batch + busy / (2 * (1 - busy))
    return engine.request_ms() + 1.5 * decode_ms + prefill_ms * waiting, tpot_ms


def fit(points: Sequence[MeasuredPoint], start: Efficiency, prior_weight: float = PRIOR_WEIGHT) -> Efficiency:
    """Return the efficiencies that explain the points best, near the start."""
    found = np.zeros(len(FITTED))
    most = np.array([math.log(LIMITS[name] / getattr(start, name)) if name in LIMITS else math.inf for name in FITTED])
    for _ in range(ROUNDS):
        left = _ratios(points, start, found)
        slopes = np.empty((len(left), len(FITTED)))
        for at in range(len(FITTED)):
            nudged = found.copy()
            nudged[at] += NUDGE
            slopes[:, at] = (_ratios(points, start, nudged) - left) / NUDGE
        weights = np.minimum(1.0, OUTLIER / np.maximum(np.abs(left), 1e-9))
        normal = slopes.T @ (slopes * weights[:, None]) + prior_weight * np.eye(len(FITTED))
        step = np.linalg.solve(normal, -(slopes.T @ (weights * left) + prior_weight * found))
        step = np.clip(step, -LEAP_MAX, LEAP_MAX)
        found = np.minimum(found + step, most)
        if np.abs(step).max() < CONVERGED:
            break
    return _scaled(start, found)


def errors(points: Sequence[EnginePoint], efficiency: Efficiency | None = None) -> list[tuple[float, float]]:
    """Return the relative errors of TTFT and TPOT of each point."""
    found = []
    for point in points:
        engine = point.engine if efficiency is None else replace(point.engine, efficiency=efficiency)
        ttft_ms, tpot_ms = closed_loop(engine, point.isl, point.osl, point.batch)
        found.append((ttft_ms / point.ttft_ms - 1, tpot_ms / point.tpot_ms - 1))
    return found


def _ratios(points: Sequence[MeasuredPoint], start: Efficiency, logs: Any) -> Any:
    """Return the weighted logarithms of predicted to measured values."""
    efficiency = _scaled(start, logs)
    return np.array([one for point in points for one in point.log_ratios(efficiency)])


def _scaled(start: Efficiency, logs: Any) -> Efficiency:
    return replace(
        start, **{name: getattr(start, name) * math.exp(log) for name, log in zip(FITTED, logs, strict=True)}
    )
