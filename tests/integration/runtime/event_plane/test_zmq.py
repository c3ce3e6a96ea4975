"""Event plane over ZMQ: behaviour beyond the contract suite."""

import asyncio
from typing import Any

import pytest
import zmq
from tests.settle import until

from dynamo.core.codec import json_decode
from dynamo.protocols.discovery import EVENT_CHANNELS, EndpointId, topic_prefix
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.event_plane.base import Event, PublisherGone
from dynamo.runtime.event_plane.envelope import EventEnvelope, pack
from dynamo.runtime.event_plane.zmq import ZmqEventPlane, ZmqSubscriber

ENDPOINT = EndpointId("n", "c", "e")


class ScriptedSocket:
    """Socket that returns messages of the test."""

    closed = False

    def __init__(self, messages: list[list[bytes]]) -> None:
        self.messages = messages

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.messages:
            raise zmq.Again
        return self.messages.pop(0)


async def subscriber_of(plane: ZmqEventPlane, *publishers: int) -> ZmqSubscriber:
    subscriber = await plane.subscriber(ENDPOINT, "topic")
    subscriber._publishers.update(publishers)
    return subscriber


def read(subscriber: ZmqSubscriber, *messages: list[bytes]) -> None:
    real, subscriber._socket = subscriber._socket, ScriptedSocket(list(messages))
    subscriber._read()
    subscriber._socket = real


def event(publisher: int, sequence: int, topic: str = "topic") -> list[bytes]:
    return pack(EventEnvelope(publisher, sequence, 0, topic, b"x"))


async def take(subscriber: ZmqSubscriber) -> Any:
    return await asyncio.wait_for(anext(subscriber), 60.0)


async def test_zmq_event_plane_drops_malformed_unknown_and_foreign_events(caplog: pytest.LogCaptureFixture) -> None:
    plane = ZmqEventPlane(MemoryDiscovery(MemoryStore()), "127.0.0.1")
    subscriber = await subscriber_of(plane, 1)
    read(subscriber, [b"topic"], event(2, 0), event(1, 0, "topic-two"), event(1, 0))
    assert await take(subscriber) == Event(1, 0, b"x", 0)
    assert caplog.text.count("ignoring malformed event of") == 1
    await plane.close()


async def test_zmq_event_plane_reads_a_burst_in_batches() -> None:
    plane = ZmqEventPlane(MemoryDiscovery(MemoryStore()), "127.0.0.1")
    subscriber = await subscriber_of(plane, 1)
    flood = [event(1, sequence) for sequence in range(600)]
    real, subscriber._socket = subscriber._socket, ScriptedSocket(flood)
    subscriber._read()
    assert 0 < len(flood) < 600, "the loop gets a turn in between"
    received = [await take(subscriber) for _ in range(600)]
    assert [e.sequence for e in received] == list(range(600))
    subscriber._socket = real
    await plane.close()


async def test_zmq_event_plane_ignores_an_unreadable_channel_and_follows_a_moved_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    registry, other = MemoryDiscovery(store), MemoryDiscovery(store)
    plane = ZmqEventPlane(registry, "127.0.0.1")
    subscriber = await plane.subscriber(ENDPOINT, "topic")
    prefix = topic_prefix(ENDPOINT, "topic")
    await other.put(EVENT_CHANNELS, prefix + "1", b"{nonsense")
    channel = (
        b'{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"n","component":"c","name":"e"}},'
        b'"topic":"topic","instance_id":%d,"transport":{"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:%d"}}}'
    )
    await other.put(EVENT_CHANNELS, prefix + "2", channel % (2, 9))
    await until(lambda: prefix + "2" in subscriber._channels)
    await other.put(EVENT_CHANNELS, prefix + "2", channel % (3, 10))
    assert await take(subscriber) == PublisherGone(2)
    assert subscriber._publishers == {3}
    assert "ignoring malformed event channel" in caplog.text
    await plane.close()


async def test_zmq_event_plane_registers_publishers_as_released_dynamo() -> None:
    registry = MemoryDiscovery(MemoryStore())
    plane = ZmqEventPlane(registry, "127.0.0.1")
    publisher = await plane.publisher(ENDPOINT, "kv-events")
    [(key, value)] = (await registry.snapshot(EVENT_CHANNELS)).items()
    record = json_decode(value)
    assert key == f"namespace/n/component/c/endpoint/e/topic/kv-events/{publisher.id:x}"
    assert 0 < publisher.id < 2**53
    assert record["instance_id"] == publisher.id
    assert record["transport"]["config"]["endpoint"].startswith("tcp://127.0.0.1:")
    await publisher.close()
    assert await registry.snapshot(EVENT_CHANNELS) == {}
    await plane.close()
