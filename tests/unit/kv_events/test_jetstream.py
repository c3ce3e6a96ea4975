"""Names of a component's stream, and events during an outage of its server."""

from typing import Any, cast

import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServerError
from tests.cluster.memory import MemoryCluster

from dynamo.kv_events import jetstream as kv_stream
from dynamo.kv_events.jetstream import KvStreamPublisher, bucket_name, ensure_stream, event_subject, stream_name
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, WorkerKvEvent


def test_jetstream_names_equal_those_of_released_dynamo_and_are_shared_by_a_component() -> None:
    one, other = EndpointId.parse("My_ns.backend.generate"), EndpointId.parse("My_ns.backend.prefill")
    assert stream_name(one) == stream_name(other) == "namespace-my-ns-component-backend-kv-events"
    assert bucket_name(one) == "namespace-my-ns-component-backend-radix-bucket"
    assert event_subject(one) == "namespace-my-ns-component-backend-kv-events.queue"


async def test_jetstream_buffer_for_an_absent_server_is_bounded_and_drops_the_newest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_stream, "UNSENT_MAX", 3)
    runtime = MemoryCluster().runtime()
    publisher = KvStreamPublisher(runtime.nats_connection("kv_events"), runtime.metrics, EndpointId.parse("a.b.c"))
    for number in range(1, 6):
        publisher.put(
            WorkerKvEvent(7, "device", "worker", NumberedKvEvent(number, KvEventData(removed=Removed([])), 0))
        )
    assert [name for name, _ in publisher._unsent] == ["7.0.1", "7.0.2", "7.0.3"]
    assert "dynamo_component_kv_stream_dropped_total 2" in runtime.metrics.render()
    assert "did not reach the stream: the queue is full" in caplog.text
    assert not await publisher.flush(0.0)
    publisher._unsent.clear()
    await publisher.close()


class FakeJetStream:
    """A server without streams."""

    def __init__(self, storage: int = 1 << 40) -> None:
        self.made: list[dict[str, Any]] = []
        self.storage = storage

    async def stream_info(self, name: str) -> None:
        if not self.made:
            raise NotFoundError

    async def add_stream(self, **config: Any) -> None:
        if config["max_bytes"] > self.storage:
            raise ServerError(code=500, err_code=10047, description="insufficient storage resources available")
        self.made.append(config)


async def test_jetstream_stream_is_bounded_in_messages_bytes_and_age() -> None:
    server = FakeJetStream()
    endpoint = EndpointId.parse("a.b.c")
    for _ in range(2):
        await ensure_stream(cast("JetStreamContext", server), endpoint)
    [config] = server.made
    assert config["name"] == stream_name(endpoint)
    assert config["max_msgs"] == 4_000_000
    assert config["max_bytes"] == 480 << 20
    assert config["max_age"] == 7 * 86_400


async def test_jetstream_stream_reserves_less_of_a_server_with_little_storage(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeJetStream(storage=100 << 20)
    await ensure_stream(cast("JetStreamContext", server), EndpointId.parse("a.b.c"))
    assert [config["max_bytes"] for config in server.made] == [60 << 20]
    assert "limited to 60 MiB: JetStream has no storage for 480 MiB (max_file_store)" in caplog.text


async def test_jetstream_stream_is_refused_by_a_server_without_storage() -> None:
    server = FakeJetStream(storage=1 << 20)
    with pytest.raises(ServerError, match="insufficient storage"):
        await ensure_stream(cast("JetStreamContext", server), EndpointId.parse("a.b.c"))
    assert server.made == []
