"""EngineArgs: the simulated engine, as `--extra-engine-args` describes it (control-plane.md §6.4, serving-plane.md §5.11)."""

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
    Limits,
    SglangRules,
    TransferRules,
)
from dynamo.mocker.simulation.timing import FittedTiming, StepTimes, Timing

__all__ = ["KV_BYTES_PER_TOKEN", "EngineArgs", "engine_args", "given", "profiled"]

KV_BYTES_PER_TOKEN = 131_072  # 32 layers, 8 KV heads of 128, two bytes each, keys and values: a model of 8B.

CANONICAL_NAMES = {"data_parallel_size": "dp_size"}
"""Where a mocker's setting has another name here."""
BESIDE_THE_TIME = frozenset(
    {
        "disaggregation_mode", "handoff_timeout_ms", "bootstrap_ports", "zmq_kv_events_ports", "zmq_replay_ports",
        "reasoning", "response_replay_trace_path", "trtllm_capacity_scheduler_policy",
    }
)  # fmt: skip
"""A mocker's settings that change nothing of when a token comes: they may be given, and are not needed."""


class EngineArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker. Names and defaults are the mocker's."""

    num_gpu_blocks: int = 16384
    """Of each rank."""
    block_size: int = 64
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
    """Ranks of a worker."""
    eviction_backend: EvictionName = "lineage"
    sglang_schedule_policy: Literal["fifo", "lpm"] = "fifo"
    sglang_max_prefill_tokens: int = 16384
    sglang_chunked_prefill_size: int = 8192
    sglang_clip_max_new_tokens: int = 4096
    sglang_schedule_conservativeness: float = 1.0
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    """What travels between workers, and to the host and back."""
    kv_transfer_bandwidth: float = 64.0
    """GB/s between workers; 0: no time."""
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    num_host_blocks: int | None = None
    """A second cache, in the host's memory."""
    host_offload_d2h_bandwidth_gbps: float = 32.0
    host_offload_h2d_bandwidth_gbps: float = 32.0
    planner_profile_data: str | None = None
    """In place of the polynomials: what a profiler measured, an NPZ or JSON file or the directory of one."""
    fitted_timing: FittedTiming | None = None
    """In place of the polynomials: what `dynamo replay fit` prints."""

    def check(self) -> "EngineArgs":
        """Itself. Raises `ConfigError` for a number that is out of range."""
        for name in ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "dp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--extra-engine-args: {name} is {getattr(self, name)}: expected 1 or more")
        if self.num_host_blocks is not None and self.num_host_blocks < 1:
            raise ConfigError(f"--extra-engine-args: num_host_blocks is {self.num_host_blocks}: expected 1 or more")
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

    def limits(self) -> Limits:
        """What a rank of it can hold and do."""
        host = None
        if self.num_host_blocks is not None:
            host = HostRules(
                self.num_host_blocks,
                self.block_size * self.kv_bytes_per_token,
                self.host_offload_d2h_bandwidth_gbps,
                self.host_offload_h2d_bandwidth_gbps,
            )
        return Limits(
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
        """How fast it is."""
        if self.fitted_timing is not None:
            return self.fitted_timing
        if self.planner_profile_data is not None:
            return profiled(self.planner_profile_data, self.speedup_ratio, self.decode_speedup_ratio)
        return Timing(self.speedup_ratio, self.decode_speedup_ratio)


def given(text: str | None, flag: str) -> dict[str, Any]:
    """JSON on the command line, or `@file`. Raises `ConfigError` where it is no object."""
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
    """Fields of `EngineArgs`: upstream's tables `engine` and `dynamo` are read as the mocker does. Raises `ConfigError`."""
    if not any(table in settings for table in TABLES):
        return settings
    try:
        found = settings_of(settings, flag)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from None
    named = {CANONICAL_NAMES.get(name, name): value for name, value in found.items() if name not in BESIDE_THE_TIME}
    if "block_size" not in named:
        named["block_size"] = next((n for name, n in BLOCK_TOKENS.items() if name == named.get("engine_type")), 64)
    return named


def engine_args(text: str | None, flag: str = "--extra-engine-args") -> EngineArgs:
    """The engine that a flag describes."""
    try:
        return msgspec.convert(flat(given(text, flag), flag), EngineArgs).check()
    except msgspec.ValidationError as error:
        raise ConfigError(f"{flag}: {error}") from None
