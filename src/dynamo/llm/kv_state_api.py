"""KvStateAttachmentOwner and KvStateAgentHost: both ends of a KV state agent under upstream's names."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.state_attachment import AttachedRank, AttachmentOwner
from dynamo.kv_events.state_host import AgentHost
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


class KvStateAgentHost:
    """KV state agent: keeps the KV state of workers that name it in their intents."""

    def __init__(self, endpoint: Endpoint, max_slots: int = 8) -> None:
        """Raise `InvalidArgument` for a `max_slots`, the number of ranks that can be attached, below 1."""
        if max_slots < 1:
            raise InvalidArgument(f"max_slots {max_slots}: must be at least 1")
        self._endpoint = endpoint
        self._host = AgentHost(endpoint, max_slots)
        self._is_started = False

    async def start(self) -> None:
        """Register the host and follow intents. A second call has no effect."""
        if not self._is_started:
            self._is_started = True
            await self._endpoint.runtime.connect()
            await self._host.start()

    async def status(self) -> dict[str, Any]:
        """Return `healthy`, the counts of slots by state, and `error` if the host is not healthy."""
        return self._host.status()

    async def shutdown(self) -> None:
        """Leave the registry and close the slots; a second call has no effect."""
        if self._is_started and not self._host.ended.is_set():
            await self._host.close()

    async def wait_terminated(self) -> None:
        """Wait until the host no longer follows intents."""
        await self._host.ended.wait()


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
