"""EngineArgs: the simulated engine described by `--extra-engine-args`."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.mocker.canonical import TABLES, settings_of
from dynamo.mocker.profile import profiled
from dynamo.mocker.simulation.rules import (
    BLOCK_TOKENS,
    EngineType,
    EvictionName,
    HostRules,
    RankLimits,
    SglangRules,
    TransferRules,
)
from dynamo.mocker.simulation.timing import FittedTiming, StepTimes, Timing

__all__ = ["KV_BYTES_PER_TOKEN", "EngineArgs", "engine_args", "given", "profiled"]

KV_BYTES_PER_TOKEN = 131_072  # Keys and values of an 8B model: 32 layers, 8 KV heads of 128 values, two bytes each.

CANONICAL_NAMES = {"data_parallel_size": "dp_size"}
"""Names of this module for settings of the mocker, where they differ."""
TIMING_INDEPENDENT = frozenset(
    {
        "disaggregation_mode", "handoff_timeout_ms", "bootstrap_ports", "zmq_kv_events_ports", "zmq_replay_ports",
        "reasoning", "response_replay_trace_path", "trtllm_capacity_scheduler_policy",
    }
)  # fmt: skip
"""Mocker settings that do not affect timing: accepted and ignored."""


class EngineArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated worker. Names and defaults are the mocker's."""

    num_gpu_blocks: int = 16384
    """KV blocks of each rank."""
    block_size: int = 64
    max_model_len: int | None = None
    """Tokens of a prompt and its answer; a longer answer is cut, a longer prompt is rejected."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    startup_time: float | None = None
    engine_type: EngineType = "vllm"
    num_gpu_blocks_override: int | None = None
    dp_size: int = 1
    """Number of ranks per worker."""
    eviction_backend: EvictionName = "lineage"
    sglang_schedule_policy: Literal["fifo", "lpm"] = "fifo"
    sglang_max_prefill_tokens: int = 16384
    sglang_chunked_prefill_size: int = 8192
    sglang_clip_max_new_tokens: int = 4096
    sglang_schedule_conservativeness: float = 1.0
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    """Bytes per token of transfers between workers and of host copies."""
    kv_transfer_bandwidth: float = 64.0
    """Bandwidth between workers in GB/s; 0: no delay."""
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    num_host_blocks: int | None = None
    """Blocks of a second cache in host memory."""
    host_offload_d2h_bandwidth_gbps: float = 32.0
    host_offload_h2d_bandwidth_gbps: float = 32.0
    planner_profile_data: str | None = None
    """Profiler measurements that replace the polynomials: an NPZ or JSON file, or its directory."""
    fitted_timing: FittedTiming | None = None
    """Fitted step times that replace the polynomials: the output of `dynamo replay fit`."""

    def check(self) -> "EngineArgs":
        """Return the arguments. Raise `ConfigError` for a number that is out of range."""
        for name in ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "dp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--extra-engine-args: {name} is {getattr(self, name)}: expected 1 or more")
        for name in ("num_host_blocks", "max_model_len"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"--extra-engine-args: {name} is {getattr(self, name)}: expected 1 or more")
        for name in (
            "speedup_ratio",
            "decode_speedup_ratio",
            "kv_bytes_per_token",
            "kv_transfer_bandwidth",
            "host_offload_d2h_bandwidth_gbps",
            "host_offload_h2d_bandwidth_gbps",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"--extra-engine-args: {name} is {getattr(self, name):g}: expected zero or more")
        return self

    def limits(self) -> RankLimits:
        """Return the capacity and scheduling limits of a rank."""
        host = None
        if self.num_host_blocks is not None:
            host = HostRules(
                self.num_host_blocks,
                self.block_size * self.kv_bytes_per_token,
                self.host_offload_d2h_bandwidth_gbps,
                self.host_offload_h2d_bandwidth_gbps,
            )
        return RankLimits(
            num_blocks=self.num_gpu_blocks_override or self.num_gpu_blocks,
            block_tokens=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preempts_oldest=self.preemption_mode == "fifo",
            engine_type=self.engine_type,
            eviction=self.eviction_backend,
            sglang=SglangRules(
                self.sglang_schedule_policy,
                self.sglang_max_prefill_tokens,
                self.sglang_chunked_prefill_size,
                self.sglang_clip_max_new_tokens,
                self.sglang_schedule_conservativeness,
            ),
            host=host,
            transfer=TransferRules(
                self.kv_bytes_per_token,
                self.kv_transfer_bandwidth,
                self.kv_transfer_timing_mode == "destination_missing",
            ),
        )

    def timing(self) -> StepTimes:
        """Return the step time model."""
        if self.fitted_timing is not None:
            return self.fitted_timing
        if self.planner_profile_data is not None:
            return profiled(self.planner_profile_data, self.speedup_ratio, self.decode_speedup_ratio)
        return Timing(self.speedup_ratio, self.decode_speedup_ratio)


def given(text: str | None, flag: str) -> dict[str, Any]:
    """Parse JSON of the command line or of `@file`. Raise `ConfigError` if it is not an object."""
    if not text:
        return {}
    try:
        data = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
        return msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {text[1:]}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag}: {error}") from None


def flat(settings: dict[str, Any], flag: str) -> dict[str, Any]:
    """Return fields of `EngineArgs`; upstream's tables `engine` and `dynamo` are flattened. Raise `ConfigError`."""
    if not any(table in settings for table in TABLES):
        return settings
    try:
        found = settings_of(settings, flag)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from None
    named = {CANONICAL_NAMES.get(name, name): value for name, value in found.items() if name not in TIMING_INDEPENDENT}
    if "block_size" not in named:
        named["block_size"] = next((n for name, n in BLOCK_TOKENS.items() if name == named.get("engine_type")), 64)
    return named


def engine_args(text: str | None, flag: str = "--extra-engine-args") -> EngineArgs:
    """Return the engine that a flag describes. Raise `ConfigError`."""
    try:
        return msgspec.convert(flat(given(text, flag), flag), EngineArgs).check()
    except msgspec.ValidationError as error:
        raise ConfigError(f"{flag}: {error}") from None
