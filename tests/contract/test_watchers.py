"""Subscribers whose watch for publishers fails: they continue, report the failure, and detect publishers that left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.protocols.discovery import EVENT_CHANNELS, EndpointId, topic_prefix
from dynamo.runtime.discovery.base import Change
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.event_plane import nats
from dynamo.runtime.event_plane.base import PublisherGone
from dynamo.runtime.event_plane.nats import NatsEventPlane
from dynamo.runtime.event_plane.zmq import ZmqEventPlane

ENDPOINT = EndpointId("n", "c", "e")
TIMEOUT_S = 30.0  # For operations that take milliseconds on an idle machine.
ZMQ_CHANNEL = (
    b'{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"n","component":"c","name":"e"}},'
    b'"topic":"topic","instance_id":7,"transport":{"kind":"Zmq","config":{"endpoint":"%s"}}}'
)
KEY = topic_prefix(ENDPOINT, "topic") + "7"


class Breaking(MemoryDiscovery):
    """Discovery whose watch fails at its next change on demand; that change is lost."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.breaks = False

    async def watch(self, bucket: str) -> AsyncIterator[Change]:  # type: ignore[override]
        async for change in super().watch(bucket):
            if self.breaks:
                self.breaks = False
                raise ValueError("the watch broke")
            yield change


class FakeNats:
    """NATS connection that receives nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    async def start(self) -> None: ...

    async def subscribe(self, subject: str, deliver: Any) -> Any:
        return SimpleNamespace(subject=subject)

    async def unsubscribe(self, subscription: Any) -> None: ...

    async def settle(self, subscription: Any) -> None: ...

    async def close(self) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["zmq", "nats"])
async def test_failed_watch_is_restarted_and_reports_removed_records(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "NatsConnection", FakeNats)
    monkeypatch.setattr("dynamo.core.tasks.PROVEN_S", 0.001)
    store = MemoryStore()
    discovery, other = Breaking(store), MemoryDiscovery(store)
    plane: Any = ZmqEventPlane(discovery, "127.0.0.1") if kind == "zmq" else NatsEventPlane(discovery)
    subscriber = await plane.subscriber(ENDPOINT, "topic")
    await other.put(EVENT_CHANNELS, KEY, ZMQ_CHANNEL % b"tcp://127.0.0.1:9")
    await until(lambda: KEY in (subscriber._channels if kind == "zmq" else subscriber._present))
    assert plane.is_sound
    discovery.breaks = True
    await other.delete(EVENT_CHANNELS, KEY)
    await until(lambda: not plane.is_sound)
    assert await asyncio.wait_for(anext(subscriber), TIMEOUT_S) == PublisherGone(7)
    await until(lambda: plane.is_sound)
    await plane.close()


async def test_invalid_address_affects_only_its_publisher(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    plane, other = ZmqEventPlane(MemoryDiscovery(store), "127.0.0.1"), MemoryDiscovery(store)
    subscriber = await plane.subscriber(ENDPOINT, "topic")
    await other.put(EVENT_CHANNELS, KEY, ZMQ_CHANNEL % b"nonsense")
    await other.put(EVENT_CHANNELS, KEY + "8", ZMQ_CHANNEL % b"tcp://127.0.0.1:9")
    await until(lambda: KEY + "8" in subscriber._channels)
    assert KEY not in subscriber._channels
    assert plane.is_sound
    assert "nonsense" in caplog.text
    await plane.close()
