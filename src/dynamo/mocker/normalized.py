"""Normalized settings: upstream's canonical form of a simulated engine's settings, checked and with every default. Pure.

The form is that of `--extra-engine-args`, of `mocker_engine_args` and of replay: the tables `engine` and `dynamo`, and the
settings of the process. `canonical` converts it to the mocker's own settings.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dynamo.core.codec import json_decoder
from dynamo.core.errors import InvalidArgument
from dynamo.mocker.simulation.rules import BLOCK_TOKENS, EngineType

WHAT = "invalid engine launch config"
FRACTIONS = ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
COUNTS = ("num_gpu_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


class SglangTable(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of SGLang's scheduler."""

    schedule_policy: Literal["fifo", "lpm"] = "fifo"
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    clip_max_new_tokens: int = 4096
    schedule_conservativeness: float = 1.0


class TrtllmTable(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of TensorRT-LLM's scheduler."""

    capacity_scheduler_policy: Literal["guaranteed_no_evict"] = "guaranteed_no_evict"


class HostOffloadTable(msgspec.Struct, forbid_unknown_fields=True):
    """A second cache in host memory."""

    num_host_blocks: int
    d2h_bandwidth_gbps: float = 32.0
    h2d_bandwidth_gbps: float = 32.0


class PolynomialTable(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="polynomial"):
    """Step times by upstream's default polynomials."""


class FixedTable(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="fixed"):
    """Constant step times."""

    prefill_ms: float
    decode_ms: float


class ExternalTable(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="external"):
    """Step times of measurements."""

    provider: Literal["ais", "aic", "dynamo_profile"]
    config: dict[str, Any]


class RankTable(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of each rank."""

    backend: EngineType = "vllm"
    num_gpu_blocks: int = 16384
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_schedule_interval: int = 1
    prefill_decode_interval: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    aic_nextn: int | None = None
    aic_nextn_accept_rates: Any = None
    aic_mtp_seed: int = 42
    worker_type: Literal["aggregated", "prefill", "decode"] = "aggregated"
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    emit_kv_events: bool = False
    emit_kv_token_ids: bool = False
    kv_transfer_bytes_per_token: int | None = None
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    kv_cache_bytes_per_token: int | msgspec.UnsetType | None = msgspec.UNSET
    native_host_offload: HostOffloadTable | msgspec.UnsetType | None = msgspec.UNSET
    timing_model: PolynomialTable | FixedTable | ExternalTable = msgspec.field(default_factory=PolynomialTable)
    sglang: SglangTable = msgspec.field(default_factory=SglangTable)
    trtllm: TrtllmTable = msgspec.field(default_factory=TrtllmTable)


class WorkerTable(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of the worker around the engine."""

    enable_local_indexer: bool = False
    bootstrap_port: int | None = None
    handoff_session_timeout_ms: int = 300_000
    reasoning: Any = None
    response_replay_trace_path: str | None = None
    zmq_kv_events_port: int | None = None
    zmq_replay_port: int | None = None
    router_queue_policy: str | None = None


class LaunchTable(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a simulated worker."""

    engine: RankTable = msgspec.field(default_factory=RankTable)
    dp_size: int = 1
    tensor_parallel_size: int = 1
    startup_time: float | None = None
    num_gpu_blocks_is_explicit: bool = False
    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    free_gpu_memory_fraction: float | None = None
    cuda_graph_reserved_bytes: int | None = None
    dynamo: WorkerTable = msgspec.field(default_factory=WorkerTable)


def normalize_mocker_config(config: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
    """Return settings, given as an object or as JSON, with every default. Raise `InvalidArgument` that names the wrong one."""
    try:
        if isinstance(config, str):
            launch = json_decoder(LaunchTable).decode(config)
        else:
            launch = msgspec.convert({} if config is None else config, LaunchTable)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{WHAT}: {error}") from None
    check(launch)
    if launch.engine.block_size is None:
        launch.engine.block_size = BLOCK_TOKENS[launch.engine.backend]
    found: dict[str, Any] = msgspec.to_builtins(launch)
    return found


def check(launch: LaunchTable) -> None:
    """Raise `InvalidArgument` for a number out of range."""
    for name in COUNTS:
        value = getattr(launch.engine, name)
        if value is not None and value < 1:
            raise InvalidArgument(f"{WHAT}: engine.{name} is {value}: {name} must be positive")
    if launch.dp_size < 1:
        raise InvalidArgument(f"{WHAT}: dp_size is {launch.dp_size}: must be positive")
    for name in FRACTIONS:
        value = getattr(launch, name)
        if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
            raise InvalidArgument(f"{WHAT}: {name} is {value}: must be finite and in [0, 1]")
    for name in ("speedup_ratio", "decode_speedup_ratio"):
        value = getattr(launch.engine, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument(f"{WHAT}: engine.{name} is {value}: must be finite and at least 0")
    if (host := launch.engine.native_host_offload) and host.num_host_blocks < 1:
        raise InvalidArgument(
            f"{WHAT}: engine.native_host_offload.num_host_blocks is {host.num_host_blocks}: must be positive"
        )
