"""Measured points of the performance model: closed loops, exports of aiperf and forward-pass traces."""

import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.candidates import EngineFamily
from dynamo.profiler.perf.analytic_engine import Efficiency
from dynamo.profiler.perf.calibration import TTFT_WEIGHT, EnginePoint, MeasuredPoint, StepPoint, fit

FLAG = "--points"
AIPERF_FILE = "profile_export_aiperf.json"
TRACE_SCHEMA = "dynamo.fpm.trace.v1"
TRACE_SUFFIXES = (".jsonl", ".jsonl.gz")
STEPS_MAX = 2_000_000
"""Steps that are read of a trace."""
STEP_KINDS_MAX = 300
"""Kinds of steps that take part in a fit, the most frequent ones."""
GROUPS = 5
"""Groups of points that are left out of a fit in turn."""
SCHEDULED = ("sum_prefill_tokens", "sum_prefill_kv_tokens", "num_decode_requests", "sum_decode_kv_tokens")
SCHEDULED_AT = (1, 3, 4, 5)
"""Places of these fields where the message has no names."""
AXES = ("tp", "pp", "dp", "moe_tp", "moe_ep")


class ClosedLoopPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured closed loop of the user's engine, as in `dynamo replay fit`, with its parallelism."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    moe_tp: int | None = None
    moe_ep: int | None = None
    tok_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Efficiencies that measured points correct, with the errors on these points."""

    efficiency: Efficiency
    source: str
    """Kinds and numbers of the points."""
    ttft_error: float | None
    """Median relative error of TTFT on points that were left out one at a time; None without closed loops."""
    itl_error: float | None
    """Median relative error of TPOT, or of the duration of steps, on points that were left out."""


def correction(paths: Sequence[str], family: EngineFamily, parallel: PickedParallelConfig) -> Correction:
    """Return the efficiencies that the points of all files correct. Raise `ConfigError` for a file that cannot be read.

    `parallel`: the parallelism of points whose file does not contain it.
    """
    points: list[MeasuredPoint] = []
    names = []
    for path in paths:
        kind, found = _read(path, family, parallel)
        points += found
        names.append(f"{len(found)} {kind} of {path}")
    itl, ttft = _left_out(points, family.efficiency)
    return Correction(
        efficiency=fit(points, family.efficiency),
        source=" and ".join(names),
        ttft_error=statistics.median(ttft) if ttft else None,
        itl_error=statistics.median(itl) if itl else None,
    )


def parallel_of(text: str, flag: str) -> PickedParallelConfig:
    """Return the parallelism of `tp=4,dp=2`. Raise `ConfigError`."""
    widths = {}
    for part in filter(None, text.split(",")):
        axis, _, value = part.partition("=")
        if axis not in AXES or not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{flag} {text}: must be like tp=4,pp=2; axes are {', '.join(AXES)}")
        widths[axis] = int(value)
    return PickedParallelConfig(**widths)


def _read(path: str, family: EngineFamily, parallel: PickedParallelConfig) -> tuple[str, list[MeasuredPoint]]:
    """Return the kind of a file's points, and the points."""
    place = Path(path)
    if place.is_dir():
        exports = sorted(place.rglob(AIPERF_FILE))
        if not exports:
            raise ConfigError(f"{FLAG} {path}: has no {AIPERF_FILE}; give the artifact directory of aiperf")
        return "exports of aiperf", [_aiperf(_json(one), str(one), family, parallel) for one in exports]
    if place.name.endswith(TRACE_SUFFIXES):
        return "kinds of steps", _steps(place, family, parallel)
    value = _json(place)
    if isinstance(value, dict):
        return "export of aiperf", [_aiperf(value, path, family, parallel)]
    try:
        loops = msgspec.convert(value, type=list[ClosedLoopPoint])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from None
    if not loops:
        raise ConfigError(f"{FLAG} {path}: must have one point or more")
    return "closed loops", [_closed_loop(one, family, parallel) for one in loops]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{FLAG} {path}: not JSON: {error}") from None


def _closed_loop(one: ClosedLoopPoint, family: EngineFamily, default: PickedParallelConfig) -> EnginePoint:
    given = {axis: getattr(one, axis) for axis in AXES if getattr(one, axis) is not None}
    parallel = PickedParallelConfig(**given) if given else default
    return EnginePoint(
        engine=family.engine(parallel),
        isl=one.input_tokens,
        osl=one.output_tokens,
        batch=max(1, one.concurrency // parallel.dp),
        ttft_ms=one.ttft_ms,
        tpot_ms=one.tpot_ms,
    )


def _aiperf(value: Any, path: str, family: EngineFamily, parallel: PickedParallelConfig) -> EnginePoint:
    """Return the point of an export of aiperf. Raise `ConfigError` if it is not that of a closed loop of streams."""

    def metric(name: str) -> float:
        found = (value.get(name) or {}).get("avg")
        if not isinstance(found, int | float) or found <= 0:
            raise ConfigError(f"{FLAG} {path}: {name}.avg is missing; measure with aiperf profile --streaming")
        return float(found)

    concurrency = _concurrency(value)
    if concurrency is None:
        raise ConfigError(f"{FLAG} {path}: has no concurrency; measure with aiperf profile --concurrency")
    return EnginePoint(
        engine=family.engine(parallel),
        isl=round(metric("input_sequence_length")),
        osl=max(2, round(metric("output_sequence_length"))),
        batch=max(1, concurrency // parallel.dp),
        ttft_ms=metric("time_to_first_token"),
        tpot_ms=metric("inter_token_latency"),
    )


def _concurrency(value: Any) -> int | None:
    """Return the number called `concurrency` in the configuration of an export, wherever its version has it."""
    if isinstance(value, Mapping):
        found = value.get("concurrency")
        if isinstance(found, int) and found > 0:
            return found
        nested: Iterable[Any] = value.values()
    elif isinstance(value, list):
        nested = value
    else:
        return None
    return next((one for one in map(_concurrency, nested) if one is not None), None)


def _steps(path: Path, family: EngineFamily, parallel: PickedParallelConfig) -> list[MeasuredPoint]:
    """Return one point for each kind of step: those with about the same numbers of tokens and sequences."""
    kinds: dict[tuple[int, ...], list[tuple[float, ...]]] = defaultdict(list)
    for step in _rows(path):
        kinds[tuple(_octave(value) for value in step[:-1])].append(step)
    if not kinds:
        raise ConfigError(f"{FLAG} {path}: has no forward passes of schema {TRACE_SCHEMA}")
    engine = family.engine(parallel)
    found: list[MeasuredPoint] = []
    for steps in sorted(kinds.values(), key=len, reverse=True)[:STEP_KINDS_MAX]:
        prompts, cached, sequences, context, seconds = (statistics.median(one) for one in zip(*steps, strict=True))
        found.append(
            StepPoint(
                engine=engine,
                prompt_tokens=round(prompts),
                cached_tokens=round(cached),
                sequences=round(sequences),
                context_tokens=round(context),
                wall_ms=1000 * seconds,
            )
        )
    return found


def _rows(path: Path) -> Iterator[tuple[float, ...]]:
    """Yield computed and cached prompt tokens, sequences, their cached tokens and seconds of each step with work."""
    opened: Callable[..., Any] = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt") as file:
            for number, line in enumerate(file):
                if number == STEPS_MAX:
                    return
                step = _step(line, path, number + 1)
                if step is not None:
                    yield step
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{FLAG} {path}: {reason}") from None


def _step(line: str, path: Path, number: int) -> tuple[float, ...] | None:
    """Return the step of a row; None for an idle one. Its fields have names, or the order of the message."""
    place = f"{FLAG} {path}: line {number}"
    try:
        event = json.loads(line)["event"]
        schema, fpm = event["schema"], event["fpm"]
        is_named = isinstance(fpm, dict)
        seconds = float(fpm["wall_time"] if is_named else fpm[4])
        scheduled = fpm["scheduled_requests"] if is_named else fpm[5]
        if isinstance(scheduled, dict):
            loads = [float(scheduled.get(name) or 0) for name in SCHEDULED]
        else:
            loads = [float(scheduled[at]) for at in SCHEDULED_AT]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{place}: not a forward pass: {type(error).__name__}: {error}") from None
    if schema != TRACE_SCHEMA:
        raise ConfigError(f"{place}: schema {schema!r}: must be {TRACE_SCHEMA}")
    return (*loads, seconds) if seconds > 0 and (loads[0] or loads[2]) else None


def _octave(value: float) -> int:
    """Return the number of quarter octaves of a count: 4 steps per factor of 2."""
    return round(4 * math.log2(value + 1))


def _left_out(points: Sequence[MeasuredPoint], start: Efficiency) -> tuple[list[float], list[float]]:
    """Return the relative errors of ITL and TTFT of points that were left out of a fit, one fifth at a time."""
    itl: list[float] = []
    ttft: list[float] = []
    groups = min(len(points), GROUPS) if len(points) > 1 else 0
    for group in range(groups):
        found = fit([one for at, one in enumerate(points) if at % groups != group], start)
        for one in points[group::groups]:
            ratios = one.log_ratios(found)
            itl.append(abs(math.expm1(ratios[-1])))
            if isinstance(one, EnginePoint):
                ttft.append(abs(math.expm1(ratios[0] / TTFT_WEIGHT)))
    return itl, ttft
