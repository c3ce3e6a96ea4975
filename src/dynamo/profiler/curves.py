"""Curves: prefill and decode performance of the picked engines over prompt lengths, cache use and context lengths.

The grids and arrays are those of the released profiler, so that planner and mocker of either read them. `PrefillCurve`
and `DecodeCurve` hold measured or estimated points alike.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.profiler.perf.analytic_engine import AnalyticEngine

PREFILL_FOLDER, DECODE_FOLDER = "selected_prefill_interpolation", "selected_decode_interpolation"
RAW_FILE = "raw_data.npz"
PREFILL_JSON, DECODE_JSON = "prefill_raw_data.json", "decode_raw_data.json"
FIRST_ISL = 100
PREFILL_MARGIN = 512
"""Tokens below the longest context at which the prefill grid ends."""
DECODE_OSL = 500
"""Answer tokens of a decode measurement."""
CONCURRENCY_MAX = 2000


@dataclass(slots=True)
class PrefillCurve:
    """Prefill points: prompt length, TTFT in ms, and throughput in tokens per second and GPU."""

    isl: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    thpt_per_gpu: list[float] = field(default_factory=list)

    def add(self, isl: int, ttft_ms: float, gpus: int, ranks: int = 1) -> None:
        """Add a point: a prompt on each of `ranks` data-parallel ranks."""
        self.isl.append(isl)
        self.ttft_ms.append(ttft_ms)
        self.thpt_per_gpu.append(isl / ttft_ms / gpus * 1000 * ranks)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the files."""
        return {"prefill_isl": self.isl, "prefill_ttft": self.ttft_ms, "prefill_thpt_per_gpu": self.thpt_per_gpu}


@dataclass(slots=True)
class DecodeCurve:
    """Decode points: share of the cache in use, context length, ITL in ms, and tokens per second and GPU."""

    max_kv_tokens: int
    usage: list[float] = field(default_factory=list)
    context: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    thpt_per_gpu: list[float] = field(default_factory=list)

    def add(self, isl: int, concurrency: int, itl_ms: float, thpt_per_gpu: float) -> None:
        """Add a measurement of concurrent answers of `DECODE_OSL` tokens to prompts of `isl` tokens."""
        context = isl + DECODE_OSL / 2
        self.usage.append(context * concurrency / self.max_kv_tokens)
        self.context.append(context)
        self.itl_ms.append(itl_ms)
        self.thpt_per_gpu.append(thpt_per_gpu)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the files."""
        return {
            "x_kv_usage": self.usage,
            "y_context_length": self.context,
            "z_itl": self.itl_ms,
            "z_thpt_per_gpu": self.thpt_per_gpu,
            "max_kv_tokens": self.max_kv_tokens,
        }


def prefill_grid(max_context: int, granularity: int) -> list[int]:
    """Return the prompt lengths of a prefill sweep. Raise `ConfigError` if the context is too short for three."""
    end = max_context - PREFILL_MARGIN
    step = (end - FIRST_ISL) // max(1, granularity)
    found = list(range(FIRST_ISL, end, step)) if step > 0 else []
    if len(found) < 3:
        raise ConfigError(
            f"--prefill-interpolation-granularity {granularity}: must leave three or more prompt lengths "
            f"between {FIRST_ISL} and {end} tokens"
        )
    return found


def decode_grid(max_context: int, max_kv_tokens: int, granularity: int, ranks: int) -> list[tuple[int, list[int]]]:
    """Return the prompt lengths of a decode sweep, each with its numbers of concurrent requests."""
    end = max_context - DECODE_OSL
    step = max(1, (end - FIRST_ISL) // max(1, granularity))
    found = []
    for isl in range(FIRST_ISL, end, step):
        levels = concurrencies(min(CONCURRENCY_MAX, max_kv_tokens // (isl + DECODE_OSL)), granularity, ranks)
        if levels:
            found.append((isl, levels))
    return found


def concurrencies(most: int, granularity: int, ranks: int) -> list[int]:
    """Return up to `granularity` evenly spaced multiples of `ranks`, from one per rank to at most `most`."""
    steps = most // ranks
    if steps < 1:
        return []
    if steps <= granularity or granularity < 2:
        return [ranks * one for one in range(1, steps + 1)]
    spaced = {round(1 + at * (steps - 1) / (granularity - 1)) for at in range(granularity)}
    return [ranks * one for one in sorted(spaced)]


def estimated_prefill(engine: AnalyticEngine, max_context: int, granularity: int) -> PrefillCurve:
    """Return the prefill curve of an engine by the performance model."""
    curve = PrefillCurve()
    for isl in prefill_grid(max_context, granularity):
        curve.add(isl, engine.prefill_ms(isl) + engine.request_ms(), engine.gpus, engine.parallel.dp)
    return curve


def estimated_decode(engine: AnalyticEngine, max_context: int, granularity: int) -> DecodeCurve:
    """Return the decode curve of an engine by the performance model."""
    ranks, capacity = engine.parallel.dp, engine.kv_tokens()
    curve = DecodeCurve(capacity)
    for isl, levels in decode_grid(max_context, capacity, granularity, ranks):
        for level in levels:
            batch = level // ranks
            itl_ms = engine.decode_ms(round(batch * (isl + DECODE_OSL / 2)), capacity, batch)
            curve.add(isl, level, itl_ms, level * 1000 / itl_ms / engine.gpus)
    return curve


def documents(prefill: PrefillCurve, decode: DecodeCurve) -> dict[str, Any]:
    """Return the JSON documents by file name."""
    return {PREFILL_JSON: prefill.arrays(), DECODE_JSON: decode.arrays()}


def write(directory: Path, prefill: PrefillCurve, decode: DecodeCurve) -> None:
    """Write the NPZ files below a directory."""
    import numpy as np

    for folder, arrays in ((PREFILL_FOLDER, prefill.arrays()), (DECODE_FOLDER, decode.arrays())):
        (directory / folder).mkdir(parents=True, exist_ok=True)
        stored: dict[str, Any] = {name: np.atleast_1d(np.asarray(value)) for name, value in arrays.items()}
        np.savez(directory / folder / RAW_FILE, **stored)
