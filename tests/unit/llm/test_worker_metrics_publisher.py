"""WorkerMetricsPublisher: the newest load of each rank is on the event plane."""

import asyncio

import pytest

from dynamo.core.codec import msgpack_decode
from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.worker_publishers import KV_METRICS_TOPIC
from dynamo.llm import WorkerMetricsPublisher
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane

TIMEOUT_S = 5.0


async def test_load_of_each_rank_is_published_when_it_changes() -> None:
    bus = MemoryBus()
    runtime = DistributedRuntime(None, "mem", "mem", event_plane=lambda _: MemoryEventPlane(bus))
    endpoint = runtime.endpoint("ns.comp.ep")
    subscriber = await MemoryEventPlane(bus).subscriber(endpoint.id, KV_METRICS_TOPIC)
    publisher = WorkerMetricsPublisher()
    with pytest.raises(InvalidArgument, match="create_endpoint"):
        publisher.publish(active_decode_blocks=1)
    await publisher.create_endpoint(endpoint)
    publisher.publish(0, active_decode_blocks=3)
    publisher.publish(0, active_decode_blocks=3)
    publisher.publish(1, active_decode_blocks=3, kv_used_blocks=9)
    publisher.publish(active_decode_blocks=4)
    events = aiter(subscriber)
    received = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(received) < 3:
            event = await anext(events)
            assert isinstance(event, Event)
            received.append(msgpack_decode(event.payload))
    common = {"worker_id": endpoint.connection_id(), "active_prefill_tokens": None}
    assert received == [
        {**common, "dp_rank": 0, "active_decode_blocks": 3, "kv_used_blocks": None},
        {**common, "dp_rank": 1, "active_decode_blocks": 3, "kv_used_blocks": 9},
        {**common, "dp_rank": 0, "active_decode_blocks": 4, "kv_used_blocks": None},
    ]
    await runtime.shutdown()
