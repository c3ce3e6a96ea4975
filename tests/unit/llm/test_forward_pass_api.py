"""Metrics of an engine reach every subscriber, message by message or the newest of each rank."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio
from tests.settle import turns, until

from dynamo.core.codec import msgpack_decode
from dynamo.core.errors import InvalidArgument
from dynamo.llm import FpmDirectPublisher, FpmEventRelay, FpmEventSubscriber
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.runtime.component import Endpoint
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane

STEP = {
    "scheduled_num_prefill_requests": 1,
    "scheduled_sum_prefill_tokens": 100,
    "scheduled_sum_prefill_kv_tokens": 28,
    "scheduled_num_decode_requests": 2,
    "scheduled_sum_decode_kv_tokens": 301,
    "queued_num_prefill_requests": 3,
    "queued_sum_prefill_tokens": 900,
    "queued_num_decode_requests": 0,
    "queued_sum_decode_kv_tokens": 0,
    "wall_time_secs": 0.02,
}


@pytest.fixture
async def endpoints() -> AsyncIterator[Callable[[], Endpoint]]:
    store, bus = MemoryStore(), MemoryBus()
    runtimes: list[DistributedRuntime] = []

    def make() -> Endpoint:
        plane = MemoryEventPlane(bus)
        runtimes.append(DistributedRuntime(None, MemoryDiscovery(store), "mem", event_plane=lambda _: plane))
        return runtimes[-1].endpoint("ns.backend.generate")

    yield make
    for runtime in runtimes:
        await runtime.shutdown()


async def test_forward_pass_messages_are_received_in_a_thread_until_shutdown(endpoints: Callable[[], Endpoint]) -> None:
    subscriber = FpmEventSubscriber(endpoints())
    receiving = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
    await until(lambda: subscriber._listening is not None)
    await turns()
    publisher = FpmDirectPublisher(endpoints(), "7")
    await publisher._late.opened()
    await asyncio.to_thread(lambda: publisher.publish(dp_rank=0, **STEP))
    received = msgpack_decode(await asyncio.wait_for(receiving, 10) or b"")
    assert (received["worker_id"], received["counter_id"], received["wall_time"]) == ("7", 1, 0.02)
    assert received["scheduled_requests"]["sum_decode_kv_tokens"] == 301
    assert received["queued_requests"]["sum_prefill_tokens"] == 900
    waiting = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
    await turns()
    subscriber.shutdown()
    assert await asyncio.wait_for(waiting, 10) is None
    publisher.shutdown()
    publisher.publish(dp_rank=0, **STEP)


async def test_latest_message_of_each_rank_is_kept_while_its_worker_is_present(
    endpoints: Callable[[], Endpoint],
) -> None:
    subscriber = FpmEventSubscriber(endpoints())
    with pytest.raises(InvalidArgument, match="start_tracking"):
        subscriber.get_recent_stats()
    subscriber.start_tracking()
    with pytest.raises(InvalidArgument, match="recv"):
        subscriber.recv()
    await turns()
    publisher = FpmDirectPublisher(endpoints(), "7", dp_size=2)
    for rank in (0, 1, 1):
        publisher.publish(dp_rank=rank, **STEP)
    await until(lambda: len(subscriber.get_recent_stats()) == 2)
    await until(lambda: msgpack_decode(subscriber.get_recent_stats()["7", 1])["counter_id"] == 2)
    publisher.shutdown()
    await until(lambda: not subscriber.get_recent_stats())
    subscriber.shutdown()


async def test_ranks_out_of_range_are_refused(endpoints: Callable[[], Endpoint]) -> None:
    endpoint = endpoints()
    with pytest.raises(InvalidArgument, match="dp_size"):
        FpmDirectPublisher(endpoint, "7", 0)
    publisher = FpmDirectPublisher(endpoint, "7")
    with pytest.raises(InvalidArgument, match="dp_rank"):
        publisher.publish(dp_rank=1, **STEP)
    publisher.shutdown()


async def test_model_cards_of_the_component_are_tracked(endpoints: Callable[[], Endpoint]) -> None:
    endpoint = endpoints()
    subscriber = FpmEventSubscriber(endpoint)
    with pytest.raises(InvalidArgument, match="start_tracking"):
        subscriber.get_model_cards()
    subscriber.start_tracking()
    record = b'{"type":"Model","card_json":{"display_name":"m"}}'
    await endpoint.discovery.put(MODEL_CARDS, "ns/backend/generate/1f", record)
    await endpoint.discovery.put(MODEL_CARDS, "ns/other/generate/20", record)
    await endpoint.discovery.put(MODEL_CARDS, "ns/backend/generate/1f/adapter", record)
    await until(lambda: subscriber.get_model_cards() == {"31": '{"display_name":"m"}'})
    await endpoint.discovery.delete(MODEL_CARDS, "ns/backend/generate/1f")
    await until(lambda: not subscriber.get_model_cards())
    subscriber.shutdown()


async def test_relay_republishes_the_payload(endpoints: Callable[[], Endpoint]) -> None:
    publisher = zmq.asyncio.Context.instance().socket(zmq.PUB)
    publisher.bind("inproc://forward-passes")
    subscriber = FpmEventSubscriber(endpoints())
    relay = FpmEventRelay(endpoints(), "inproc://forward-passes")
    receiving = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
    await relay._late.opened()
    await until(lambda: subscriber._listening is not None)
    await turns()
    await publisher.send_multipart([b"", bytes(8), b"payload"])
    assert await asyncio.wait_for(receiving, 10) == b"payload"
    relay.shutdown()
    subscriber.shutdown()
    publisher.close()
