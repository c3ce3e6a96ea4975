"""Performance data from before the deployment: profile files of a directory, and the engines' own benchmarks.

Each role has an NPZ file (`selected_prefill_interpolation/raw_data.npz`) or a JSON file (`prefill_raw_data.json`) with the same
arrays; the NPZ file is read first.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.core.interpolation import DecodeProfile, PrefillProfile
from dynamo.protocols.load import (
    FORWARD_PASS_VERSION,
    ForwardPass,
    ForwardPassMetrics,
    QueuedRequests,
    ScheduledRequests,
)

PREFILL_ARRAYS = ("prefill_isl", "prefill_ttft")
"""Prompt length in tokens, time to first token in milliseconds."""
DECODE_ARRAYS = ("x_kv_usage", "y_context_length", "z_itl")
"""Used fraction of the KV cache, context length in tokens, inter-token latency in milliseconds."""


def read_profile(directory: str, role: EngineRole) -> list[ForwardPassMetrics]:
    """Return the measured steps of a role's engines. Raise `ConfigError` for files that are absent or wrong.

    Aggregated engines use the decode file, and the prefill file if there is one.
    """
    if role is EngineRole.PREFILL:
        return _prefill_steps(directory)
    prompts = _prefill_steps(directory) if role is EngineRole.AGGREGATED and _has_prefill(directory) else []
    return [*prompts, *_decode_steps(directory)]


def _has_prefill(directory: str) -> bool:
    return any(path.is_file() for path in _paths(Path(directory), "prefill"))


def _prefill_steps(directory: str) -> list[ForwardPassMetrics]:
    arrays, _ = _read(Path(directory), "prefill", PREFILL_ARRAYS)
    return [
        _step(ttft_ms, ScheduledRequests(num_prefill_requests=1, sum_prefill_tokens=round(isl)))
        for isl, ttft_ms in zip(*arrays, strict=True)
    ]


def _decode_steps(directory: str) -> list[ForwardPassMetrics]:
    arrays, max_kv_tokens = _read(Path(directory), "decode", (*DECODE_ARRAYS, "max_kv_tokens"))
    return [
        _step(itl_ms, _decode_load(usage * max_kv_tokens, context))
        for usage, context, itl_ms in zip(*arrays, strict=True)
    ]


def read_prefill_profile(directory: str) -> PrefillProfile:
    """Return the measured prefills with their throughput. Raise `ConfigError` for a file that is absent or wrong."""
    (isl, ttft_ms, thpt), _ = _read(Path(directory), "prefill", (*PREFILL_ARRAYS, "prefill_thpt_per_gpu"))
    return PrefillProfile(isl=isl, ttft_ms=ttft_ms, thpt_per_gpu=thpt)


def read_decode_profile(directory: str) -> DecodeProfile:
    """Return the measured decode steps with their throughput. Raise `ConfigError` for a file that is absent or wrong."""
    names = (*DECODE_ARRAYS, "z_thpt_per_gpu", "max_kv_tokens")
    (usage, context, itl_ms, thpt), max_kv_tokens = _read(Path(directory), "decode", names)
    return DecodeProfile(
        kv_usage=usage, context_length=context, itl_ms=itl_ms, thpt_per_gpu=thpt, max_kv_tokens=max_kv_tokens
    )


class _BenchmarkPoint(msgspec.Struct):
    point_type: str = ""


class _BenchmarkStep(ForwardPass):
    """A measured step; workers need not name themselves."""

    version: int = FORWARD_PASS_VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0


class _BenchmarkResult(msgspec.Struct):
    point: _BenchmarkPoint = msgspec.field(default_factory=_BenchmarkPoint)
    fpms: list[_BenchmarkStep] = []


class _BenchmarkReply(msgspec.Struct):
    status: str = ""
    message: str = ""
    results: list[_BenchmarkResult] = []


def benchmark_steps(reply: object, role: EngineRole) -> list[ForwardPassMetrics]:
    """Return the steps of a role in the reply of an engine's endpoint `get_perf_metrics`.

    The reply is a JSON object, or its text. Steps without time are left out; an engine without a benchmark has none. Raises
    `InvalidArgument` for a reply of another form.
    """
    try:
        raw = msgspec.json.decode(reply) if isinstance(reply, str | bytes) else reply
        found = msgspec.convert(raw, _BenchmarkReply, strict=False)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"get_perf_metrics: {error}") from None
    if found.status == "error":
        return []
    wanted = {"prefill", "decode"} if role is EngineRole.AGGREGATED else {role.value}
    return [
        ForwardPassMetrics(
            step.version,
            step.worker_id,
            step.dp_rank,
            step.counter_id,
            step.wall_time,
            step.scheduled_requests,
            step.queued_requests,
        )
        for result in found.results
        if result.point.point_type in wanted
        for step in result.fpms
        if step.wall_time > 0 and step.version == FORWARD_PASS_VERSION
    ]


def _decode_load(kv_tokens: float, context: float) -> ScheduledRequests:
    requests = max(1, round(kv_tokens / context))
    return ScheduledRequests(num_decode_requests=requests, sum_decode_kv_tokens=round(kv_tokens))


def _step(milliseconds: float, scheduled: ScheduledRequests) -> ForwardPassMetrics:
    return ForwardPassMetrics(FORWARD_PASS_VERSION, "profile", 0, 0, milliseconds / 1000, scheduled, QueuedRequests())


def _paths(directory: Path, role: str) -> tuple[Path, Path]:
    """Return the NPZ and the JSON file of a role."""
    return directory / f"selected_{role}_interpolation" / "raw_data.npz", directory / f"{role}_raw_data.json"


def _read(directory: Path, role: str, names: Sequence[str]) -> tuple[list[list[float]], float]:
    """Return the arrays of a role, which have the same length, and the KV capacity in tokens."""
    npz, plain = _paths(directory, role)
    path = npz if npz.is_file() else plain
    try:
        raw: Mapping[str, Any] = np.load(npz, allow_pickle=False) if path is npz else json.loads(plain.read_bytes())
        found = {name: [float(value) for value in np.atleast_1d(raw[name])] for name in names}
    except OSError as error:
        raise ConfigError(f"profile_results_dir: cannot read {path}: {error.strerror or error}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: must contain the array {error.args[0]}") from None
    except (ValueError, TypeError, BadZipFile) as error:
        raise ConfigError(f"{path}: must contain arrays of numbers: {error}") from None
    capacity = found.pop("max_kv_tokens", [0.0])
    lengths = {len(values) for values in found.values()}
    if len(lengths) != 1 or len(capacity) != 1:
        raise ConfigError(f"{path}: {', '.join(found)}: must have the same length")
    if any(not (np.isfinite(value) and value >= 0) for values in found.values() for value in values):
        raise ConfigError(f"{path}: {', '.join(found)}: must be finite and not negative")
    if 0.0 in found.get("y_context_length", ()):
        raise ConfigError(f"{path}: y_context_length: 0: must be greater than 0")
    return list(found.values()), capacity[0]
