"""Profile files: steps of prefill and decode engines measured before the deployment, read from a directory.

Each role has an NPZ file (`selected_prefill_interpolation/raw_data.npz`) or a JSON file (`prefill_raw_data.json`) with the same
arrays; the NPZ file is read first.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests

PREFILL_ARRAYS = ("prefill_isl", "prefill_ttft")
"""Prompt length in tokens, time to first token in milliseconds."""
DECODE_ARRAYS = ("x_kv_usage", "y_context_length", "z_itl")
"""Used fraction of the KV cache, context length in tokens, inter-token latency in milliseconds."""


def read_profile(directory: str) -> dict[EngineRole, list[ForwardPassMetrics]]:
    """Return the measured steps of prefill and decode engines. Raise `ConfigError` for files that are absent or wrong."""
    prefill, _ = _read(Path(directory), "prefill", PREFILL_ARRAYS)
    decode, max_kv_tokens = _read(Path(directory), "decode", (*DECODE_ARRAYS, "max_kv_tokens"))
    return {
        EngineRole.PREFILL: [
            _step(ttft_ms, ScheduledRequests(num_prefill_requests=1, sum_prefill_tokens=round(isl)))
            for isl, ttft_ms in zip(*prefill, strict=True)
        ],
        EngineRole.DECODE: [
            _step(itl_ms, _decode_load(usage * max_kv_tokens, context))
            for usage, context, itl_ms in zip(*decode, strict=True)
        ],
    }


def _decode_load(kv_tokens: float, context: float) -> ScheduledRequests:
    requests = max(1, round(kv_tokens / context))
    return ScheduledRequests(num_decode_requests=requests, sum_decode_kv_tokens=round(kv_tokens))


def _step(milliseconds: float, scheduled: ScheduledRequests) -> ForwardPassMetrics:
    return ForwardPassMetrics(FORWARD_PASS_VERSION, "profile", 0, 0, milliseconds / 1000, scheduled, QueuedRequests())


def _read(directory: Path, role: str, names: Sequence[str]) -> tuple[list[list[float]], float]:
    """Return the arrays of a role, which have the same length, and the KV capacity in tokens."""
    npz, plain = directory / f"selected_{role}_interpolation" / "raw_data.npz", directory / f"{role}_raw_data.json"
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
