"""Explanation of a routing decision: the chosen worker and every candidate with its cost terms (docs/routing.md). Pure."""

import math
from typing import TYPE_CHECKING

import msgspec

from dynamo.kv_router.config import CostWeights

if TYPE_CHECKING:
    from dynamo.kv_router.decision import Decision


class Candidate(msgspec.Struct, kw_only=True):
    """One rank in an explanation. Counts are in blocks."""

    worker_id: int
    dp_rank: int
    cost: float | None = None
    filtered: str | None = None
    """Reason for its exclusion."""
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0
    """Blocks in the shared cache, beyond all tiers of the worker."""
    active_prefill_tokens: float = 0
    active_blocks: float = 0
    active_requests: int = 0
    prefill: float = 0
    saved: float = 0
    decode: float = 0


class Explanation(msgspec.Struct, kw_only=True):
    """Explanation of one decision."""

    request_id: str
    at: float
    worker_id: int
    dp_rank: int
    prompt_tokens: int
    prompt_blocks: int
    policy: str
    weights: CostWeights
    candidates: list[Candidate]
    """Cheapest first."""


def explained(decision: "Decision", policy: str) -> Explanation:
    """Return the explanation of a decision."""
    from dynamo.kv_router.cost import terms  # With numpy: only explanations of a KV router need it.

    seen = decision.snapshot
    least = min((seen.load.prefill_tokens[slot] for slot in seen.slots), default=0.0)
    cost_of = {int(slot): float(cost) for slot, cost in zip(seen.slots, seen.costs, strict=True)}
    candidates = []
    for slot, (worker_id, dp_rank) in seen.ranks.items():
        found = terms(slot, seen.load, seen.prompt, seen.weights, seen.block_size, least)
        candidates.append(
            Candidate(
                worker_id=worker_id,
                dp_rank=dp_rank,
                cost=cost_of.get(slot),
                filtered=seen.filtered.get(slot),
                device=seen.prompt.device.get(slot, 0),
                host=seen.prompt.host.get(slot, 0),
                disk=seen.prompt.disk.get(slot, 0),
                shared=seen.prompt.shared_beyond.get(slot, 0),
                active_prefill_tokens=seen.load.prefill_tokens[slot],
                active_blocks=seen.load.blocks[slot],
                active_requests=seen.load.requests[slot],
                prefill=found.prefill,
                saved=found.saved,
                decode=found.decode,
            )
        )
    candidates.sort(key=lambda one: math.inf if one.cost is None else one.cost)
    return Explanation(
        request_id=decision.request_id,
        at=seen.at,
        worker_id=decision.worker_id,
        dp_rank=decision.dp_rank,
        prompt_tokens=seen.route_request.tokens,
        prompt_blocks=seen.prompt.blocks,
        policy=policy,
        weights=seen.weights,
        candidates=candidates,
    )
