"""MockerConfig: the flags of `python -m dynamo.mocker` (docs/mocker.md)."""

import os
from dataclasses import dataclass, fields
from typing import ClassVar, cast

import dynamo
from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS, DisaggregatedOptions
from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import UnsupportedFlag
from dynamo.mocker.engine_settings import (
    apply_worker_engine_args_overrides,
    build_mocker_engine_args,
    build_runtime_config,
    load_mocker_engine_args,
)
from dynamo.mocker.normalized import normalize_mocker_config
from dynamo.mocker.profile import profiled
from dynamo.mocker.scripts import ReasoningMarks, read_reasoning
from dynamo.mocker.simulation.rules import (
    BLOCK_TOKENS,
    EngineType,
    EvictionName,
    HostRules,
    RankLimits,
    SglangRules,
    TransferRules,
)
from dynamo.mocker.simulation.timing import StepTimes, Timing
from dynamo.routing.ais_options import AisOptions
from dynamo.routing.python_config import KvRouterConfig, RouterConfig
from dynamo.routing.settings import (
    AffinityOptions,
    BusyOptions,
    DisaggregationOptions,
    KvOptions,
    KvRouterOptions,
    as_unsupported,
    without_variables,
)
from dynamo.runtime.push_router import RouterMode

__all__ = [
    "MockerConfig",
    "apply_worker_engine_args_overrides",
    "build_mocker_engine_args",
    "build_runtime_config",
    "load_mocker_engine_args",
    "normalize_mocker_config",
]

PORTS_FLAGS = {
    "zmq_kv_events_ports": "--zmq-kv-events-ports",
    "zmq_replay_ports": "--zmq-replay-ports",
    "bootstrap_ports": "--bootstrap-ports",
}
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
TRANSFER_GBPS = 64.0
HOST_GBPS = 32.0
HANDOFF_TIMEOUT_MS = 300_000
WORKERS_MAX = 1024  # Per process; each worker has its own socket and task.
STAGGER_AUTO = -1.0
STAGGER_BATCH = 32  # Workers started between two pauses, so that discovery can keep up.
STAGGER_PAUSE_S = 2.0
NEEDS_AIS = (
    "AISimulate's measured tables (NVIDIA's package aisimulate) are not supported; pass measurements with "
    "--planner-profile-data"
)
WITH_AIS = "requires --ais-perf-model, which is not supported; set the number of blocks with --num-gpu-blocks-override"
NOT_PUBLISHED = {
    "--router-conditional-disagg", "--router-conditional-disagg-config", "--router-prefill-policy",
    "--router-decode-policy", "--load-aware", "--router-tracking-hash", "--router-tracking-key-file",
    "--router-tracking-key-id", "--router-prefill-load-model", "--router-policy-config", "--router-event-threads",
}  # fmt: skip
"""Flags of settings that upstream's workers publish and these do not."""

MODES = {mode.value: mode for mode in RouterMode}
ANY_MODE = tuple(one.name for group in (BusyOptions, AffinityOptions) for one in fields(group))
"""Options that may be published with every mode; the others require kv mode."""


@dataclass(frozen=True, kw_only=True)  # No slots: a base class of the mocker's configuration.
@without_variables
class AdvertisedOptions(BusyOptions, AffinityOptions, KvOptions):
    """Router settings that the worker publishes (with `--router-mode`).

    They are on its model card, for frontends. The frontend's own routing environment variables are not read here: a frontend
    may run on the same host.
    """

    router_mode: str | None = option(
        None,
        "--router-mode",
        None,
        "Router mode that frontends use for this model, in place of their own mode and flags",
        choices=tuple(MODES),
    )

    def routing(self) -> RouterConfig | None:
        """Return the published router settings; None without `--router-mode`. Raise `ConfigError` if invalid."""
        given = [one.name for one in fields(AdvertisedOptions) if getattr(self, one.name) != one.default]
        if self.router_mode is None:
            if given:
                raise ConfigError(f"{FLAGS[given[0]]}: requires --router-mode")
            return None
        of_kv = [name for name in given if name not in (*ANY_MODE, "router_mode")]
        mode = MODES[self.router_mode]
        if of_kv and mode is not RouterMode.KV:
            raise ConfigError(f"{FLAGS[of_kv[0]]}: requires --router-mode kv")
        try:
            settings = {one.name: getattr(self, one.name) for one in fields(KvOptions)}
            kv = KvRouterConfig(**settings) if mode is RouterMode.KV else None
            return RouterConfig(mode, kv, **{name: getattr(self, name) for name in ANY_MODE})
        except (InvalidArgument, ValueError) as error:
            raise ConfigError(f"--router-mode {self.router_mode}: {error}") from None


FLAGS: dict[str, str] = {one.name: one.metadata["flag"] for one in fields(AdvertisedOptions)}


def _memory_fraction(flag: str, default: str) -> UnsupportedFlag:
    return UnsupportedFlag(flag, None, default, hint=WITH_AIS)


UNSUPPORTED_FLAGS = (
    *UNSUPPORTED_WORKER_FLAGS,
    _memory_fraction("--gpu-memory-utilization", "0.9"),
    _memory_fraction("--mem-fraction-static", "0.88"),
    _memory_fraction("--free-gpu-memory-fraction", "0.9"),
    UnsupportedFlag("--ais-perf-model", None, default=False, aliases=("--aic-perf-model",), hint=NEEDS_AIS),
    *(
        UnsupportedFlag(one.flag, None, one.default, (one.flag.replace("--ais-", "--aic-"),), NEEDS_AIS)
        for one in map(as_unsupported, fields(AisOptions))
    ),
    *(
        UnsupportedFlag(one.flag, None, one.default, one.aliases)
        for one in map(as_unsupported, (*fields(DisaggregationOptions), *fields(KvRouterOptions)))
        if one.flag in NOT_PUBLISHED
    ),
)
"""Upstream's flags that this mocker rejects; the routing variables of a frontend on the same host are not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockerConfig(AdvertisedOptions, DisaggregatedOptions):
    """Configuration of simulated workers, which answer real requests in real time with random tokens."""

    COMMON: ClassVar = (
        "--model-path",
        "--model-name",
        "--engine-type",
        "--speedup-ratio",
        "--num-workers",
        "--max-num-seqs",
        "--num-gpu-blocks-override",
        "--disaggregation-mode",
        "--discovery-backend",
        "--request-plane",
    )
    disaggregation_mode: str | None = option(
        None,
        "--disaggregation-mode",
        None,
        "Phase of requests that this worker computes: agg (both), prefill or decode",
        choices=("agg", "prefill", "decode"),
    )
    model_path: str | None = option(
        None, "--model-path", None, "Directory or hub id of the tokenizer and configuration (default: the demo model)"
    )
    model_name: str | None = option(
        None, "--model-name", None, "Served model name (default: last part of the model path)"
    )
    engine_type: str = option(
        "vllm", "--engine-type", None, "Engine whose scheduler is simulated", choices=tuple(BLOCK_TOKENS)
    )
    num_gpu_blocks: int = option(
        16384,
        "--num-gpu-blocks-override",
        None,
        "KV blocks of each data-parallel rank",
        aliases=["--num-gpu-blocks"],  # As upstream's parser abbreviates it.
    )
    block_size: int | None = option(
        None, "--block-size", None, "Tokens per KV block (default: vllm 64, sglang 1, trtllm 32)"
    )
    eviction_backend: str = option(
        "lineage",
        "--eviction-backend",
        None,
        "Eviction order of idle blocks; not an upstream flag",
        choices=("lineage", "lru", "multi_lru"),
    )
    max_model_len: int | None = option(
        None, "--max-model-len", None, "Maximum tokens of prompt and output (default: from the model)"
    )
    max_num_seqs: int = option(256, "--max-num-seqs", None, "Maximum number of running sequences")
    max_num_batched_tokens: int = option(8192, "--max-num-batched-tokens", None, "Maximum tokens per step")
    enable_prefix_caching: bool = option(True, "--enable-prefix-caching", None, "Reuse blocks of equal prefixes")
    enable_chunked_prefill: bool = option(True, "--enable-chunked-prefill", None, "Split long prompts across steps")
    preemption_mode: str = option(
        "lifo",
        "--preemption-mode",
        None,
        "Preempt the newest (lifo) or the oldest (fifo) sequence",
        choices=("lifo", "fifo"),
    )
    speedup_ratio: float = option(1.0, "--speedup-ratio", None, "Divides every delay; 0 means no delay")
    decode_speedup_ratio: float = option(1.0, "--decode-speedup-ratio", None, "Divides decode delays additionally")
    data_parallel_size: int = option(
        1, "--data-parallel-size", None, "Number of ranks, each with its own scheduler and cache"
    )
    num_workers: int = option(
        1, "--num-workers", None, "Number of workers in this process, each with its own instance id"
    )
    stagger_delay: float = option(
        0.0, "--stagger-delay", None, "Seconds between worker starts; -1 derives it from the number of workers"
    )
    startup_time: float | None = option(None, "--startup-time", None, "Simulated model loading time in seconds")
    extra_engine_args: str | None = option(
        None, "--extra-engine-args", None, "JSON file with engine settings; overrides the flags"
    )
    planner_profile_data: str | None = option(
        None,
        "--planner-profile-data",
        None,
        "NPZ or JSON file, directory, or JSON text, of a profiler's measurements of step times",
    )
    reasoning: str | None = option(
        None,
        "--reasoning",
        None,
        "JSON object: start_thinking_token_id, end_thinking_token_id, thinking_ratio (0 to 1)",
    )
    response_replay_trace_path: str | None = option(
        None,
        "--response-replay-trace-path",
        None,
        "Mooncake JSONL with output_token_ids that answer requests annotated output_replay_id:ID",
    )
    sglang_schedule_policy: str = option(
        "fifo",
        "--sglang-schedule-policy",
        None,
        "Admission order: oldest request, or longest cached prefix",
        choices=("fifo", "lpm", "fcfs"),
    )
    sglang_page_size: int | None = option(
        None, "--sglang-page-size", None, "Deprecated name of --block-size for sglang"
    )
    sglang_max_prefill_tokens: int = option(
        16384, "--sglang-max-prefill-tokens", None, "Maximum prompt tokens per batch"
    )
    sglang_chunked_prefill_size: int = option(8192, "--sglang-chunked-prefill-size", None, "Tokens per chunk")
    sglang_clip_max_new_tokens: int = option(
        4096, "--sglang-clip-max-new-tokens", None, "Maximum output length assumed when blocks are reserved"
    )
    sglang_schedule_conservativeness: float = option(
        1.0, "--sglang-schedule-conservativeness", None, "Assumed share of the maximum output length, 0 to 1"
    )
    sglang_generate: bool = option(False, "--sglang-generate", None, "Advertise support of /generate on the model card")
    trtllm_capacity_scheduler_policy: str = option(
        "guaranteed_no_evict",
        "--trtllm-capacity-scheduler-policy",
        None,
        "Admission policy",
        choices=("guaranteed_no_evict",),
    )
    num_host_blocks: int | None = option(
        None, "--num-host-blocks", None, "Blocks of the host memory cache of each rank (vllm)"
    )
    host_offload_d2h_bandwidth_gbps: float | None = option(
        None, "--host-offload-d2h-bandwidth-gbps", None, "GB/s from device to host (default 32); 0: no delay"
    )
    host_offload_h2d_bandwidth_gbps: float | None = option(
        None, "--host-offload-h2d-bandwidth-gbps", None, "GB/s from host to device (default 32); 0: no delay"
    )
    kv_transfer_bandwidth: float = option(
        TRANSFER_GBPS, "--kv-transfer-bandwidth", None, "GB/s from prefill to decode workers; 0: no delay"
    )
    kv_transfer_timing_mode: str = option(
        "full_prompt",
        "--kv-transfer-timing-mode",
        None,
        "Transfer the full prompt, or only blocks missing at the destination",
        choices=("full_prompt", "destination_missing"),
    )
    kv_cache_dtype: str = option("auto", "--kv-cache-dtype", None, "Data type of keys and values", choices=KV_DTYPES)
    kv_bytes_per_token: int | None = option(
        None, "--kv-bytes-per-token", None, "Bytes of a token's keys and values (default: from the model)"
    )
    zmq_kv_events_ports: list[int] = option(
        [],
        "--zmq-kv-events-ports",
        None,
        "Ports for KV events in vLLM's format, one per worker; rank N adds N",
    )
    zmq_replay_ports: list[int] = option(
        [], "--zmq-replay-ports", None, "Ports for replay of KV events, one per worker; rank N adds N"
    )
    bootstrap_ports: list[int] = option(
        [], "--bootstrap-ports", None, "Ports for handoffs to decode workers, one per prefill worker"
    )
    handoff_timeout_ms: int = option(
        HANDOFF_TIMEOUT_MS, "--handoff-session-timeout-ms", None, "Timeout of a prefill-decode handoff in milliseconds"
    )

    def __post_init__(self) -> None:
        DisaggregatedOptions.__post_init__(self)
        for flag, value in (
            ("--num-gpu-blocks-override", self.num_gpu_blocks),
            ("--block-size", self.block_size),
            ("--sglang-page-size", self.sglang_page_size),
            ("--max-num-seqs", self.max_num_seqs),
            ("--data-parallel-size", self.data_parallel_size),
            ("--max-model-len", self.max_model_len),
            ("--num-host-blocks", self.num_host_blocks),
            ("--kv-bytes-per-token", self.kv_bytes_per_token),
            ("--sglang-max-prefill-tokens", self.sglang_max_prefill_tokens),
            ("--sglang-clip-max-new-tokens", self.sglang_clip_max_new_tokens),
            ("--handoff-session-timeout-ms", self.handoff_timeout_ms),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: expected 1 or more")
        if not 1 <= self.num_workers <= WORKERS_MAX:
            raise ConfigError(f"--num-workers {self.num_workers}: expected 1 to {WORKERS_MAX}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: expected at least "
                f"--max-num-seqs {self.max_num_seqs}, because each sequence takes one token per step"
            )
        self._check_ports()
        self._check_host()
        if self.kv_transfer_bandwidth < 0:
            raise ConfigError(f"--kv-transfer-bandwidth {self.kv_transfer_bandwidth:g}: expected zero or more GB/s")
        if not 0 <= self.sglang_schedule_conservativeness <= 1:
            shown = f"{self.sglang_schedule_conservativeness:g}"
            raise ConfigError(f"--sglang-schedule-conservativeness {shown}: expected 0 to 1")
        pages = {self.block_size, self.sglang_page_size} - {None}
        if self.engine_type == "sglang" and len(pages) > 1:
            raise ConfigError("--sglang-page-size and --block-size must match, or set only one")
        self.routing()
        self.thoughts()
        if self.speedup_ratio < 0 or self.decode_speedup_ratio < 0:
            raise ConfigError("--speedup-ratio and --decode-speedup-ratio must be zero or more")
        if self.stagger_delay < 0 and self.stagger_delay != STAGGER_AUTO:
            raise ConfigError(f"--stagger-delay {self.stagger_delay:g}: expected seconds, or -1")
        if self.startup_time is not None and self.startup_time < 0:
            raise ConfigError(f"--startup-time {self.startup_time:g}: expected zero or more seconds")

    def _check_ports(self) -> None:
        for name, flag in PORTS_FLAGS.items():
            ports: list[int] = getattr(self, name)
            if ports and len(ports) != self.num_workers:
                raise ConfigError(
                    f"{flag}: {len(ports)} ports, expected one for each of --num-workers {self.num_workers}"
                )
            wrong = [port for port in ports if not 0 < port < 1 << 16]
            if wrong:
                raise ConfigError(f"{flag} {wrong[0]}: expected a port")
        if self.zmq_replay_ports and not self.zmq_kv_events_ports:
            raise ConfigError("--zmq-replay-ports: expected --zmq-kv-events-ports as well")

    def _check_host(self) -> None:
        speeds = (self.host_offload_d2h_bandwidth_gbps, self.host_offload_h2d_bandwidth_gbps)
        if self.num_host_blocks is None:
            if speeds != (None, None):
                raise ConfigError("--host-offload-*-bandwidth-gbps: expected --num-host-blocks as well")
            return
        if any(speed is not None and speed < 0 for speed in speeds):
            raise ConfigError("--host-offload-*-bandwidth-gbps: expected zero or more GB/s")
        if self.engine_type != "vllm":
            raise ConfigError(f"--num-host-blocks with --engine-type {self.engine_type}: expected vllm")
        if not self.enable_prefix_caching:
            raise ConfigError("--num-host-blocks: expected --enable-prefix-caching")

    @property
    def block_tokens(self) -> int:
        """Return the KV block size in tokens."""
        page = self.sglang_page_size if self.engine_type == "sglang" else None
        return self.block_size or page or BLOCK_TOKENS[cast(EngineType, self.engine_type)]

    def limits(self, kv_bytes_per_token: int = 0) -> RankLimits:
        """Return the capacity and scheduling limits of a rank; `kv_bytes_per_token` applies unless the flag sets it."""
        token_bytes = self.kv_bytes_per_token or kv_bytes_per_token
        host = None
        if self.num_host_blocks is not None:
            to_host, to_device = self.host_offload_d2h_bandwidth_gbps, self.host_offload_h2d_bandwidth_gbps
            host = HostRules(
                self.num_host_blocks,
                self.block_tokens * token_bytes,
                HOST_GBPS if to_host is None else to_host,
                HOST_GBPS if to_device is None else to_device,
            )
        return RankLimits(
            num_blocks=self.num_gpu_blocks,
            block_tokens=self.block_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preempts_oldest=self.preemption_mode == "fifo",
            engine_type=cast(EngineType, self.engine_type),
            eviction=cast(EvictionName, self.eviction_backend),
            sglang=SglangRules(
                "lpm" if self.sglang_schedule_policy == "lpm" else "fifo",
                self.sglang_max_prefill_tokens,
                self.sglang_chunked_prefill_size,
                self.sglang_clip_max_new_tokens,
                self.sglang_schedule_conservativeness,
            ),
            host=host,
            transfer=TransferRules(
                token_bytes, self.kv_transfer_bandwidth, self.kv_transfer_timing_mode == "destination_missing"
            ),
        )

    def timing(self) -> StepTimes:
        """Return the step time model. Raise `ConfigError` for a profile that cannot be read."""
        if self.planner_profile_data is not None:
            return profiled(self.planner_profile_data, self.speedup_ratio, self.decode_speedup_ratio)
        return Timing(self.speedup_ratio, self.decode_speedup_ratio)

    def thoughts(self) -> ReasoningMarks | None:
        """Return the parsed `--reasoning` value. Raise `ConfigError` if it is invalid."""
        return None if self.reasoning is None else read_reasoning(self.reasoning)

    def stagger_s(self, index: int) -> float:
        """Return the delay in seconds before worker `index`, counted from 0, is started."""
        if index == 0:
            return 0.0
        if self.stagger_delay != STAGGER_AUTO:
            return self.stagger_delay
        if self.num_workers <= STAGGER_BATCH:
            return 0.0
        pause = STAGGER_PAUSE_S if index % STAGGER_BATCH == 0 else 0.0
        return pause + (0.1 if self.num_workers <= 128 else 0.2)


def demo_model() -> str:
    """Return the directory of the demo model that is shipped with the package."""
    return os.path.join(os.path.dirname(dynamo.__file__), "cpu", "demo_model")
