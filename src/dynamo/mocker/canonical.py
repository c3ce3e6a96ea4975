"""Canonical: convert upstream's JSON engine settings (`--extra-engine-args`) into fields of `MockerConfig`.

Upstream's current form has the tables `engine` and `dynamo`; its older form is flat. Null values are ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.mocker.config import NEEDS_AIS, MockerConfig
from dynamo.mocker.profile import fixed

TABLES = ("engine", "dynamo")
OWN_NAMES = {
    "backend": "engine_type",
    "dp_size": "data_parallel_size",
    "handoff_session_timeout_ms": "handoff_timeout_ms",
    "kv_transfer_bytes_per_token": "kv_bytes_per_token",
    "kv_cache_bytes_per_token": "kv_bytes_per_token",
    "num_gpu_blocks_override": "num_gpu_blocks",
}
"""Upstream's setting names by our field names, where they differ."""
WORKER_TYPES = {"aggregated": "agg", "prefill": "prefill", "decode": "decode"}
HOST_NAMES = {
    "num_host_blocks": "num_host_blocks",
    "d2h_bandwidth_gbps": "host_offload_d2h_bandwidth_gbps",
    "h2d_bandwidth_gbps": "host_offload_h2d_bandwidth_gbps",
}
PORTS = ("bootstrap_port", "zmq_kv_events_port", "zmq_replay_port")
AS_IT_IS = {
    "prefill_schedule_interval": 1, "prefill_decode_interval": 0, "aic_mtp_seed": 42,
    "tensor_parallel_size": 1,
}  # fmt: skip
"""Settings that are accepted with a single value, the one that this release implements."""
DERIVED = frozenset({"emit_kv_events", "emit_kv_token_ids", "enable_local_indexer", "num_gpu_blocks_is_explicit"})
"""Settings that are derived from other settings and therefore ignored; every worker has a local indexer."""
HONOURED = frozenset(
    {
        "engine_type", "block_size", "num_gpu_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
        "enable_prefix_caching", "enable_chunked_prefill", "speedup_ratio", "decode_speedup_ratio", "preemption_mode",
        "data_parallel_size", "startup_time", "disaggregation_mode", "eviction_backend", "kv_transfer_bandwidth",
        "kv_transfer_timing_mode", "kv_bytes_per_token", "sglang_schedule_policy", "sglang_max_prefill_tokens",
        "sglang_chunked_prefill_size", "sglang_clip_max_new_tokens", "sglang_schedule_conservativeness",
        "trtllm_capacity_scheduler_policy", "planner_profile_data", "reasoning", "response_replay_trace_path",
        "bootstrap_ports", "zmq_kv_events_ports", "zmq_replay_ports", "handoff_timeout_ms", *HOST_NAMES.values(),
    }
)  # fmt: skip


def settings_of(given: Mapping[str, Any], what: str = "mocker_engine_args") -> dict[str, Any]:
    """Return fields of a `MockerConfig`. Raise `InvalidArgument` with the name of an unsupported setting."""
    tables = [given.get(name) or {} for name in TABLES]
    rest = {name: value for name, value in given.items() if name not in TABLES}
    found: dict[str, Any] = {}
    for table in (rest, *tables):
        for name, value in table.items():
            if value is not None:
                found.update(_setting(name, value, what))
    return found


def with_extra(config: MockerConfig) -> MockerConfig:
    """Return the configuration overridden by the file of `--extra-engine-args`. Raise `ConfigError`."""
    if config.extra_engine_args is None:
        return config
    flag = "--extra-engine-args"
    try:
        found = settings_of(read_settings(config.extra_engine_args, flag), flag)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from None
    kinds = {one.name: one for one in fields(MockerConfig)}
    assert found.keys() <= kinds.keys(), "a supported setting is not a field of the configuration"
    try:
        return (
            replace(config, **found, is_prefill_worker=False, is_decode_worker=False)
            if ("disaggregation_mode" in found)
            else replace(config, **found)
        )
    except TypeError as error:
        raise ConfigError(f"{flag} {config.extra_engine_args}: {error}") from None


def read_settings(path: str, what: str) -> Mapping[str, Any]:
    """Read a JSON object from a file. Raise `ConfigError` with the path."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {path}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{what}: {path}: expected an object")
    return settings


def _setting(name: str, value: Any, what: str) -> dict[str, Any]:
    if name in DERIVED:
        return {}
    if name in AS_IT_IS:
        if value != AS_IT_IS[name]:
            raise InvalidArgument(f"{what}: {name}: this release supports {AS_IT_IS[name]!r} only", param=name)
        return {}
    if name == "worker_type":
        if value not in WORKER_TYPES:
            raise InvalidArgument(f"{what}: worker_type is {value!r}: expected one of {', '.join(WORKER_TYPES)}")
        return {"disaggregation_mode": WORKER_TYPES[value]}
    if name in PORTS:
        return {f"{name}s": [value]}
    if name == "reasoning":
        return {name: value if isinstance(value, str) else json.dumps(value)}
    if name == "timing_model":
        return _timing(value, what)
    if name == "native_host_offload" and isinstance(value, dict):
        return _table(value, HOST_NAMES, name, what)
    if name in {"sglang", "trtllm"} and isinstance(value, dict):
        known = {one.removeprefix(f"{name}_"): one for one in HONOURED if one.startswith(f"{name}_")}
        return _table(value, known, name, what)
    name = OWN_NAMES.get(name, name)
    if name not in HONOURED:
        raise InvalidArgument(f"{what}: {name} is not supported by this release", param=name)
    return {name: value}


def _table(value: Mapping[str, Any], names: Mapping[str, str], table: str, what: str) -> dict[str, Any]:
    unknown = [key for key, one in value.items() if key not in names and one is not None]
    if unknown:
        raise InvalidArgument(f"{what}: {table}.{unknown[0]} is not supported by this release", param=unknown[0])
    return {names[key]: one for key, one in value.items() if one is not None}


def _timing(value: Any, what: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "polynomial":
        return {}
    if kind == "fixed":
        times = [value.get(name) for name in ("prefill_ms", "decode_ms")]
        if not all(isinstance(one, int | float) and one >= 0 for one in times):
            raise InvalidArgument(
                f"{what}: timing_model: prefill_ms and decode_ms: expected zero or more", param="timing_model"
            )
        return {"planner_profile_data": fixed(*map(float, times))}
    if kind == "external" and value.get("provider") == "dynamo_profile" and isinstance(value.get("config"), dict):
        return {"planner_profile_data": value["config"].get("path")}
    if kind == "external" and value.get("provider") in ("ais", "aic"):
        raise InvalidArgument(f"{what}: timing_model: {NEEDS_AIS}", param="timing_model")
    raise InvalidArgument(
        f"{what}: timing_model: expected polynomial, fixed, or external with the provider dynamo_profile",
        param="timing_model",
    )
