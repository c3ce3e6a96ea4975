"""Reports of an encode worker's cache."""

import pytest

from dynamo.core.codec import msgpack_decode
from dynamo.core.errors import InvalidArgument
from dynamo.llm import MultimodalEmbeddingCachePublisher
from dynamo.llm.embedding_cache_publisher import TOPIC
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane


async def test_changes_are_published_with_the_worker_id() -> None:
    plane = MemoryEventPlane(MemoryBus())
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane=lambda _: plane)
    endpoint = runtime.endpoint("ns.encode.generate")
    subscriber = await plane.subscriber(endpoint.id, TOPIC)
    publisher = MultimodalEmbeddingCachePublisher()
    with pytest.raises(InvalidArgument, match="create_endpoint"):
        publisher.publish_delta(["a"], [])
    await publisher.create_endpoint(endpoint)
    publisher.publish_delta(["a"], ["b"])
    event = await anext(aiter(subscriber))
    assert isinstance(event, Event)
    assert msgpack_decode(event.payload) == {
        "worker_id": endpoint.connection_id(),
        "update": {"added_keys": ["a"], "removed_keys": ["b"]},
    }
    await runtime.shutdown()
