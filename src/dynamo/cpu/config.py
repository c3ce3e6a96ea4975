"""CpuConfig: the flags of `python -m dynamo.cpu`."""

import os
from dataclasses import dataclass
from typing import ClassVar

from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.config import option
from dynamo.core.errors import ConfigError

DEMO_MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo_model")
DEMO_MODEL_NAME = "dynamo-demo"
DEMO_MODEL_CALLS = "hermes"
"""Tool call format that the demo model was trained on."""
TRANSPORTS = ("nixl", "shm", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConfig(DisaggregatedOptions):
    """Embedded engine: run a model on the CPU of this machine."""

    COMMON: ClassVar = (
        "--model-path",
        "--model-name",
        "--max-model-len",
        "--max-num-seqs",
        "--kv-cache-memory-mb",
        "--threads",
        "--disaggregation-mode",
        "--dyn-tool-call-parser",
        "--dyn-reasoning-parser",
        "--discovery-backend",
        "--request-plane",
    )
    model_path: str | None = option(
        None, "--model-path", None, "Directory in Hugging Face layout, or a hub id; default: the bundled demo model"
    )
    model_name: str | None = option(
        None,
        "--model-name",
        None,
        "Served model name; default: name of the model directory",
        aliases=("--served-model-name",),
    )
    max_model_len: int | None = option(
        None, "--max-model-len", None, "Maximum tokens of prompt plus output; default: the model's maximum"
    )
    block_size: int = option(16, "--block-size", None, "Tokens per KV block")
    kv_cache_blocks: int | None = option(
        None,
        "--kv-cache-blocks",
        None,
        "Number of KV blocks; default: as many as fit into --kv-cache-memory-mb",
        aliases=("--num-gpu-blocks-override",),
    )
    kv_cache_memory_mb: int = option(
        1024, "--kv-cache-memory-mb", None, "Memory for the KV cache in MB, allocated on use"
    )
    enable_prefix_caching: bool = option(
        True, "--enable-prefix-caching", None, "Reuse cached KV blocks of common prefixes"
    )
    max_num_seqs: int = option(32, "--max-num-seqs", None, "Maximum number of concurrent sequences")
    max_num_batched_tokens: int = option(
        512, "--max-num-batched-tokens", None, "Maximum tokens per step; longer prompts are computed in chunks"
    )
    max_waiting_requests: int = option(
        256, "--max-waiting-requests", None, "Maximum queued requests; further ones are migrated to another worker"
    )
    embedding_worker: bool = option(
        False, "--embedding-worker", None, "Serve embeddings (/v1/embeddings) instead of text"
    )
    classify_worker: bool = option(
        False, "--classify-worker", None, "Serve classification (/v1/classify); requires a classification model"
    )
    pooling: str = option(
        "auto",
        "--pooling",
        None,
        "Pooling of token states into an embedding; auto: the model's setting, or the last token",
        choices=("auto", "mean", "last", "cls"),
    )
    kv_transfer: list[str] = option(
        ["shm", "tcp"],
        "--kv-transfer",
        None,
        "KV block transports between prefill and decode workers in order of preference: nixl (if "
        "installed; opens the whole KV cache to peers), shm (between processes of one user), tcp",
    )
    kv_transfer_host: str = option(
        "",
        "--kv-transfer-host",
        None,
        "Listen address for KV transfers of a prefill worker; default: DYN_TCP_RPC_HOST, or this machine's address",
    )
    kv_transfer_port: int = option(0, "--kv-transfer-port", None, "Port of --kv-transfer-host; 0: any free port")
    bootstrap_port: int | None = option(
        None,
        "--disaggregation-bootstrap-port",
        None,
        "Bootstrap port of a prefill worker: requests are sent to prefill and decode workers at the same time, and "
        "blocks move as they complete; 0: any free port; default: blocks move after the whole prompt is computed",
    )
    kv_transfer_timeout: float = option(
        10.0,
        "--kv-transfer-timeout",
        None,
        "Timeout in seconds to fetch a prompt's KV blocks, after which the decode worker computes the prompt",
    )
    kv_hold_timeout: float = option(
        30.0, "--kv-hold-timeout", None, "Seconds for which a prefill worker keeps KV blocks for the decode worker"
    )
    kv_hold_share: float = option(
        0.5, "--kv-hold-share", None, "Maximum share of a prefill worker's KV cache kept for decode workers, 0-1"
    )
    enable_lora: bool = option(False, "--enable-lora", None, "Enable LoRA adapters, which can be loaded at runtime")
    max_loras: int = option(8, "--max-loras", None, "Maximum LoRA adapters used in one step")
    max_lora_rank: int = option(64, "--max-lora-rank", None, "Maximum rank of a LoRA adapter")
    max_cpu_loras: int = option(64, "--max-cpu-loras", None, "Maximum LoRA adapters loaded at the same time")
    enable_rl: bool = option(
        False, "--enable-rl", "DYN_ENABLE_RL", "Enable routes for RL training, such as weight updates"
    )
    profile_dir: str | None = option(
        None,
        "--profile-dir",
        "DYN_CPU_PROFILE_DIR",
        "Output directory of /engine/control/stop_profile; default: the temporary directory",
    )
    threads: int | None = option(
        None,
        "--threads",
        "OPENBLAS_NUM_THREADS",
        "Threads that compute the model; default: 1, or for a larger model all cores but one",
    )

    def __post_init__(self) -> None:
        DisaggregatedOptions.__post_init__(self)
        self._check_disaggregation()
        if self.model_path is None and self.tool_call_parser is None:
            object.__setattr__(self, "tool_call_parser", DEMO_MODEL_CALLS)
        for flag, value in {
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--kv-cache-blocks": self.kv_cache_blocks,
            "--kv-cache-memory-mb": self.kv_cache_memory_mb,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--threads": self.threads,
            "--max-loras": self.max_loras,
            "--max-lora-rank": self.max_lora_rank,
            "--max-cpu-loras": self.max_cpu_loras,
        }.items():
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: expected 1 or more")
        if self.embedding_worker and self.classify_worker:
            raise ConfigError("--embedding-worker and --classify-worker: are mutually exclusive")
        if self.enable_lora and (self.embedding_worker or self.classify_worker):
            raise ConfigError("--enable-lora: must be used with a worker that generates text")
        if self.max_waiting_requests < 0:
            raise ConfigError(f"--max-waiting-requests {self.max_waiting_requests}: expected 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: expected at least --max-num-seqs "
                f"({self.max_num_seqs}), a token for each sequence"
            )

    def _check_disaggregation(self) -> None:
        if self.role is DisaggregationMode.ENCODE:
            raise ConfigError("--disaggregation-mode encode: the embedded engine supports text input only")
        if self.role is not DisaggregationMode.AGGREGATED and (self.embedding_worker or self.classify_worker):
            raise ConfigError(
                f"--disaggregation-mode {self.role.value}: must be used with a worker that generates text"
            )
        unknown = [name for name in self.kv_transfer if name not in TRANSPORTS]
        if unknown or not self.kv_transfer:
            raise ConfigError(f"--kv-transfer {','.join(self.kv_transfer)}: expected some of {', '.join(TRANSPORTS)}")
        for flag, value in {
            "--kv-transfer-timeout": self.kv_transfer_timeout,
            "--kv-hold-timeout": self.kv_hold_timeout,
        }.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{flag} {value:g}: expected a number of seconds")
        if not 0 < self.kv_hold_share <= 1:
            raise ConfigError(f"--kv-hold-share {self.kv_hold_share:g}: expected more than 0 and at most 1")
        for flag, port in {
            "--kv-transfer-port": self.kv_transfer_port,
            "--disaggregation-bootstrap-port": self.bootstrap_port or 0,
        }.items():
            if not 0 <= port <= 65535:
                raise ConfigError(f"{flag} {port}: expected a port, 0 to 65535")

    @property
    def directory(self) -> str:
        """Return the model directory."""
        return os.path.abspath(self.model_path or DEMO_MODEL)

    @property
    def name(self) -> str:
        """Return the served model name."""
        return self.model_name or (os.path.basename(self.directory) if self.model_path else DEMO_MODEL_NAME)
