"""Rope: rotary position embedding and its context extension methods."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamo.core.errors import ConfigError

F64 = npt.NDArray[np.float64]
C64 = npt.NDArray[np.complex64]

THETA = 10_000.0  # Default base if config.json has none.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Parameters from `rope_parameters` of config.json, or `rope_scaling` in older checkpoints."""

    kind: str
    dim: int
    theta: float
    max_positions: int
    original_max_positions: int
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    is_truncated: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def read(cls, config: dict[str, Any], head_dim: int, max_positions: int) -> "Rope":
        """Read the parameters. Raise `ConfigError` for an unknown kind, `KeyError` for a missing number."""
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = str(given.get("rope_type") or given.get("type") or "default")
        if kind not in KINDS:
            raise ConfigError(f"rope_type is {kind!r}; the engine computes {', '.join(KINDS)}")
        if float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ConfigError("partial_rotary_factor is not 1; the engine rotates whole heads")
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        original = int(original or max_positions)
        factor = given.get("factor")
        if factor is None and kind in ("yarn", "longrope"):
            factor = max_positions / original
        elif factor is None:
            factor = 1.0 if kind == "default" else given["factor"]
        is_longrope = kind == "longrope"
        return cls(
            kind=kind,
            dim=head_dim,
            theta=float(given.get("rope_theta") or config.get("rope_theta") or THETA),
            max_positions=max_positions,
            original_max_positions=original,
            factor=float(factor),
            attention_factor=given.get("attention_factor"),
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            mscale=given.get("mscale"),
            mscale_all_dim=given.get("mscale_all_dim"),
            is_truncated=bool(given.get("truncate", True)),
            low_freq_factor=float(given["low_freq_factor"]) if kind == "llama3" else 1.0,
            high_freq_factor=float(given["high_freq_factor"]) if kind == "llama3" else 4.0,
            short_factor=_factors(given["short_factor"], head_dim) if is_longrope else (),
            long_factor=_factors(given["long_factor"], head_dim) if is_longrope else (),
        )

    @property
    def reach(self) -> int:
        """Return the longest sequence for which this embedding is defined."""
        return int(self.max_positions * self.factor) if self.kind == "dynamic" else self.max_positions

    def rotations(self, longest: int) -> C64:
        """Return the rotation of each pair at each position: (longest, dim / 2) complex numbers.

        Kinds that choose frequencies by the sequence length (`dynamic`, `longrope`) use `longest`, the longest sequence that is
        served: a position's rotation must not depend on how the prompt was chunked, or a cached key would not match a later
        query.
        """
        frequencies, amplitude = KINDS[self.kind](self, longest)
        angles = np.outer(np.arange(longest, dtype=np.float64), frequencies)
        return (amplitude * np.exp(1j * angles)).astype(np.complex64)


def _factors(values: Any, head_dim: int) -> tuple[float, ...]:
    if len(values) != head_dim // 2:
        raise ConfigError(f"longrope has {len(values)} factors for {head_dim // 2} pairs")
    return tuple(map(float, values))


def _plain(dim: int, theta: float) -> F64:
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def _default(rope: Rope, longest: int) -> tuple[F64, float]:
    return _plain(rope.dim, rope.theta), 1.0


def _linear(rope: Rope, longest: int) -> tuple[F64, float]:
    return _plain(rope.dim, rope.theta) / rope.factor, 1.0


def _dynamic(rope: Rope, longest: int) -> tuple[F64, float]:
    """NTK-aware: scale the base with the ratio of the sequence length to the trained length."""
    stretch = rope.factor * max(longest, rope.max_positions) / rope.max_positions - (rope.factor - 1)
    return _plain(rope.dim, rope.theta * stretch ** (rope.dim / (rope.dim - 2))), 1.0


def _yarn(rope: Rope, longest: int) -> tuple[F64, float]:
    """Keep the frequency of fast pairs, divide that of slow pairs by the factor and interpolate in between."""

    def pair_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # A ramp needs some width.
    slowness = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    plain = _plain(rope.dim, rope.theta)
    return plain / rope.factor * slowness + plain * (1 - slowness), _yarn_amplitude(rope)


def _yarn_amplitude(rope: Rope) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: Rope, longest: int) -> tuple[F64, float]:
    """Divide each pair by its own factor, from one set for short sequences and one for long ones."""
    factors = rope.long_factor if longest > rope.original_max_positions else rope.short_factor
    amplitude = 1.0
    if rope.attention_factor is not None:
        amplitude = float(rope.attention_factor)
    elif rope.factor > 1:
        amplitude = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    return _plain(rope.dim, rope.theta) / np.array(factors), amplitude


def _llama3(rope: Rope, longest: int) -> tuple[F64, float]:
    """Divide the frequency of long waves by the factor, keep that of short waves and interpolate in between."""
    plain = _plain(rope.dim, rope.theta)
    waves_in_context = rope.original_max_positions * plain / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    kept = np.clip((waves_in_context - rope.low_freq_factor) / width, 0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept, 1.0


KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
