"""PoolPublication: sequences, snapshots and subscribers that do not keep up."""

import asyncio

import pytest
from tests.settle import turns

from dynamo.dc_relay.config import RelayLimits
from dynamo.dc_relay.publication import FilterFrame, FilterFrameKind, PoolPublication, SubscriberEnded
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Stored, StoredBlock, WorkerKvEvent

SLOW = 3_600_000


def event(key: int) -> WorkerKvEvent:
    data = KvEventData(stored=Stored(None, None, [StoredBlock(key, key)]))
    return WorkerKvEvent(1, "device", "worker", NumberedKvEvent(1, data, 0))


def publication(**limits: int) -> PoolPublication:
    return PoolPublication(5, 32, RelayLimits(**{"publication_delay_ms": SLOW, **limits}))


def numbers(frame: FilterFrame) -> tuple[int, int, int]:
    return int(frame.kind), frame.base_sequence, frame.sequence


async def test_subscriber_receives_a_snapshot_and_then_contiguous_deltas() -> None:
    one = publication(publication_threshold=1)
    one.apply(event(1))
    frames, subscriber = one.subscribe()
    one.apply(event(2))
    one.apply(event(3))
    assert [numbers(frame) for frame in frames] == [(FilterFrameKind.SNAPSHOT_CHUNK, 1, 1)]
    assert [numbers(await subscriber.next()) for _ in range(2)] == [
        (FilterFrameKind.DELTA, 1, 2),
        (FilterFrameKind.DELTA, 2, 3),
    ]


async def test_events_below_the_threshold_are_published_together() -> None:
    one = publication(publication_threshold=3)
    _, subscriber = one.subscribe()
    for key in (1, 2, 3):
        one.apply(event(key))
    assert (await subscriber.next()).sequence == 1
    one.apply(event(4))
    assert one.sequence == 1
    one.flush()
    assert (await subscriber.next()).sequence == 2


async def test_events_without_a_change_have_no_sequence() -> None:
    one = publication(publication_threshold=1)
    one.apply(event(1))
    one.apply(event(1))
    assert one.sequence == 1


async def test_slow_subscriber_is_ended() -> None:
    one = publication(publication_threshold=1, publication_queue_capacity=2)
    _, subscriber = one.subscribe()
    for key in (1, 2, 3):
        one.apply(event(key))
    with pytest.raises(SubscriberEnded) as ended:
        await subscriber.next()
    assert ended.value.is_lagged


async def test_end_of_the_pool_ends_a_waiting_subscriber() -> None:
    one = publication()
    _, subscriber = one.subscribe()
    waiting = asyncio.create_task(subscriber.next())
    await turns()
    one.close()
    with pytest.raises(SubscriberEnded) as ended:
        await waiting
    assert not ended.value.is_lagged


async def test_removed_subscriber_receives_nothing() -> None:
    one = publication(publication_threshold=1)
    _, subscriber = one.subscribe()
    one.unsubscribe(subscriber)
    assert one.subscribers == 0
