"""The dump of a snapshot: each rank's part is of one moment, and no caller waits for all of it."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock, Mock

import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.core.codec import json_decoder
from dynamo.kv_events import durable as kv_durable
from dynamo.kv_events.durable import DurableEvents
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router import events
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import pack
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent

ENDPOINT = EndpointId.parse("dynamo.backend.generate")


class Listener:
    def __init__(self, index: KvIndex) -> None:
        self.index = index

    def apply(self, worker_event: WorkerKvEvent) -> bool:
        return events.apply(self.index, worker_event)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        self.index.clear(worker_id, dp_rank)


class DurableHarness:
    """A router's end of the stream, without a server."""

    def __init__(self, blocks_max: int = 1 << 20) -> None:
        self.runtime = MemoryCluster().runtime()
        self.index = KvIndex(blocks_max)
        self.view = KvView(self.runtime, ENDPOINT, Listener(self.index), is_durable=True)
        self.durable = DurableEvents(self.runtime, ENDPOINT, self.view, self.index, threshold=10)

    def receive_event(self, worker_id: int, number: int, change: Stored | Removed) -> None:
        data = KvEventData(stored=change) if isinstance(change, Stored) else KvEventData(removed=change)
        self.view.receive(WorkerKvEvent(worker_id, "device", "worker", NumberedKvEvent(number, data, 0)))

    def store(self, worker_id: int, prompts: int) -> None:
        for number in range(1, prompts + 1):
            first = worker_id * 1_000_000 + number * 100
            self.receive_event(
                worker_id, number, Stored(None, None, [StoredBlock(first + at, first + at) for at in range(16)])
            )


@pytest.fixture
async def harness() -> AsyncIterator[DurableHarness]:
    made = DurableHarness()
    yield made
    await made.durable.close()
    await made.view.close()


def held(pieces: list[bytes]) -> dict[int, tuple[int, set[int]]]:
    """The contents of a dump: of each worker its last event and its blocks."""
    found: dict[int, tuple[int, set[int]]] = {}
    for worker_event in json_decoder(list[WorkerKvEvent]).decode(b"".join(pieces)):
        _, blocks = found.setdefault(worker_event.worker_id, (worker_event.event.event_id, set()))
        assert not isinstance(worker_event.event.data, str)
        if worker_event.event.data.stored is not None:
            blocks.update(block.block_hash for block in worker_event.event.data.stored.blocks)
        if worker_event.event.data.removed is not None:
            blocks.difference_update(worker_event.event.data.removed.block_hashes)
    return found


async def test_durable_events_yield_to_the_loop_and_defer_events_of_a_loading_rank(
    harness: DurableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_durable, "SLICE_S", 0.0)
    harness.store(1, 50)
    harness.store(2, 5)
    dumping = asyncio.ensure_future(harness.durable._dump())
    await turns(5)
    harness.receive_event(1, 51, Stored(None, None, [StoredBlock(7, 7)]))
    harness.receive_event(2, 6, Stored(None, None, [StoredBlock(8, 8)]))
    assert not dumping.done()
    assert harness.index.find(pack([7])).depths == [], "it waits"
    assert harness.index.find(pack([8])).depths, "another rank's does not"
    _, count, pieces = await dumping
    worker_event = held(pieces)
    assert (worker_event[1][0], len(worker_event[1][1])) == (50, 800)
    assert (worker_event[2][0], len(worker_event[2][1])) == (6, 81)
    assert count == 56
    assert harness.index.find(pack([7])).depths, "it was taken when the dump was over"
    assert harness.view.last_event_ids() == {(1, 0): 51, (2, 0): 6}
    harness.index.validate()


async def test_durable_events_skip_a_worker_removed_meanwhile(
    harness: DurableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_durable, "SLICE_S", 0.0)
    harness.store(1, 20)
    harness.store(2, 5)
    dumping = asyncio.ensure_future(harness.durable._dump())
    await turns(5)
    harness.view.drop_worker(1)
    while harness.index.sweep():
        pass
    assert set(held((await dumping)[2])) == {2}


async def test_durable_events_restart_a_dump_after_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_durable, "SLICE_S", 0.0)
    monkeypatch.setattr(kv_durable, "DUMP_AGAIN_S", 0.0)
    harness = DurableHarness(blocks_max=400)
    harness.store(1, 20)
    dumping = asyncio.ensure_future(harness.durable._dump_whole())
    await turns(5)
    harness.store(2, 20)
    assert harness.index.counts.evicted > 0
    _, _, pieces = await dumping
    assert sum(len(blocks) for _, blocks in held(pieces).values()) <= 400
    await harness.durable.close()
    await harness.view.close()


async def test_durable_events_report_an_empty_rank(harness: DurableHarness) -> None:
    harness.store(3, 1)
    harness.receive_event(3, 2, Removed([3_000_100 + at for at in range(16)]))
    _, _, pieces = await harness.durable._dump()
    assert held(pieces) == {3: (2, set())}


@pytest.mark.parametrize(
    ("messages", "size", "limit", "is_due"),
    [
        (10, 0, -1, False),
        (2_000_000, 0, -1, False),
        (2_000_001, 0, -1, True),
        (1, 240 << 20, -1, False),
        (1, (240 << 20) + 1, -1, True),
        (1, 240 << 20, 60 << 20, True),
        (1, 30 << 20, 60 << 20, False),
    ],
)
async def test_snapshot_is_due_when_the_stream_is_half_full_regardless_of_the_threshold(
    messages: int, size: int, limit: int, is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = DurableHarness()
    harness.durable._threshold = 10_000_000
    context = Mock()
    context.consumer_info = AsyncMock()
    config = Mock(max_msgs=4_000_000, max_bytes=limit)
    context.stream_info = AsyncMock(return_value=Mock(state=Mock(messages=messages, bytes=size), config=config))
    started: list[str] = []
    monkeypatch.setattr(type(harness.view), "is_whole", True)
    monkeypatch.setattr(harness.durable, "_condense", Mock())
    monkeypatch.setattr(harness.durable._tasks, "start", lambda work, name: started.append(name))
    await harness.durable._check(context)
    assert started == (["snapshot"] if is_due else [])
