"""Profile: step times from a profiler's measurements.

Two file formats: the mocker's own lookup tables, and the profiler's scattered points, to which planes are fitted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.mocker.simulation.timing import ProfiledTiming

TABLES = ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl")
GRID = 100  # Points per side of a table made from scattered points, as in upstream.
RAW = (
    ("selected_prefill_interpolation/raw_data.npz", "selected_decode_interpolation/raw_data.npz"),
    ("prefill_raw_data.json", "decode_raw_data.json"),
)
"""Files in which a profiler stores its prefill and decode points."""


def profiled(path: str, speedup: float = 1.0, decode_speedup: float = 1.0, *, grid: int = GRID) -> ProfiledTiming:
    """Return the step times of a profile; scattered points become a table of `grid` times `grid`. Raise `ConfigError` if it cannot be read or is incomplete."""
    if path.startswith("{"):
        return _of_tables(
            _decoded(path.encode(), "planner_profile_data"), "planner_profile_data", speedup, decode_speedup
        )
    place = Path(path)
    for prefill, decode in RAW:
        if (place / prefill).is_file() and (place / decode).is_file():
            return _of_points(_read(place / prefill), _read(place / decode), place, (speedup, decode_speedup), grid)
    if place.is_dir():
        found = sorted(one for one in place.iterdir() if one.suffix in {".npz", ".json"})
        if len(found) != 1:
            raise ConfigError(f"planner_profile_data {path}: expected one NPZ or JSON file, found {len(found)}")
        place = found[0]
    return _of_tables(_read(place), f"planner_profile_data {place}", speedup, decode_speedup)


def fixed(prefill_ms: float, decode_ms: float) -> str:
    """Return a profile, as JSON, in which every prompt and every step has the same duration."""
    one = [1.0]
    return msgspec.json.encode(dict(zip(TABLES, (one, [prefill_ms], one, one, [[decode_ms]]), strict=True))).decode()


def _of_tables(arrays: dict[str, Any], place: str, speedup: float, decode_speedup: float) -> ProfiledTiming:
    """Use lookup tables unchanged."""
    isl, ttft, kv, context, itl = (_of(arrays, name, place) for name in TABLES)
    fits = len(isl) == len(ttft) and len(itl) == len(kv) and all(len(row) == len(context) for row in itl)
    if not isl or not itl or not fits:
        raise ConfigError(f"{place}: array lengths do not match")
    return ProfiledTiming(isl, ttft, kv, context, itl, speedup, decode_speedup)


def _of_points(
    prefill: dict[str, Any], decode: dict[str, Any], place: Path, speedups: tuple[float, float], grid: int
) -> ProfiledTiming:
    """Use prefill points unchanged; fit a plane over cached tokens and sequences to the decode points."""
    import numpy as np

    where = f"planner_profile_data {place}"
    points = sorted(zip(_of(prefill, "prefill_isl", where), _of(prefill, "prefill_ttft", where), strict=False))
    usage, context, itl = (_of(decode, name, where) for name in ("x_kv_usage", "y_context_length", "z_itl"))
    limit = decode.get("max_kv_tokens")
    capacity = float(limit[0] if isinstance(limit, list) and limit else limit or 0)
    if not points or not usage or not capacity or not len(usage) == len(context) == len(itl) or min(context) <= 0:
        raise ConfigError(f"planner_profile_data {place}: array lengths do not match")
    tokens = np.array(usage, dtype=float) * capacity
    facts = np.column_stack([np.ones(len(tokens)), tokens, tokens / np.array(context, dtype=float)])
    weights, *_ = np.linalg.lstsq(facts, np.array(itl, dtype=float), rcond=None)
    kv_axis = np.linspace(capacity / grid, capacity, grid)
    context_axis = np.linspace(min(context), max(context), grid)
    plane = weights[0] + weights[1] * kv_axis[:, None] + weights[2] * kv_axis[:, None] / context_axis[None, :]
    table = np.maximum(plane, min(itl) if min(itl) > 0 else 0.0).tolist()
    return ProfiledTiming(
        [isl for isl, _ in points],
        [ttft for _, ttft in points],
        kv_axis.tolist(),
        context_axis.tolist(),
        table,
        *speedups,
    )


def _of(arrays: dict[str, Any], name: str, place: str) -> Sequence[Any]:
    if not isinstance(arrays.get(name), list):
        raise ConfigError(f"{place}: {name} is missing")
    found: Sequence[Any] = arrays[name]
    return found


def _read(place: Path) -> dict[str, Any]:
    what = f"planner_profile_data: cannot read {place}"
    try:
        text = place.read_bytes() if place.suffix == ".json" else None
        if text is None:
            import numpy as np

            with np.load(place, allow_pickle=False) as data:
                return {name: data[name].tolist() for name in data.files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from None
    return _decoded(text, what)


def _decoded(text: bytes, what: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{what}: {error}") from None
