"""KV peers: hint in a request that names another worker with more cached prompt blocks than the chosen one. Pure.

Workers that share their blocks publish an address on their card (`runtime_data`). If the blocks are gone when the
worker requests them, it computes the prompt as without a hint.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard

ADDRESS = "kv_peer_address"
"""Key in a card's `runtime_data`."""
HINT = "kv_peer"
"""Key in a request's `extra_args`: `{"address": …, "worker_id": …, "blocks": …}`."""
GAIN_MIN = 4  # Blocks; computing fewer takes less time than the peer's response.


def peers_of(cards: Mapping[int, ModelDeploymentCard]) -> dict[int, str]:
    """Return the addresses of the workers that share their blocks."""
    found: dict[int, str] = {}
    for worker_id, card in cards.items():
        address = card.runtime_config.runtime_data.get(ADDRESS)
        if isinstance(address, str) and address:
            found[worker_id] = address
    return found


def hint_of(
    worker_id: int, overlap: int, holders: Mapping[tuple[int, int], tuple[int, int, int]], peers: Mapping[int, str]
) -> dict[str, Any] | None:
    """Return a hint to the worker with the most cached prompt blocks; None if the gain is below the minimum.

    `holders` maps ranks to their blocks by tier: on the device, then additional ones in host memory and on disk. A peer
    serves blocks from host memory, which also contains the blocks on its device.
    """
    most, best = overlap + GAIN_MIN - 1, None
    for (holder, _), (device, host, _) in holders.items():
        if holder != worker_id and holder in peers and device + host > most:
            most, best = device + host, holder
    return None if best is None else {"address": peers[best], "worker_id": best, "blocks": most}


def with_hint(request: PreprocessedRequest, hint: dict[str, Any] | None) -> PreprocessedRequest:
    """Return the request with the hint in place of any earlier hint."""
    extra = request.extra_args if isinstance(request.extra_args, dict) else {}
    if hint is None and HINT not in extra:
        return request
    kept = {name: value for name, value in extra.items() if name != HINT}
    return msgspec.structs.replace(request, extra_args=kept if hint is None else {**kept, HINT: hint})
