"""Decision: a request that wants a worker, the worker that it is given, and all that this rested on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.kv_router.config import Weights
from dynamo.kv_router.cost import Load, Prompt
from dynamo.kv_router.hicache import Runs

Rank = tuple[int, int]
"""A worker's id and one of its data-parallel ranks."""


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker's card says."""

    worker_id: int
    dp_start: int = 0
    dp_size: int = 1
    kv_blocks: int | None = None
    """What its cache holds, for each rank."""
    batch_tokens: int | None = None
    """The most prompt tokens of one batch."""
    taints: frozenset[str] = frozenset()


@dataclass(slots=True)
class Ask:
    """A request that wants a worker."""

    request_id: str
    blocks: bytes
    """Packed tokens hashes of its complete blocks."""
    tokens: int
    worker_id: int | None = None
    dp_rank: int | None = None
    allowed: frozenset[int] | None = None
    required_taints: frozenset[str] = frozenset()
    preferred_taints: Mapping[str, float] = field(default_factory=dict)
    overrides: dict[str, Any] | None = None
    expected_output_tokens: int | None = None
    priority_jump: float = 0.0
    strict_priority: int = 0
    policy_class: str | None = None
    busy: frozenset[int] = frozenset()
    """Workers over a busy threshold."""
    avoid: frozenset[int] = frozenset()
    """Workers that failed this request, or that do not answer at the moment."""
    session: str | None = None
    """The session that it is a turn of."""
    is_last: bool = False
    """Whether the session ends with it."""
    shared: Runs = ()
    """Its blocks that a cache which every worker reads has."""
    held: Mapping[Rank, tuple[int, int, int]] | None = None
    """What ranks hold of it, by tier, where somebody else's index was asked (`--use-remote-indexer`)."""
    sequence: bytes | None = None
    """Packed sequence hashes of its blocks, where other routers tell of theirs by them: load is counted by these then."""


@dataclass(slots=True)
class Decision:
    """Where a request goes, and what that rested on."""

    request_id: str
    worker_id: int
    dp_rank: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    blocks: int
    cost: float
    snapshot: "Snapshot"

    @property
    def overlap_blocks(self) -> int:
        """Blocks that need not be computed, in any tier."""
        return self.device_blocks + self.host_blocks + self.disk_blocks

    @property
    def hit_rate(self) -> float:
        """Which part of the prompt's blocks that is; one that is not full is a block, as upstream counts."""
        whole = -(-self.snapshot.ask.tokens // self.snapshot.block_size)
        return min(1.0, self.overlap_blocks / whole) if whole else 0.0


@dataclass(slots=True)
class Snapshot:
    """The state of things when a decision was made, by seat."""

    at: float
    ask: Ask
    seats: list[int]
    """The ranks that could be chosen."""
    ranks: dict[int, Rank]
    load: Load
    prompt: Prompt
    weights: Weights
    costs: list[float]
    filtered: dict[int, str]
    """Ranks that could not, and why."""
    block_size: int
