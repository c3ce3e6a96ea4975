"""KvStateAttachmentOwner: attachment to a KV state agent under upstream's name."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.state_attachment import AttachedRank, AttachmentOwner
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_state import CacheOwnerId, IndexerDomainId
from dynamo.runtime.component import Endpoint


class KvStateAttachmentOwner:
    """Attachment of a worker's ranks to a KV state agent of its namespace."""

    def __init__(self, endpoint: Endpoint, worker_id: int, descriptors: Sequence[Mapping[str, Any]]) -> None:
        """Raise `InvalidArgument` for a malformed descriptor.

        A descriptor has `cache_owner_id`, `indexer_domain_id`, `global_dp_rank`, `kv_state_endpoint`, `kv_block_size`
        (tokens), `raw_zmq_endpoint` (of the engine's vLLM KV events) and optionally `raw_topic`.
        """
        self._endpoint = endpoint
        self._owner = AttachmentOwner(endpoint, worker_id, [_rank(one) for one in descriptors])
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Attach the ranks; return once all are attached. A second call has no effect."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Detach the ranks; a second call has no effect."""
        if self._starting is None:
            raise RuntimeError("KvStateAttachmentOwner: call start() first")
        if not self._is_closed:
            self._is_closed = True
            self._starting.cancel()
            await self._owner.close()

    async def _start(self) -> None:
        await self._endpoint.runtime.connect()
        await self._owner.start()


def _rank(descriptor: Mapping[str, Any]) -> AttachedRank:
    for name in ("image_token_id", "video_token_id"):
        if descriptor.get(name) is not None:
            raise InvalidArgument(f"descriptor: {name} is not supported by this release")
    try:
        rank, size = int(descriptor["global_dp_rank"]), int(descriptor["kv_block_size"])
        if rank < 0 or size < 1:
            raise InvalidArgument(
                f"descriptor: global_dp_rank {rank} and kv_block_size {size}: must be at least 0 and 1"
            )
        return AttachedRank(
            cache_owner_id=CacheOwnerId.parse(descriptor["cache_owner_id"]),
            global_dp_rank=rank,
            kv_state_endpoint=EndpointId.parse(descriptor["kv_state_endpoint"]),
            indexer_domain_id=IndexerDomainId.parse(descriptor["indexer_domain_id"]),
            kv_block_size=size,
            raw_zmq_endpoint=str(descriptor["raw_zmq_endpoint"]),
            raw_topic=str(descriptor.get("raw_topic") or ""),
        )
    except KeyError as error:
        raise InvalidArgument(f"descriptor: missing field {error}") from None
