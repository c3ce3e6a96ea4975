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
"""The format of tool calls that it was trained to write."""
TRANSPORTS = ("nixl", "shm", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConfig(DisaggregatedOptions):
    """Embedded engine: computes a model on this machine's processor."""

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
        None, "--model-path", None, "Directory in Hugging Face layout, or a hub id; the bundled demo model without it"
    )
    model_name: str | None = option(
        None,
        "--model-name",
        None,
        "Name to serve the model under; its directory's without it",
        aliases=("--served-model-name",),
    )
    max_model_len: int | None = option(
        None, "--max-model-len", None, "Longest prompt and output together, in tokens; what the model allows without it"
    )
    block_size: int = option(16, "--block-size", None, "Tokens in a KV block")
    kv_cache_blocks: int | None = option(
        None,
        "--kv-cache-blocks",
        None,
        "KV blocks to keep; as many as --kv-cache-memory-mb holds without it",
        aliases=("--num-gpu-blocks-override",),
    )
    kv_cache_memory_mb: int = option(1024, "--kv-cache-memory-mb", None, "Memory for the KV cache, taken as it is used")
    enable_prefix_caching: bool = option(
        True, "--enable-prefix-caching", None, "Compute a prefix that is in the cache only once"
    )
    max_num_seqs: int = option(32, "--max-num-seqs", None, "Sequences that run at the same time")
    max_num_batched_tokens: int = option(
        512, "--max-num-batched-tokens", None, "Tokens in one step; longer prompts are computed in chunks"
    )
    max_waiting_requests: int = option(
        256, "--max-waiting-requests", None, "Requests that may wait for a slot; more are sent to another worker"
    )
    embedding_worker: bool = option(
        False, "--embedding-worker", None, "Answer embeddings (/v1/embeddings) instead of text"
    )
    classify_worker: bool = option(
        False, "--classify-worker", None, "Answer classes (/v1/classify) with a model made for that"
    )
    pooling: str = option(
        "auto",
        "--pooling",
        None,
        "Which states of a text make its embedding; auto: what the model says, or its last token",
        choices=("auto", "mean", "last", "cls"),
    )
    kv_transfer: list[str] = option(
        ["shm", "tcp"],
        "--kv-transfer",
        None,
        "Ways in which KV blocks may travel between prefill and decode workers, the best first: nixl (where it is "
        "installed; opens the whole KV cache to peers), shm (between processes of one user), tcp",
    )
    kv_transfer_host: str = option(
        "",
        "--kv-transfer-host",
        None,
        "Address at which a prefill worker offers its KV blocks; without it that of DYN_TCP_RPC_HOST, or this machine's",
    )
    kv_transfer_port: int = option(0, "--kv-transfer-port", None, "Port of that address; 0: any")
    bootstrap_port: int | None = option(
        None,
        "--disaggregation-bootstrap-port",
        None,
        "Port at which decode workers meet a prefill worker while it computes: requests are sent to both at once, and "
        "blocks move as they are complete; 0: any port; without it blocks move when the prompt is computed",
    )
    kv_transfer_timeout: float = option(
        10.0,
        "--kv-transfer-timeout",
        None,
        "Seconds that fetching a prompt's KV blocks may take, after which the decode worker computes them itself",
    )
    kv_hold_timeout: float = option(
        30.0, "--kv-hold-timeout", None, "Seconds for which a prefill worker keeps KV blocks for who is to fetch them"
    )
    kv_hold_share: float = option(
        0.5, "--kv-hold-share", None, "Part of a prefill worker's KV cache that may be kept so at most, 0-1"
    )
    enable_lora: bool = option(False, "--enable-lora", None, "Take LoRA adapters, which are loaded while it serves")
    max_loras: int = option(8, "--max-loras", None, "LoRA adapters that are used in one step")
    max_lora_rank: int = option(64, "--max-lora-rank", None, "Largest rank of a LoRA adapter")
    max_cpu_loras: int = option(64, "--max-cpu-loras", None, "LoRA adapters that are loaded at the same time")
    enable_rl: bool = option(False, "--enable-rl", "DYN_ENABLE_RL", "Offer what a trainer needs: new weights, and more")
    profile_dir: str | None = option(
        None,
        "--profile-dir",
        "DYN_CPU_PROFILE_DIR",
        "Directory for what /engine/control/stop_profile writes; that of temporary files without it",
    )
    threads: int | None = option(
        None,
        "--threads",
        "OPENBLAS_NUM_THREADS",
        "Threads of the matrix products; without it one, or for a larger model all cores but one",
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
            raise ConfigError("--embedding-worker and --classify-worker: expected one of them")
        if self.enable_lora and (self.embedding_worker or self.classify_worker):
            raise ConfigError("--enable-lora: adapters are for workers that generate text")
        if self.max_waiting_requests < 0:
            raise ConfigError(f"--max-waiting-requests {self.max_waiting_requests}: expected 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: expected at least --max-num-seqs "
                f"({self.max_num_seqs}), a token for each sequence"
            )

    def _check_disaggregation(self) -> None:
        if self.role is DisaggregationMode.ENCODE:
            raise ConfigError("--disaggregation-mode encode: the embedded engine reads text and has nothing to encode")
        if self.role is not DisaggregationMode.AGGREGATED and (self.embedding_worker or self.classify_worker):
            raise ConfigError(f"--disaggregation-mode {self.role.value}: only text is generated in two parts")
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
        """Where the model is."""
        return os.path.abspath(self.model_path or DEMO_MODEL)

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.model_name or (os.path.basename(self.directory) if self.model_path else DEMO_MODEL_NAME)
