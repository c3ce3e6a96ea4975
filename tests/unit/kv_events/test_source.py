"""Subscribers receive every event, and those that missed some receive them again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.core.codec import json_decode, msgpack_decode
from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.source import KvEventSource
from dynamo.protocols.discovery import EVENT_SOURCES, INSTANCES, RESPONSE_FRAMES, EndpointId
from dynamo.protocols.kv_events import KvSourceAnswer, Removed, Stored, StoredBlock, WorkerKvEvent
from dynamo.runtime.event_plane.base import Event

ENDPOINT = "dynamo.backend.generate"


class Bench:
    """A worker with one source, and a router."""

    def __init__(self) -> None:
        cluster = MemoryCluster()
        self.worker, self.router = cluster.runtime(), cluster.runtime()
        self.source = KvEventSource(self.worker.endpoint(ENDPOINT), self.worker.instance_id, dp_rank=1)

    async def record(self) -> dict[str, Any]:
        (value,) = (await self.router.discovery.snapshot(EVENT_SOURCES)).values()
        record: dict[str, Any] = json_decode(value)
        return record

    async def send_request(self, **query: Any) -> KvSourceAnswer:
        target = (await self.record())["metadata"]["recovery_target"]
        client = await self.router.endpoint(f"dynamo.backend.{target['endpoint']}").client()
        await client.wait_for_instances(5)
        query = {"worker_id": self.worker.instance_id, "dp_rank": 1, **query}
        (answer,) = [one async for one in await client.direct(query, target["instance_id"], annotated=False)]
        return msgspec.convert(answer, KvSourceAnswer)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.source.close()
    await made.router.shutdown()
    await made.worker.shutdown()


def stored(parent_hash: int | None, *hashes: int) -> Stored:
    return Stored(parent_hash, None, [StoredBlock(one, one * 10) for one in hashes])


def blocks(events: list[WorkerKvEvent]) -> list[int]:
    return [block.block_hash for worker_event in events for block in worker_event.event.data.stored.blocks]  # type: ignore[union-attr]


async def test_kv_source_record_names_worker_and_responder(bench: Bench) -> None:
    await bench.source.open()
    record = await bench.record()
    publisher, worker = record["publisher_id"], bench.worker.instance_id
    name = f"worker_kv_query_source_{publisher:x}"
    target = record["metadata"]["recovery_target"]
    endpoint = {"namespace": "dynamo", "component": "backend", "name": "generate"}
    assert record == {
        "type": "EventSource",
        "scope": {"kind": "endpoint", "endpoint": endpoint},
        "topic": "kv-events",
        "publisher_id": publisher,
        "metadata": {
            "kv_state_endpoint": endpoint,
            "worker": {"worker_id": worker, "dp_rank": 1},
            "publisher_id": publisher,
            "recovery_target": target,
        },
    }
    (instance,) = (await bench.router.discovery.snapshot(INSTANCES)).values()
    assert json_decode(instance) == {"type": "Endpoint", **target, "response_frames": RESPONSE_FRAMES}
    assert target["endpoint"] == name


async def test_kv_source_publishes_events_and_answers_range_requests(bench: Bench) -> None:
    await bench.source.open()
    subscriber = await bench.router.event_plane.subscriber(EndpointId.parse(ENDPOINT), "kv-events")
    bench.source.put(stored(None, 1, 2))
    bench.source.put(stored(2, 3))
    event = await asyncio.wait_for(anext(aiter(subscriber)), 5)
    assert isinstance(event, Event)
    received = msgspec.convert(msgpack_decode(event.payload), list[WorkerKvEvent])
    assert [
        (worker_event.worker_id, worker_event.event.event_id, worker_event.event.dp_rank) for worker_event in received
    ] == [
        (bench.worker.instance_id, 1, 1),
        (bench.worker.instance_id, 2, 1),
    ]
    answer = await bench.send_request(start_event_id=2)
    assert answer.events is not None
    assert answer.events.events == received[1:]


async def test_kv_source_first_dump_includes_earlier_events(bench: Bench) -> None:
    bench.source.put(stored(None, 1, 2))
    await turns()
    await bench.source.open()
    dump = (await bench.send_request()).dump
    assert dump is not None
    assert (blocks(dump.events), dump.last_event_id) == ([1, 2], 1)


async def test_kv_source_answer_is_never_older_than_published_events(bench: Bench) -> None:
    """The event is not published yet, and already in the answer."""
    await bench.source.open()
    bench.source.put(stored(None, 1))
    bench.source.put(Removed([1]))
    dump = (await bench.send_request()).dump
    assert dump is not None
    assert (dump.events, dump.last_event_id) == ([], 2)


async def test_kv_source_publishes_after_it_is_removed_from_discovery(bench: Bench) -> None:
    await bench.source.open()
    subscriber = await bench.router.event_plane.subscriber(EndpointId.parse(ENDPOINT), "kv-events")
    await bench.source.leave()
    assert await bench.router.discovery.snapshot(EVENT_SOURCES) == {}
    assert await bench.router.discovery.snapshot(INSTANCES) == {}
    bench.source.put(stored(None, 1))
    assert isinstance(await asyncio.wait_for(anext(aiter(subscriber)), 5), Event)


async def test_kv_source_refuses_a_malformed_request(bench: Bench) -> None:
    await bench.source.open()
    with pytest.raises(InvalidArgument):
        await bench.send_request(worker_id="me")


async def test_kv_source_is_not_part_of_process_health(bench: Bench) -> None:
    await bench.source.open()
    assert bench.worker.health.endpoints == {}
    assert not bench.worker.health.is_ready()


async def test_kv_source_large_dump_yields_to_the_loop_and_is_complete(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.kv_events.source.BLOCKS_PER_TURN", 10)
    await bench.source.open()
    bench.source.put(stored(None, *range(1, 101)))
    requested = asyncio.ensure_future(bench.send_request())
    while not requested.done():
        newest = bench.source.holdings.last_event_id
        bench.source.put(stored(100 + newest - 1, 100 + newest))
        await turns()
    dump = (await requested).dump
    assert dump is not None
    assert dump.last_event_id > 10
    assert blocks(dump.events) == list(range(1, 100 + dump.last_event_id))
