"""Rules: what one rank of a simulated engine can hold and do, and the knobs of each engine's scheduler."""

from dataclasses import dataclass, field
from typing import Literal

EngineType = Literal["vllm", "sglang", "trtllm"]
EvictionName = Literal["lineage", "lru", "multi_lru"]

BLOCK_TOKENS: dict[EngineType, int] = {"vllm": 64, "sglang": 1, "trtllm": 32}
"""Tokens in a block unless something else is said."""


@dataclass(frozen=True, slots=True)
class SglangRules:
    """How SGLang's scheduler decides."""

    schedule_policy: Literal["fifo", "lpm"] = "fifo"
    """Who is next: the oldest, or whose prompt the cache holds the most of."""
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    """Tokens of one step's prompts; zero or less: prompts are not cut."""
    clip_max_new_tokens: int = 4096
    """As if nobody asked for a longer answer, when room is reckoned."""
    schedule_conservativeness: float = 1.0


@dataclass(frozen=True, slots=True)
class HostRules:
    """A tier of blocks in the host's memory, and how fast they are copied. Zero GB/s: at once."""

    num_blocks: int
    block_bytes: int
    to_host_gbps: float = 32.0
    to_device_gbps: float = 32.0

    def to_host_ms(self) -> float:
        """To copy one block out of the device."""
        return self.block_bytes / self.to_host_gbps / 1e6 if self.to_host_gbps else 0.0

    def to_device_ms(self) -> float:
        """To copy one block into the device."""
        return self.block_bytes / self.to_device_gbps / 1e6 if self.to_device_gbps else 0.0


@dataclass(frozen=True, slots=True)
class TransferRules:
    """How long a prompt's keys and values travel from one worker to another. Zero GB/s: no time."""

    bytes_per_token: int = 0
    bandwidth_gbps: float = 64.0
    only_missing: bool = False
    """Whether what the destination's cache holds already stays where it is."""

    def transfer_ms(self, tokens: int) -> float:
        """For so many tokens."""
        return tokens * self.bytes_per_token / self.bandwidth_gbps / 1e6 if self.bandwidth_gbps else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank of the simulated engine can hold and do at once."""

    num_blocks: int = 16384
    block_tokens: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preempts_oldest: bool = False
    """Whom to preempt: the sequence that was admitted first (fifo) or last (lifo)."""
    engine_type: EngineType = "vllm"
    eviction: EvictionName = "lineage"
    sglang: SglangRules = field(default_factory=SglangRules)
    host: HostRules | None = None
    transfer: TransferRules = field(default_factory=TransferRules)
