"""A router's index of its workers' caches is complete after lost messages."""

from collections.abc import AsyncIterator

import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns, until

from dynamo.kv_events import subscriber as kv_view
from dynamo.kv_events.source import KvEventSource
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router import events
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import pack
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent

ENDPOINT = "dynamo.backend.generate"


class Listener:
    """An index that can lose events on demand."""

    def __init__(self) -> None:
        self.index = KvIndex()
        self.forgotten = 0

    def apply(self, worker_event: WorkerKvEvent) -> bool:
        return events.apply(self.index, worker_event)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        self.forgotten += 1
        self.index.clear(worker_id, dp_rank)


class SubscriberHarness:
    """Worker and router connected by memory planes."""

    def __init__(self) -> None:
        cluster = MemoryCluster()
        self.store = cluster.store
        self.worker, self.router = cluster.runtime(), cluster.runtime()
        self.source = KvEventSource(self.worker.endpoint(ENDPOINT), self.worker.instance_id)
        self.listener = Listener()
        self.view = KvView(self.router, EndpointId.parse(ENDPOINT), self.listener)

    def depth(self, *hashes: int) -> int:
        overlap = self.listener.index.find(pack(hashes))
        return self.listener.index.depth_by_rank(overlap).get((self.worker.instance_id, 0), 0)

    def reported(self, number: int, change: Stored | Removed) -> WorkerKvEvent:
        data = KvEventData(stored=change) if isinstance(change, Stored) else KvEventData(removed=change)
        return WorkerKvEvent(self.worker.instance_id, "device", "worker", NumberedKvEvent(number, data, 0))


@pytest.fixture
async def harness() -> AsyncIterator[SubscriberHarness]:
    made = SubscriberHarness()
    yield made
    await made.view.close()
    await made.source.close()
    await made.router.shutdown()
    await made.worker.shutdown()


def stored(parent_hash: int | None, *hashes: int) -> Stored:
    return Stored(parent_hash, None, [StoredBlock(one, one * 10) for one in hashes])


async def test_kv_subscriber_applies_the_dump_and_later_events(harness: SubscriberHarness) -> None:
    harness.source.put(stored(None, 1, 2))
    await harness.source.open()
    await harness.view.start()
    await until(lambda: harness.depth(10, 20, 30) == 2)
    harness.source.put(stored(2, 3))
    await until(lambda: harness.depth(10, 20, 30) == 3)
    harness.source.put(Removed([3, 2]))
    await until(lambda: harness.depth(10, 20, 30) == 1)
    assert harness.view.is_whole


async def test_kv_subscriber_requests_the_dump_of_a_later_source(harness: SubscriberHarness) -> None:
    await harness.view.start()
    harness.source.put(stored(None, 1))
    await harness.source.open()
    await until(lambda: harness.depth(10) == 1)


async def test_kv_subscriber_requests_a_lost_event(harness: SubscriberHarness) -> None:
    await harness.source.open()
    await harness.view.start()
    await until(lambda: harness.view.has_sources and harness.view.is_whole)
    for change in (stored(None, 1), stored(1, 2), stored(2, 3)):
        harness.source.put(change)
    await until(lambda: harness.depth(10, 20, 30) == 3)
    harness.source.holdings.apply(harness.reported(4, stored(3, 4)))  # Lost: never received.
    harness.view.receive(harness.reported(5, stored(4, 5)))
    harness.source.holdings.apply(harness.reported(5, stored(4, 5)))
    assert not harness.view.is_whole
    harness.view.receive(harness.reported(6, stored(5, 6)))
    harness.source.holdings.apply(harness.reported(6, stored(5, 6)))
    await until(lambda: harness.view.is_whole)
    assert harness.depth(10, 20, 30, 40, 50, 60) == 6
    harness.listener.index.validate()


async def test_kv_subscriber_finds_an_event_that_preceded_its_subscription(
    harness: SubscriberHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_view, "SECOND_QUERY_S", 0.01)
    harness.source.put(stored(None, 1))
    await harness.source.open()
    await harness.view.start()
    await until(lambda: harness.depth(10) == 1)
    lost = harness.reported(2, stored(1, 2))
    harness.source.holdings.apply(lost)  # Not received, and the worker has no later events.
    await until(lambda: harness.depth(10, 20) == 2)
    assert harness.view.last_event_ids() == {(harness.worker.instance_id, 0): 2}


async def test_kv_subscriber_applies_a_repeated_event_once(harness: SubscriberHarness) -> None:
    await harness.source.open()
    await harness.view.start()
    await until(lambda: harness.view.has_sources and harness.view.is_whole)
    first, second = harness.reported(1, stored(None, 1)), harness.reported(2, Removed([1]))
    for worker_event in (first, second, first):
        harness.view.receive(worker_event)
    assert harness.depth(10) == 0


async def test_kv_subscriber_forgets_a_removed_worker(harness: SubscriberHarness) -> None:
    harness.source.put(stored(None, 1))
    await harness.source.open()
    await harness.view.start()
    await until(lambda: harness.depth(10) == 1)
    await harness.source.leave()
    await until(lambda: harness.depth(10) == 0)
    assert not harness.view.has_sources


async def test_kv_subscriber_follows_events_of_a_worker_without_source(harness: SubscriberHarness) -> None:
    await harness.view.start()
    harness.view.receive(harness.reported(1, stored(None, 1)))
    harness.view.receive(harness.reported(2, stored(1, 2)))
    assert harness.depth(10, 20) == 2
    harness.view.receive(harness.reported(9, stored(None, 7)))
    assert (harness.depth(10, 20), harness.depth(70)) == (0, 1), "what came after a gap is all that is sure"


async def test_kv_subscriber_retries_an_unresponsive_source(
    harness: SubscriberHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_view, "QUERY_RETRY_FIRST_S", 0.01)
    harness.source.put(stored(None, 1))
    await harness.source.open()
    real, tries = kv_view.query_source, []

    async def broken(*question: object) -> object:
        tries.append(question)
        if len(tries) < 3:
            raise TimeoutError
        return await real(*question)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_view, "query_source", broken)
    await harness.view.start()
    await until(lambda: harness.depth(10) == 1)
    assert len(tries) == 3


async def test_kv_subscriber_ignores_an_unreadable_record(harness: SubscriberHarness) -> None:
    key = "namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/bad"
    await harness.worker.discovery.put(EVENT_SOURCES, key, b"{")
    harness.source.put(stored(None, 1))
    await harness.source.open()
    await harness.view.start()
    await until(lambda: harness.depth(10) == 1)


async def test_kv_subscriber_loads_a_stored_snapshot_that_is_newer(harness: SubscriberHarness) -> None:
    view = KvView(harness.router, EndpointId.parse(ENDPOINT), harness.listener, is_durable=True)
    kept = [harness.reported(5, stored(None, 1, 2)), harness.reported(5, Removed([2]))]
    await view.adopt(kept)
    assert (view.last_event_ids(), harness.depth(10, 20)) == ({(harness.worker.instance_id, 0): 5}, 1)
    view.receive(harness.reported(4, Removed([1])))
    assert harness.depth(10) == 1, "it was covered by what was kept"
    view.receive(harness.reported(6, stored(1, 3)))
    assert harness.depth(10, 30) == 2
    await view.adopt(kept)
    assert harness.depth(10, 30) == 2, "more was heard than that"
    view.drop_absent_workers({harness.worker.instance_id})
    assert harness.depth(10, 30) == 2
    view.drop_absent_workers(set())
    assert (view.last_event_ids(), harness.depth(10, 30)) == ({}, 0)


async def test_kv_subscriber_requests_only_sources_missing_from_the_snapshot(harness: SubscriberHarness) -> None:
    view = KvView(harness.router, EndpointId.parse(ENDPOINT), harness.listener, is_durable=True)
    harness.source.put(stored(None, 1, 2))
    harness.source.flush()  # Before anybody listens.
    await harness.source.open()
    await view.start()
    await turns(20)
    assert view.has_sources
    assert (harness.depth(10), view.is_whole) == (0, True)
    view.query_silent_ranks()
    await until(lambda: harness.depth(10, 20) == 2)
    await view.close()
