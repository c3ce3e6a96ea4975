"""Routing request, routing decision, and the state on which the decision was based.

They are made for every request and in no cycle: they are exempt from garbage collection (`gc=False`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo.kv_router.config import CostWeights
from dynamo.kv_router.cost import Prompt, RankLoads
from dynamo.kv_router.hicache import Runs

Rank = tuple[int, int]
"""A worker id and a data-parallel rank of that worker."""

NOTHING: Mapping[Any, Any] = MappingProxyType({})


class WorkerFacts(msgspec.Struct, frozen=True):
    """The routing-relevant fields of a worker's model card."""

    worker_id: int
    dp_start: int = 0
    dp_size: int = 1
    kv_blocks: int | None = None
    """Capacity of each rank's cache, in blocks."""
    batch_tokens: int | None = None
    """Maximum prompt tokens per batch."""
    taints: frozenset[str] = frozenset()


def ranks_of(facts: WorkerFacts) -> list[Rank]:
    """Return the ranks of a worker."""
    return [(facts.worker_id, rank) for rank in range(facts.dp_start, facts.dp_start + facts.dp_size)]


class RouteRequest(msgspec.Struct, gc=False):
    """A request to be routed."""

    request_id: str
    blocks: bytes
    """Packed token hashes of its complete blocks."""
    tokens: int
    worker_id: int | None = None
    dp_rank: int | None = None
    allowed: frozenset[int] | None = None
    required_taints: frozenset[str] = frozenset()
    near_taint: str | None = None
    """Taint of the workers in the transfer domain of the worker that computes its prompt; None if transfers have no domains."""
    preferred_taints: Mapping[str, float] = NOTHING
    onward: Mapping[str, float] = NOTHING
    """For a prefill worker: seconds that the request then costs its decode worker, by taint of the prefill worker."""
    overrides: dict[str, Any] | None = None
    expected_output_tokens: int | None = None
    priority_jump: float = 0.0
    strict_priority: int = 0
    policy_class: str | None = None
    busy: frozenset[int] = frozenset()
    """Workers above a busy threshold."""
    avoid: frozenset[int] = frozenset()
    """Workers that failed this request or are unresponsive."""
    session: str | None = None
    """Session id."""
    is_last: bool = False
    """Whether the session ends with this request."""
    shared: Runs = ()
    """Runs of its blocks in the shared cache."""
    is_computed: bool = True
    """For a decode worker: whether its prompt has been computed, so that its first token waits for the transfer only."""
    held: Mapping[Rank, tuple[int, int, int]] | None = None
    """Cached blocks by rank and tier from a remote index (`--use-remote-indexer`)."""
    sequence: bytes | None = None
    """Packed sequence hashes of its blocks, where router replicas identify active blocks by them."""
    prompt: Prompt | None = None
    """Its cached blocks, between `Router.look_up` and `Router.place`."""


class Decision(msgspec.Struct, gc=False):
    """The chosen rank, and the state on which the choice was based."""

    request_id: str
    worker_id: int
    dp_rank: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    blocks: int
    cost: float
    snapshot: "Snapshot"
    queue_depth: int = 0
    """Number of requests that still waited in the router's queue."""
    tokens_ahead: float = 0
    """Prompt tokens of earlier requests that the chosen rank had yet to compute."""
    waited_s: float = 0.0
    """Time that the request spent in the router's queue, in seconds."""

    @property
    def overlap_blocks(self) -> int:
        """Return the blocks that need not be computed, in any tier."""
        return self.device_blocks + self.host_blocks + self.disk_blocks

    @property
    def hit_rate(self) -> float:
        """Return the cached share of the prompt's blocks; a partial block counts as one, as upstream counts."""
        whole = -(-self.snapshot.route_request.tokens // self.snapshot.block_size)
        cached = self.device_blocks + self.host_blocks + self.disk_blocks
        return min(1.0, cached / whole) if whole else 0.0


class Snapshot(msgspec.Struct, gc=False):
    """The state of the ranks at decision time, by slot."""

    at: float
    route_request: RouteRequest
    slots: Sequence[int]
    """The eligible ranks."""
    ranks: Mapping[int, Rank]
    load: RankLoads
    prompt: Prompt
    weights: CostWeights
    costs: Sequence[float]
    filtered: Mapping[int, str]
    """Ineligible ranks, with the reason."""
    block_size: int

    def deepest(self) -> int:
        """Return the most blocks that an eligible rank has on its device."""
        return self.prompt.deepest(self.slots if self.filtered else None)
