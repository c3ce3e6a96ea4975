"""A topic is received and published from its start to its close."""

import asyncio

from dynamo.kv_events.topic import Topic
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane

HERE = EndpointId("tests", "worker", "generate")


def runtime_of(bus: MemoryBus) -> DistributedRuntime:
    return DistributedRuntime(
        None,
        MemoryDiscovery(MemoryStore()),
        lambda dispatcher, _: MemoryPlane(dispatcher, MemoryHub()),
        event_plane=lambda _: MemoryEventPlane(bus),
    )


async def test_event_topic_delivers_to_subscribers_until_close() -> None:
    runtime = runtime_of(MemoryBus())
    received: list[bytes] = []
    came = asyncio.Event()
    gone: list[int] = []

    def receive_event(event: Event) -> None:
        received.append(event.payload)
        came.set()

    teller = Topic(runtime, HERE, "topic", lambda _: None)
    listener = Topic(runtime, HERE, "topic", receive_event, gone.append)
    assert not teller.publish(b"early")
    await teller.start(publishes=True)
    await listener.start(publishes=False)
    assert teller.publish(b"one")
    assert not listener.publish(b"it only listens")
    async with asyncio.timeout(10.0):
        await came.wait()
    assert received == [b"one"]
    assert teller.is_sound
    assert listener.is_sound
    await listener.close()
    teller.publish(b"two")
    await teller.close()
    await runtime.shutdown()
    assert received == [b"one"]
