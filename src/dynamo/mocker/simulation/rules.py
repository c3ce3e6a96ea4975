"""Rules: capacity of one rank of a simulated engine and the settings of each engine's scheduler."""

from dataclasses import dataclass, field
from typing import Literal

EngineType = Literal["vllm", "sglang", "trtllm"]
EvictionName = Literal["lineage", "lru", "multi_lru"]

BLOCK_TOKENS: dict[EngineType, int] = {"vllm": 64, "sglang": 1, "trtllm": 32}
"""Default tokens per block."""


@dataclass(frozen=True, slots=True)
class SglangRules:
    """Settings of SGLang's scheduler."""

    schedule_policy: Literal["fifo", "lpm"] = "fifo"
    """Admission order: oldest first, or longest cached prefix first."""
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    """Prompt tokens per step; zero or less disables chunking."""
    clip_max_new_tokens: int = 4096
    """Maximum output length assumed when blocks are reserved."""
    schedule_conservativeness: float = 1.0


@dataclass(frozen=True, slots=True)
class HostRules:
    """A cache tier in host memory and its copy bandwidths. Zero GB/s: no delay."""

    num_blocks: int
    block_bytes: int
    to_host_gbps: float = 32.0
    to_device_gbps: float = 32.0

    def to_host_ms(self) -> float:
        """Return the milliseconds to copy one block from the device."""
        return self.block_bytes / self.to_host_gbps / 1e6 if self.to_host_gbps else 0.0

    def to_device_ms(self) -> float:
        """Return the milliseconds to copy one block to the device."""
        return self.block_bytes / self.to_device_gbps / 1e6 if self.to_device_gbps else 0.0


@dataclass(frozen=True, slots=True)
class TransferRules:
    """Transfer of a prompt's keys and values between workers. Zero GB/s: no delay."""

    bytes_per_token: int = 0
    bandwidth_gbps: float = 64.0
    only_missing: bool = False
    """Whether blocks that the destination has cached are not transferred."""

    def transfer_ms(self, tokens: int) -> float:
        """Return the milliseconds to transfer `tokens` tokens."""
        return tokens * self.bytes_per_token / self.bandwidth_gbps / 1e6 if self.bandwidth_gbps else 0.0


@dataclass(frozen=True, slots=True)
class RankLimits:
    """Capacity and scheduling limits of one rank of a simulated engine."""

    num_blocks: int = 16384
    block_tokens: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preempts_oldest: bool = False
    """Preempt the sequence that was admitted first (fifo) instead of last (lifo)."""
    engine_type: EngineType = "vllm"
    eviction: EvictionName = "lineage"
    sglang: SglangRules = field(default_factory=SglangRules)
    host: HostRules | None = None
    transfer: TransferRules = field(default_factory=TransferRules)
