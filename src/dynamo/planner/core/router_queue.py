"""Router queue: prompts that wait in a KV router count as queued at its ranks, so that a planner sees the whole demand. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import RankKey


@dataclass(frozen=True, slots=True)
class QueuedPrompts:
    """Requests in the queue of a router, and their uncached prompt tokens."""

    requests: int = 0
    tokens: int = 0


EMPTY = QueuedPrompts()


def with_queue(
    passes: Mapping[RankKey, ForwardPassMetrics], queued: QueuedPrompts
) -> dict[RankKey, ForwardPassMetrics]:
    """Return the forward passes with an equal share of the queue added to the queued prompts of each rank."""
    if not queued.tokens:
        return dict(passes)
    found, ranks = dict[RankKey, ForwardPassMetrics](), len(passes)
    for at, (key, passed) in enumerate(passes.items()):
        own = passed.queued_requests
        more = msgspec.structs.replace(
            own,
            num_prefill_requests=own.num_prefill_requests + _share(queued.requests, at, ranks),
            sum_prefill_tokens=own.sum_prefill_tokens + _share(queued.tokens, at, ranks),
        )
        found[key] = msgspec.structs.replace(passed, queued_requests=more)
    return found


def _share(total: int, at: int, parts: int) -> int:
    """Return one of the integers that add up to `total`."""
    return total * (at + 1) // parts - total * at // parts
