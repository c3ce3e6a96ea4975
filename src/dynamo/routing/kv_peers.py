"""KV peers: a request is told which other worker holds more of its prompt than the one it goes to. Pure.

Workers that lend their blocks say in their card where (`runtime_data`). What the hint names may be gone when the worker
asks: it computes then, as without.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard

ADDRESS = "kv_peer_address"
"""The key in a card's `runtime_data`."""
HINT = "kv_peer"
"""The key in a request's `extra_args`: `{"address": …, "worker_id": …, "blocks": …}`."""
GAIN_MIN = 4  # Blocks; fewer are computed before the peer has answered.


def peers_of(cards: Mapping[int, ModelDeploymentCard]) -> dict[int, str]:
    """The addresses of the workers that lend their blocks."""
    found: dict[int, str] = {}
    for worker_id, card in cards.items():
        address = card.runtime_config.runtime_data.get(ADDRESS)
        if isinstance(address, str) and address:
            found[worker_id] = address
    return found


def hint_of(
    worker_id: int, overlap: int, holders: Mapping[tuple[int, int], tuple[int, int, int]], peers: Mapping[int, str]
) -> dict[str, Any] | None:
    """Who holds most of a prompt beyond what the chosen worker holds; None where asking is not worth it.

    Holders are ranks with their blocks by tier: on the device, and behind these in the host and on disk. What a peer
    lends lies in its host; what is on its device lies there as well.
    """
    most, best = overlap + GAIN_MIN - 1, None
    for (holder, _), (device, host, _) in holders.items():
        if holder != worker_id and holder in peers and device + host > most:
            most, best = device + host, holder
    return None if best is None else {"address": peers[best], "worker_id": best, "blocks": most}


def with_hint(request: PreprocessedRequest, hint: dict[str, Any] | None) -> PreprocessedRequest:
    """The request with the hint; what an earlier choice said is gone."""
    extra = request.extra_args if isinstance(request.extra_args, dict) else {}
    if hint is None and HINT not in extra:
        return request
    kept = {name: value for name, value in extra.items() if name != HINT}
    return msgspec.structs.replace(request, extra_args=kept if hint is None else {**kept, HINT: hint})
