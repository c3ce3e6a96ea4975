"""KvEventPublisher: an engine's blocks are published under the hashes that routers compute."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import until

from dynamo.core.codec import json_decode, json_encode, msgpack_decode
from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_events import publisher as kv_event_publisher
from dynamo.kv_events.worker_publishers import KV_EVENTS_TOPIC
from dynamo.llm import KvEventPublisher, compute_block_hash_for_seq
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId
from dynamo.protocols.kv_events import WorkerKvEvent
from dynamo.runtime.component import Endpoint
from dynamo.runtime.discovery.base import Delete, Put
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, PublisherGone
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.text.multimodal.routing_hashes import pad_of

TIMEOUT_S = 5.0
BLOCK = [1, 2, 3, 4]


class PublisherHarness:
    """An endpoint, and a router that listens to it."""

    def __init__(self, runtime: DistributedRuntime, endpoint: Endpoint, subscriber: Any) -> None:
        self.runtime = runtime
        self.endpoint = endpoint
        self.events = aiter(subscriber)

    async def received_events(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(found) < count:
                event = await anext(self.events)
                if not isinstance(event, PublisherGone):
                    assert isinstance(event, Event)
                    found += msgpack_decode(event.payload)
        return found


@pytest.fixture
async def harness() -> AsyncIterator[PublisherHarness]:
    bus = MemoryBus()
    runtime = DistributedRuntime(
        None, MemoryDiscovery(MemoryStore()), "mem", event_plane=lambda _: MemoryEventPlane(bus)
    )
    endpoint = runtime.endpoint("ns.comp.ep")
    yield PublisherHarness(runtime, endpoint, await MemoryEventPlane(bus).subscriber(endpoint.id, KV_EVENTS_TOPIC))
    await runtime.shutdown()


async def test_kv_publisher_numbers_stored_and_removed_blocks_in_order(harness: PublisherHarness) -> None:
    publisher = KvEventPublisher(harness.endpoint, kv_block_size=4, dp_rank=2)
    publisher.publish_stored([1, 2, 3, 4, 5, 6, 7, 8], [4, 4], [-1, 11], parent_hash=-2)
    publisher.publish_removed([11, -1])
    stored, removed = await harness.received_events(2)
    hashes = compute_block_hash_for_seq([1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert stored == {
        "worker_id": harness.endpoint.connection_id(), "storage_tier": "device", "residency_domain": "worker",
        "event": {
            "event_id": 1, "dp_rank": 2,
            "data": {
                "stored": {
                    "parent_hash": (1 << 64) - 2, "start_position": None,
                    "blocks": [
                        {"block_hash": (1 << 64) - 1, "tokens_hash": hashes[0], "mm_extra_info": None},
                        {"block_hash": 11, "tokens_hash": hashes[1], "mm_extra_info": None},
                    ],
                }
            },
        },
    }  # fmt: skip
    assert removed["event"]["event_id"] == 2
    assert removed["event"]["data"] == {"removed": {"block_hashes": [11, (1 << 64) - 1]}}


async def test_kv_publisher_validates_a_whole_batch(harness: PublisherHarness) -> None:
    publisher = KvEventPublisher(harness.endpoint, worker_id=7, kv_block_size=2)
    good = {"type": "stored", "token_ids": [1, 2], "num_block_tokens": [2], "block_hashes": [5]}
    for bad in (
        {"type": "moved"},
        {"type": "removed"},
        {"type": "removed", "block_hashes": ["x"]},
        {"type": "removed", "block_hashes": [1], "unknown": 1},
        {"type": "stored", "token_ids": [1]},
        {**good, "block_hashes": []},
        {**good, "token_ids": [1]},
        {**good, "block_mm_infos": [{}]},
    ):
        with pytest.raises(ValueError, match="invalid KV event batch"):
            publisher.publish_batch([good, bad])
    publisher.publish_batch([good, {"type": "removed", "block_hashes": [5]}])
    stored, removed = await harness.received_events(2)
    assert (stored["worker_id"], stored["event"]["event_id"], removed["event"]["event_id"]) == (7, 1, 2)


async def test_kv_publisher_stops_at_a_partial_block(harness: PublisherHarness) -> None:
    publisher = KvEventPublisher(harness.endpoint, kv_block_size=4)
    publisher.publish_stored([1, 2, 3, 4, 5], [4, 1], [10, 11])
    publisher.publish_stored([1, 2], [2], [12])
    publisher.publish_removed([10])
    stored, removed = await harness.received_events(2)
    assert [block["block_hash"] for block in stored["event"]["data"]["stored"]["blocks"]] == [10]
    assert removed["event"]["event_id"] == 2


async def test_kv_publisher_accepts_events_from_another_thread(harness: PublisherHarness) -> None:
    publisher = KvEventPublisher(harness.endpoint, kv_block_size=4)
    thread = threading.Thread(target=lambda: publisher.publish_removed([1]))
    thread.start()
    (removed,) = await harness.received_events(1)
    thread.join()
    assert removed["event"]["data"] == {"removed": {"block_hashes": [1]}}


async def test_kv_publisher_shutdown_deregisters(harness: PublisherHarness) -> None:
    publisher = KvEventPublisher(harness.endpoint, kv_block_size=4)
    publisher.publish_removed([1])
    await harness.received_events(1)
    publisher.shutdown()
    publisher.shutdown()
    publisher.publish_removed([2])
    async with asyncio.timeout(TIMEOUT_S):
        assert isinstance(await anext(harness.events), PublisherGone)


async def test_kv_publisher_with_local_indexer_answers_range_requests(harness: PublisherHarness) -> None:
    publisher = KvEventPublisher(harness.endpoint, worker_id=7, kv_block_size=2, enable_local_indexer=True)
    publisher.publish_stored([1, 2], [2], [5])
    sources = harness.endpoint.discovery.watch(EVENT_SOURCES)
    async with asyncio.timeout(TIMEOUT_S):
        put = await anext(change async for change in sources if isinstance(change, Put))
    source = json_decode(put.value)
    client = await harness.runtime.endpoint("ns.comp." + source["metadata"]["recovery_target"]["endpoint"]).client()
    (answer,) = [one async for one in await client.generate({"worker_id": 7, "dp_rank": 0}, annotated=False)]
    assert b"5" in json_encode(answer)
    publisher.shutdown()
    async with asyncio.timeout(TIMEOUT_S):
        gone = await anext(change async for change in sources if isinstance(change, Delete))
    assert gone.key == put.key


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kv_block_size", 0),
        ("batching_timeout_ms", 5),
        ("kv_state_endpoint", "a.b.c"),
    ],
)
async def test_kv_publisher_error_names_an_unsupported_argument(
    harness: PublisherHarness, argument: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument, match=argument):
        KvEventPublisher(harness.endpoint, **{"kv_block_size": 4, argument: value})


async def test_kv_publisher_writes_image_placeholders_as_routers_do(harness: PublisherHarness) -> None:
    """The released publisher sends these."""
    first, second = 0xC04E5527423BB9FB, 0xBE55E72A82F09A72
    shown = [{"mm_objects": [{"mm_hash": one, "offsets": []} for one in two]} for two in ((first,), (first, second))]
    publisher = KvEventPublisher(harness.endpoint, kv_block_size=4, image_token_id=9)
    publisher.publish_stored([1, 9, 9, 9, 9, 2, 9, 9], [4, 4], [7, 8], block_mm_infos=shown)
    publisher.publish_stored([1, 9, 9, 9], [4], [9])
    publisher.publish_stored([5, 6, 7, 8], [4], [10], block_mm_infos=shown[:1])
    worker_event = [one["event"]["data"]["stored"]["blocks"] for one in await harness.received_events(3)]
    a, b = pad_of(first), pad_of(second)
    assert [block["tokens_hash"] for block in worker_event[0]] == compute_block_hash_for_seq(
        [1, a, a, a, a, 2, b, b], 4
    )
    assert [block["mm_extra_info"] for block in worker_event[0]] == shown
    assert worker_event[1][0]["tokens_hash"] == compute_block_hash_for_seq([1, 9, 9, 9], 4)[0]
    assert worker_event[2][0]["tokens_hash"] == compute_block_hash_for_seq([5, 6, 7, 8], 4, shown[:1])[0]


class Kept:
    """A stream that records every message."""

    def __init__(self, connection: Any, registry: MetricsRegistry, endpoint: EndpointId) -> None:
        self.endpoint = endpoint
        self.reported: list[WorkerKvEvent] = []
        self.steps: list[str] = []

    def start(self) -> None:
        self.steps.append("start")

    def put(self, worker_event: WorkerKvEvent) -> None:
        self.reported.append(worker_event)

    async def close(self) -> None:
        self.steps.append("close")


@pytest.mark.parametrize("enable_local_indexer", [True, False])
async def test_kv_publisher_writes_to_a_stream_where_configured(
    harness: PublisherHarness, monkeypatch: pytest.MonkeyPatch, enable_local_indexer: bool
) -> None:
    monkeypatch.setattr(kv_event_publisher, "KvStreamPublisher", Kept)
    monkeypatch.setenv("DYN_DURABLE_KV_EVENTS", "true")
    publisher = KvEventPublisher(harness.endpoint, kv_block_size=4, enable_local_indexer=enable_local_indexer)
    kept: Any = publisher._stream
    assert kept.endpoint == harness.endpoint.id
    publisher.publish_stored(BLOCK, [4], [7])
    publisher.publish_removed([7])
    assert [one.event.event_id for one in kept.reported] == [1, 2]
    publisher.shutdown()
    await until(lambda: kept.steps == ["start", "close"])
    plain = KvEventPublisher(harness.endpoint, kv_block_size=4, durable_kv_events=False)
    plain.publish_removed([8])
    (received_events,) = await harness.received_events(1)
    assert received_events["event"]["data"] == {"removed": {"block_hashes": [8]}}, (
        "nothing else went over the event plane"
    )


def test_kv_publisher_separates_adapters_and_salts() -> None:
    plain = compute_block_hash_for_seq(BLOCK, 4)
    assert len(plain) == 1
    assert compute_block_hash_for_seq(BLOCK, 4, lora_name="l") != plain
    assert compute_block_hash_for_seq(BLOCK, 4, cache_namespace="s") != plain
    assert compute_block_hash_for_seq(BLOCK[:3], 4) == []
    with pytest.raises(InvalidArgument):
        compute_block_hash_for_seq(BLOCK, 4, block_mm_infos=[{}])
    with pytest.raises(InvalidArgument):
        compute_block_hash_for_seq(BLOCK, 0)
