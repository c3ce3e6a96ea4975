"""Contract of event plane transports."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.event_plane.base import Event, EventPlane, Publisher, PublisherGone, Subscriber
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.event_plane.nats import NatsEventPlane
from dynamo.runtime.event_plane.zmq import ZmqEventPlane
from dynamo.runtime.transports.nats.options import NatsOptions

ENDPOINT = EndpointId("ns", "backend", "generate")
TOPIC = "kv-events"
TIMEOUT_S = 30.0  # For operations that take milliseconds on an idle machine.

Join = Callable[[], EventPlane]


@pytest.fixture(params=["memory", "zmq", pytest.param("nats", marks=pytest.mark.integration)])
async def join(request: pytest.FixtureRequest) -> AsyncIterator[Join]:
    """Return a function that creates further members of one cluster."""
    planes: list[EventPlane] = []
    registries: list[MemoryDiscovery] = []
    bus, store = MemoryBus(), MemoryStore()

    def make() -> EventPlane:
        registry = MemoryDiscovery(store)
        registries.append(registry)
        plane: EventPlane
        if request.param == "memory":
            plane = MemoryEventPlane(bus)
        elif request.param == "nats":
            plane = NatsEventPlane(registry, NatsOptions(server=request.getfixturevalue("nats_server").url))
        else:
            plane = ZmqEventPlane(registry, "127.0.0.1")
        planes.append(plane)
        return plane

    yield make
    for plane in planes:
        await plane.close()
    for registry in registries:
        await registry.close()


async def take(subscriber: Subscriber) -> Event | PublisherGone:
    async with asyncio.timeout(TIMEOUT_S):
        return await anext(aiter(subscriber))


async def connected(publisher: Publisher, subscriber: Subscriber) -> int:
    """Publish until the subscriber receives an event, and return the next sequence number."""
    count = 0
    async with asyncio.timeout(TIMEOUT_S):
        hearing = asyncio.ensure_future(anext(aiter(subscriber)))
        while not hearing.done():
            publisher.publish(b"are you there?")
            count += 1
            await asyncio.wait([hearing], timeout=0.01)
        received = hearing.result()
        while isinstance(received, Event) and received.sequence < count - 1:
            received = await anext(aiter(subscriber))
    return count


async def test_events_arrive_in_order_with_nothing_missed(join: Join) -> None:
    publisher = await join().publisher(ENDPOINT, TOPIC)
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    start = await connected(publisher, subscriber)
    for number in range(50):
        publisher.publish(b"%d" % number)
    received = [await take(subscriber) for _ in range(50)]
    assert received == [Event(publisher.id, start + number, b"%d" % number, 0) for number in range(50)]


async def test_subscriber_receives_events_of_earlier_and_later_publishers(join: Join) -> None:
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    publishers = [await join().publisher(ENDPOINT, TOPIC) for _ in range(3)]
    for publisher in publishers:
        await connected(publisher, subscriber)
    for publisher in publishers:
        publisher.publish(b"x")
    received = {
        event.publisher_id for event in [await take(subscriber) for _ in publishers] if isinstance(event, Event)
    }
    assert received == {publisher.id for publisher in publishers}


async def test_late_subscriber_receives_the_count_of_missed_events(join: Join) -> None:
    publisher = await join().publisher(ENDPOINT, TOPIC)
    for _ in range(5):
        publisher.publish(b"unheard")
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    async with asyncio.timeout(TIMEOUT_S):
        hearing = asyncio.ensure_future(anext(aiter(subscriber)))
        while not hearing.done():
            publisher.publish(b"heard")
            await asyncio.wait([hearing], timeout=0.01)
    first = hearing.result()
    assert isinstance(first, Event)
    assert first.payload == b"heard"
    assert first.missed == first.sequence >= 5


async def test_subscriber_reports_dropped_events_as_a_gap(join: Join) -> None:
    publisher = await join().publisher(ENDPOINT, TOPIC)
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    start = await connected(publisher, subscriber)
    subscriber._size_max = 3  # type: ignore[attr-defined]
    for number in range(10):
        publisher.publish(b"%d" % number)
    async with asyncio.timeout(TIMEOUT_S):
        while subscriber.dropped < 7:  # type: ignore[attr-defined]  # noqa: ASYNC110 - no event tells of what is dropped
            await asyncio.sleep(0.001)
    received = [await take(subscriber) for _ in range(3)]
    assert [event.missed for event in received if isinstance(event, Event)] == [0, 0, 0]
    publisher.publish(b"after")
    assert await take(subscriber) == Event(publisher.id, start + 10, b"after", 7)


async def test_topics_and_endpoints_are_separate(join: Join) -> None:
    plane = join()
    ours = await plane.publisher(ENDPOINT, TOPIC)
    others = [
        await plane.publisher(ENDPOINT, TOPIC + "-more"),
        await plane.publisher(EndpointId("ns", "prefill", "generate"), TOPIC),
    ]
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    start = await connected(ours, subscriber)
    for other in others:
        other.publish(b"not for us")
    ours.publish(b"for us")
    assert await take(subscriber) == Event(ours.id, start, b"for us", 0)


async def test_publisher_gone_is_reported_after_its_last_event(join: Join) -> None:
    publisher = await join().publisher(ENDPOINT, TOPIC)
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    await connected(publisher, subscriber)
    await publisher.close()
    publisher.publish(b"after the end")
    assert await take(subscriber) == PublisherGone(publisher.id)


async def test_closing_ends_the_iteration(join: Join) -> None:
    subscriber = await join().subscriber(ENDPOINT, TOPIC)
    await subscriber.close()
    with pytest.raises(StopAsyncIteration):
        await take(subscriber)
    await subscriber.close()


async def test_publishing_without_subscribers_is_no_error(join: Join) -> None:
    publisher = await join().publisher(ENDPOINT, TOPIC)
    publisher.publish(b"x" * 100_000)
    await publisher.close()
