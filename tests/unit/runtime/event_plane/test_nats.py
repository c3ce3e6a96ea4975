"""Event plane over NATS: the messages to the server, and the handling of those from the server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.settle import until

from dynamo.core.clock import ManualClock
from dynamo.core.codec import json_decode, msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.discovery import EVENT_CHANNELS, EndpointId, topic_prefix
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.event_plane import nats
from dynamo.runtime.event_plane.base import Event, PublisherGone
from dynamo.runtime.event_plane.envelope import EventEnvelope
from dynamo.runtime.event_plane.nats import NatsEventPlane, NatsSubscriber, subject_prefix
from dynamo.runtime.transports.nats.options import NatsOptions

ENDPOINT = EndpointId("ns-a", "back_end", "generate")
SUBJECT = "namespace.ns-a.component.back_end.endpoint.generate.topic"


class FakeNats:
    """Connection that records its messages."""

    def __init__(self, options: NatsOptions, purpose: str, *, registry: Any, keeps_unsent: bool) -> None:
        assert keeps_unsent
        self.is_full = False
        self.sent: list[tuple[str, bytes]] = []
        self.steps: list[str] = []
        self.deliver: Any = None

    async def start(self) -> None: ...

    def publish(self, subject: str, data: bytes) -> bool:
        if not self.is_full:
            self.sent.append((subject, data))
        return not self.is_full

    async def subscribe(self, subject: str, deliver: Any) -> Any:
        self.deliver = deliver
        return SimpleNamespace(subject=subject)

    async def unsubscribe(self, subscription: Any) -> None:
        self.deliver = None

    async def settle(self, subscription: Any) -> None:
        self.steps.append("settled")

    async def flush(self) -> None:
        self.steps.append("flushed")

    async def close(self) -> None: ...


class NatsPlaneHarness:
    def __init__(self) -> None:
        self.discovery = MemoryDiscovery(MemoryStore())
        self.plane = NatsEventPlane(self.discovery, NatsOptions(), ManualClock(wall=12.5))
        assert isinstance(self.plane._nats, FakeNats)
        self.nats: FakeNats = self.plane._nats

    def receive_event(self, publisher_id: int, sequence: int, topic: str = "topic") -> None:
        self.nats.deliver(SimpleNamespace(data=msgpack_encode(EventEnvelope(publisher_id, sequence, 0, topic, b"x"))))


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> type[NatsPlaneHarness]:
    monkeypatch.setattr(nats, "NatsConnection", FakeNats)
    return NatsPlaneHarness


async def take(subscriber: NatsSubscriber) -> Event | PublisherGone:
    return await asyncio.wait_for(anext(subscriber), 5.0)


async def test_nats_event_plane_writes_channels_and_events_as_released_dynamo(harness: type[NatsPlaneHarness]) -> None:
    made = harness()
    publisher = await made.plane.publisher(ENDPOINT, "topic")
    [(key, value)] = (await made.discovery.snapshot(EVENT_CHANNELS)).items()
    assert key == f"{topic_prefix(ENDPOINT, 'topic')}{publisher.id:x}"
    assert json_decode(value) == {
        "type": "EventChannel",
        "scope": {"kind": "endpoint", "endpoint": {"namespace": "ns-a", "component": "back_end", "name": "generate"}},
        "topic": "topic",
        "instance_id": publisher.id,
        "transport": {
            "kind": "Nats",
            "config": {"subject_prefix": "namespace.ns-a.component.back_end.endpoint.generate"},
        },
    }
    assert publisher.id < 2**53
    publisher.publish(b"payload")
    [(subject, data)] = made.nats.sent
    assert subject == SUBJECT
    assert data == b"".join(
        (
            b"\x85\xacpublisher_id", msgpack_encode(publisher.id), b"\xa8sequence\x00",
            b"\xacpublished_at\xcd\x30\xd4", b"\xa5topic\xa5topic", b"\xa7payload\xc4\x07payload",
        )
    )  # fmt: skip
    await made.plane.close()


async def test_nats_event_plane_publisher_deregisters_after_sending_everything(harness: type[NatsPlaneHarness]) -> None:
    made = harness()
    publisher = await made.plane.publisher(ENDPOINT, "topic")
    await publisher.close()
    await publisher.close()
    publisher.publish(b"after the end")
    assert made.nats.steps == ["flushed"]
    assert made.nats.sent == []
    assert await made.discovery.snapshot(EVENT_CHANNELS) == {}
    await made.plane.close()


async def test_nats_event_plane_counts_and_numbers_dropped_events(
    harness: type[NatsPlaneHarness], caplog: pytest.LogCaptureFixture
) -> None:
    made = harness()
    publisher = await made.plane.publisher(ENDPOINT, "topic")
    made.nats.is_full = True
    for _ in range(5):
        publisher.publish(b"x")
    made.nats.is_full = False
    publisher.publish(b"x")
    assert publisher.dropped == 5
    assert caplog.text.count(": dropped ") == 3, "once, and each time they have doubled"
    assert b"\xa8sequence\x05" in made.nats.sent[0][1]
    await made.plane.close()


async def test_nats_event_plane_ignores_malformed_and_foreign_events(
    harness: type[NatsPlaneHarness], caplog: pytest.LogCaptureFixture
) -> None:
    made = harness()
    subscriber = await made.plane.subscriber(ENDPOINT, "topic")
    for _ in range(3):
        made.nats.deliver(SimpleNamespace(data=b"\xc1 no envelope"))
    made.receive_event(1, 0, "another")
    made.receive_event(1, 7)
    assert await take(subscriber) == Event(1, 7, b"x", 7)
    assert subscriber.unreadable == 3
    assert caplog.text.count("ignored") == 2
    await made.plane.close()


async def test_nats_event_plane_ignores_events_of_a_departed_publisher_until_it_returns(
    harness: type[NatsPlaneHarness],
) -> None:
    made = harness()
    subscriber = await made.plane.subscriber(ENDPOINT, "topic")
    key = f"{topic_prefix(ENDPOINT, 'topic')}1"
    await made.discovery.put(EVENT_CHANNELS, key, b"{}")
    made.receive_event(1, 0)
    assert await take(subscriber) == Event(1, 0, b"x", 0)
    await made.discovery.delete(EVENT_CHANNELS, key)
    assert await take(subscriber) == PublisherGone(1)
    assert made.nats.steps == ["settled"]
    made.receive_event(1, 1)
    made.receive_event(2, 0)
    assert await take(subscriber) == Event(2, 0, b"x", 0)
    await made.discovery.put(EVENT_CHANNELS, key, b"{}")
    await until(lambda: not subscriber._left)
    made.receive_event(1, 2)
    assert await take(subscriber) == Event(1, 2, b"x", 2)
    await made.plane.close()


async def test_nats_event_plane_removes_departed_publishers(
    harness: type[NatsPlaneHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "GONE_MAX", 2)
    made = harness()
    subscriber = await made.plane.subscriber(ENDPOINT, "topic")
    for publisher_id in range(5):
        subscriber._leave(publisher_id)
    assert list(subscriber._left) == [3, 4]
    await made.plane.close()


def test_nats_event_plane_refuses_wildcard_names() -> None:
    with pytest.raises(InvalidArgument, match=r"must not contain \* or >"):
        subject_prefix(EndpointId("ns", ">", "ep"))
