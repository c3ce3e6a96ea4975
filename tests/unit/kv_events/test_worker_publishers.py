"""Routers receive every block event in order, and the newest load."""

import asyncio

import msgspec
from tests.settle import turns

from dynamo.kv_events.worker_publishers import EVENTS_MAX, WorkerKvEventPublisher, WorkerLoadPublisher
from dynamo.protocols.kv_events import Cleared, Removed, Stored, StoredBlock, WorkerKvEvent
from dynamo.protocols.load import KvMetrics, WorkerLoad


class Topic:
    """The messages of one topic."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.received = asyncio.Event()

    def publish(self, message: bytes) -> None:
        self.messages.append(message)
        self.received.set()

    def loads(self) -> list[KvMetrics]:
        return [msgspec.msgpack.decode(message, type=KvMetrics) for message in self.messages]


async def turn() -> None:
    await turns(2)


async def test_worker_publisher_sends_events_of_one_turn_as_one_message_of_released_format() -> None:
    topic = Topic()
    publisher = WorkerKvEventPublisher(topic.publish, 42)
    publisher.put(Stored(None, 0, [StoredBlock(11, 12)]))
    publisher.put(Removed([5, 6]), dp_rank=1)
    publisher.put(Cleared())
    assert topic.messages == []
    await turn()
    (message,) = topic.messages
    worker = {"worker_id": 42, "storage_tier": "device", "residency_domain": "worker"}
    stored = {
        "parent_hash": None,
        "start_position": 0,
        "blocks": [{"block_hash": 11, "tokens_hash": 12, "mm_extra_info": None}],
    }
    assert msgspec.msgpack.decode(message) == [
        {**worker, "event": {"event_id": 1, "data": {"stored": stored}, "dp_rank": 0}},
        {**worker, "event": {"event_id": 1, "data": {"removed": {"block_hashes": [5, 6]}}, "dp_rank": 1}},
        {**worker, "event": {"event_id": 2, "data": "cleared", "dp_rank": 0}},
    ]


async def test_worker_publisher_messages_decode_to_their_type() -> None:
    topic = Topic()
    publisher = WorkerKvEventPublisher(topic.publish, 42)
    publisher.put(Removed([5]))
    publisher.put(Cleared())
    publisher.flush()
    removed, cleared = msgspec.msgpack.decode(topic.messages[0], type=list[WorkerKvEvent])
    assert not isinstance(removed.event.data, str)
    assert removed.event.data.removed == Removed([5])
    assert cleared.event.data == "cleared"


async def test_worker_publisher_splits_many_events_without_gaps() -> None:
    topic = Topic()
    publisher = WorkerKvEventPublisher(topic.publish, 1)
    for number in range(EVENTS_MAX + 10):
        publisher.put(Removed([number]))
    await turn()
    assert len(topic.messages) == 2
    read = [event for message in topic.messages for event in msgspec.msgpack.decode(message, type=list[WorkerKvEvent])]
    assert [event.event.event_id for event in read] == list(range(1, EVENTS_MAX + 11))


async def test_worker_publisher_sends_no_message_for_an_idle_turn() -> None:
    topic = Topic()
    publisher = WorkerKvEventPublisher(topic.publish, 1)
    publisher.put(Cleared())
    await turn()
    publisher.flush()
    await turn()
    assert len(topic.messages) == 1


async def test_worker_publisher_sends_the_first_load_at_once_and_the_newest_after_the_interval() -> None:
    topic = Topic()
    publisher = WorkerLoadPublisher(topic.publish, 42, interval_s=0.001)
    for used in range(5):
        publisher.put(WorkerLoad(kv_used_blocks=used, active_decode_blocks=used, active_prefill_tokens=9))
    assert [load.kv_used_blocks for load in topic.loads()] == [0]
    topic.received.clear()
    await asyncio.wait_for(topic.received.wait(), 5)
    assert topic.loads()[1] == KvMetrics(42, 0, 4, 9, 4)
    publisher.close()


async def test_worker_publisher_sends_the_newest_load_of_each_rank() -> None:
    topic = Topic()
    publisher = WorkerLoadPublisher(topic.publish, 42)
    publisher.put(WorkerLoad(dp_rank=0, kv_used_blocks=1))
    publisher.put(WorkerLoad(dp_rank=1, kv_used_blocks=2))
    publisher.put(WorkerLoad(dp_rank=0, kv_used_blocks=3))
    publisher.close()
    assert [(load.dp_rank, load.kv_used_blocks) for load in topic.loads()] == [(0, 1), (1, 2), (0, 3)]


async def test_worker_publisher_sends_no_message_after_close() -> None:
    topic = Topic()
    publisher = WorkerLoadPublisher(topic.publish, 42, interval_s=0)
    publisher.put(WorkerLoad())
    publisher.close()
    for _ in range(5):
        await turn()
    assert len(topic.messages) == 1


async def test_worker_publisher_does_not_repeat_a_load_with_equal_blocks_at_once() -> None:
    topic = Topic()
    publisher = WorkerLoadPublisher(topic.publish, 42)
    publisher.put(WorkerLoad(kv_used_blocks=1, running_requests=1))
    publisher.put(WorkerLoad(kv_used_blocks=1, running_requests=2))
    publisher.close()
    assert len(topic.messages) == 1


async def test_worker_publisher_repeats_an_unchanged_load_periodically() -> None:
    topic = Topic()
    publisher = WorkerLoadPublisher(topic.publish, 42, interval_s=0, repeat_s=0.001)
    publisher.put(WorkerLoad(kv_used_blocks=1))
    for _ in range(2):
        topic.received.clear()
        await asyncio.wait_for(topic.received.wait(), 5)
    publisher.close()
    assert {load.kv_used_blocks for load in topic.loads()} == {1}
    assert len(topic.loads()) >= 3
