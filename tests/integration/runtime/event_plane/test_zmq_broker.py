"""Event plane over ZMQ brokers: every subscriber receives every event of its topic once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from tests.zmq_broker import ZmqBroker

from dynamo.core.errors import ConfigError
from dynamo.protocols.discovery import EVENT_CHANNELS, EndpointId
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.event_plane.base import Event, Publisher, Subscriber
from dynamo.runtime.event_plane.zmq import ZmqEventPlane
from dynamo.runtime.event_plane.zmq_broker import Brokers, broker_topic

ENDPOINT = EndpointId("ns", "backend", "generate")
TIMEOUT_S = 60.0


@pytest.fixture
def broker() -> Iterator[ZmqBroker]:
    with ZmqBroker() as made:
        yield made


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], ZmqEventPlane]]:
    planes: list[ZmqEventPlane] = []

    def make(url: str) -> ZmqEventPlane:
        monkeypatch.setenv("DYN_ZMQ_BROKER_URL", url)
        planes.append(ZmqEventPlane(MemoryDiscovery(MemoryStore()), "127.0.0.1"))
        return planes[-1]

    yield make
    for one in planes:
        await one.close()


async def take(subscriber: Subscriber) -> Event:
    async with asyncio.timeout(TIMEOUT_S):
        event = await anext(aiter(subscriber))
    assert isinstance(event, Event)
    return event


async def connected(publisher: Publisher, subscriber: Subscriber) -> int:
    """Publish until an event is received, because a connection takes time; return the number of published events."""
    count = 0
    hearing = asyncio.ensure_future(take(subscriber))
    while not hearing.done():
        publisher.publish(b"%d" % count)
        count += 1
        await asyncio.wait([hearing], timeout=0.02)
    assert hearing.result().payload == b"%d" % hearing.result().sequence
    while hearing.result().sequence < count - 1:
        hearing = asyncio.ensure_future(take(subscriber))
        await hearing
    return count


async def test_zmq_broker_connects_members_without_a_shared_registry(
    broker: ZmqBroker, plane: Callable[[str], ZmqEventPlane]
) -> None:
    here, there = plane(broker.url), plane(broker.url)
    subscriber = await there.subscriber(ENDPOINT, "kv-events")
    publisher = await here.publisher(ENDPOINT, "kv-events")
    count = await connected(publisher, subscriber)
    for number in range(count, count + 5):
        publisher.publish(b"%d" % number)
        event = await take(subscriber)
        assert (event.publisher_id, event.sequence, event.missed) == (publisher.id, number, 0)
    assert there.is_sound
    assert await here._discovery.snapshot(EVENT_CHANNELS) == {}


async def test_zmq_broker_filters_topics_and_endpoints(
    broker: ZmqBroker, plane: Callable[[str], ZmqEventPlane]
) -> None:
    here = plane(broker.url)
    subscriber = await here.subscriber(ENDPOINT, "kv")
    publisher = await here.publisher(ENDPOINT, "kv")
    count = await connected(publisher, subscriber)
    for endpoint, topic in ((ENDPOINT, "kv-events"), (EndpointId("ns", "other", "generate"), "kv")):
        (await here.publisher(endpoint, topic)).publish(b"foreign")
    publisher.publish(b"own")
    event = await take(subscriber)
    assert (event.payload, event.sequence) == (b"own", count)


async def test_zmq_broker_events_through_two_brokers_count_once(
    broker: ZmqBroker, plane: Callable[[str], ZmqEventPlane]
) -> None:
    with ZmqBroker() as second:
        here = plane(f"xsub={broker.xsub};{second.xsub},xpub={broker.xpub};{second.xpub}")
        subscriber = await here.subscriber(ENDPOINT, "kv-events")
        publisher = await here.publisher(ENDPOINT, "kv-events")
        count = await connected(publisher, subscriber)
        for number in range(count, count + 20):
            publisher.publish(b"%d" % number)
            assert (await take(subscriber)).sequence == number
        await here.close()


def test_zmq_broker_names_equal_those_of_released_dynamo() -> None:
    assert Brokers.parse("xsub=tcp://a:1;tcp://b:1 , xpub=tcp://c:2") == Brokers(
        ("tcp://a:1", "tcp://b:1"), ("tcp://c:2",)
    )
    assert broker_topic(ENDPOINT, "kv_metrics") == "namespace.ns.component.backend.endpoint.generate.kv_metrics"


@pytest.mark.parametrize("text", ["tcp://a:1", "xsub=tcp://a:1", "xsub=a,xpub=", "pub=a,xpub=b", "xsub=a,xpub=b,c=d"])
def test_zmq_broker_error_names_an_invalid_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="DYN_ZMQ_BROKER_URL"):
        Brokers.parse(text)


async def test_zmq_broker_refuses_an_invalid_address_and_a_missing_one(
    plane: Callable[[str], ZmqEventPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        await plane("xsub=nonsense,xpub=nonsense").publisher(ENDPOINT, "kv")
    monkeypatch.setenv("DYN_ZMQ_BROKER_ENABLED", "1")
    with pytest.raises(ConfigError, match="DYN_ZMQ_BROKER_URL"):
        plane("")
