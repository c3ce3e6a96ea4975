"""MultimodalEmbeddingCachePublisher: reports the embeddings that an encode worker keeps in its cache.

The topic `multimodal_embedding_cache` of the worker's endpoint carries `{worker_id, update: {added_keys, removed_keys}}`
in MessagePack.
"""

from collections.abc import Sequence

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import LoopCaller
from dynamo.kv_events.publisher import LatePublisher
from dynamo.runtime.component import Endpoint

TOPIC = "multimodal_embedding_cache"


class MultimodalEmbeddingCachePublisher:
    """Publisher of one worker's cache changes; any thread may publish."""

    def __init__(self) -> None:
        self._thread: LoopCaller | None = None
        self._late: LatePublisher | None = None
        self._worker_id = 0

    async def create_endpoint(self, endpoint: Endpoint) -> None:
        """Register the publisher of this endpoint's worker; required before `publish_delta`."""
        self._thread = LoopCaller()
        self._worker_id = endpoint.connection_id()
        self._late = LatePublisher(endpoint, TOPIC)
        await self._late.opened()

    def publish_delta(self, added_keys: Sequence[str], removed_keys: Sequence[str]) -> None:
        """Report keys that were added to the cache and keys that were removed. Raise `InvalidArgument` too early."""
        thread, late = self._thread, self._late
        if thread is None or late is None:
            raise InvalidArgument("MultimodalEmbeddingCachePublisher: call create_endpoint first")
        update = {"added_keys": list(added_keys), "removed_keys": list(removed_keys)}
        payload = msgpack_encode({"worker_id": self._worker_id, "update": update})
        thread.run(lambda: late.publish(payload))
