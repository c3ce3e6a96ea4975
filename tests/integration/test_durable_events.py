"""KV events kept by a JetStream server: a router that is killed at any step loses no event of its workers."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from tests.cluster.nats import NatsServer
from tests.integration.durable_router import STEPS, THRESHOLD

from dynamo.kv_events import durable as kv_durable
from dynamo.kv_events import snapshots as kv_snapshots
from dynamo.kv_events.durable import KV_ROUTERS, DurableEvents
from dynamo.kv_events.jetstream import KvStreamPublisher, bucket_name, stream_name
from dynamo.kv_events.publisher import KvEventPublisher
from dynamo.kv_events.snapshots import ObjectInfo, SnapshotStore
from dynamo.kv_events.source import KvEventSource
from dynamo.kv_router import events
from dynamo.kv_router.config import RoutingConfig
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.discovery import file
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0  # For operations that take a second on an idle machine.
PROGRAM = str(Path(__file__).with_name("durable_router.py"))
ROOT = Path(__file__).parents[2]
SERVICE = iter(range(1000))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("nats")
    # Explicit: the default depends on the free disk of the machine. Each component reserves 480 MiB.
    with NatsServer(folder, f"jetstream {{ store_dir: {folder / 'js'}, max_file_store: 12GB }}") as server:
        yield server


@pytest.fixture(autouse=True)
def surroundings(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NATS_SERVER": server.url,
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kv_snapshots, "LOCK_TTL_S", 1.0)
    monkeypatch.setattr(file, "REFRESH_S", 0.3)  # Short, so that dead workers are detected soon.
    monkeypatch.setattr(file, "EXPIRY_S", 2.0)


class Worker:
    """Worker that stores and evicts at random, publishes to the stream, and cannot be queried."""

    def __init__(self, runtime: DistributedRuntime, endpoint: EndpointId, stream: KvStreamPublisher) -> None:
        self.id = runtime.instance_id
        self.held: set[int] = set()
        self._rng = random.Random(self.id)
        self._stream = stream
        self._events = 0
        self._keys = iter(range(1, 1_000_000))

    def work(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        rng = self._rng.random()
        if rng < 0.02:
            self.held.clear()
            self._notify("cleared")
        elif rng < 0.35 and self.held:
            gone = self._rng.sample(sorted(self.held), min(3, len(self.held)))
            self.held.difference_update(gone)
            self._notify(KvEventData(removed=Removed(gone)))
        else:
            parent = self._rng.choice([None, *sorted(self.held)])
            blocks = [StoredBlock(next(self._keys), self._rng.getrandbits(64)) for _ in range(3)]
            self.held.update(block.block_hash for block in blocks)
            self._notify(KvEventData(stored=Stored(parent, None, blocks)))

    def _notify(self, data: object) -> None:
        self._events += 1
        event = NumberedKvEvent(self._events, data, 0)  # type: ignore[arg-type]
        self._stream.put(WorkerKvEvent(self.id, "device", "worker", event))


def stream_of(runtime: DistributedRuntime, endpoint: EndpointId) -> KvStreamPublisher:
    return KvStreamPublisher(runtime.nats_connection("kv_events"), runtime.metrics, endpoint)


class Fleet:
    """Workers of one component in this process."""

    def __init__(self) -> None:
        self.endpoint = EndpointId.parse(f"durable.c{next(SERVICE)}.generate")
        self.runtimes = [DistributedRuntime() for _ in range(3)]
        self.streams = [stream_of(runtime, self.endpoint) for runtime in self.runtimes]
        self.workers = [
            Worker(runtime, self.endpoint, stream) for runtime, stream in zip(self.runtimes, self.streams, strict=True)
        ]

    async def start(self) -> None:
        for runtime, stream in zip(self.runtimes, self.streams, strict=True):
            await runtime.endpoint(str(self.endpoint)).serve(lambda request, reply: None)
            stream.start()

    async def work(self, steps: int) -> None:
        """Publish that many events of each worker, and wait until the server has stored them."""
        for worker, stream in zip(self.workers, self.streams, strict=True):
            worker.work(steps)
            assert await stream.flush(TIMEOUT_S)

    async def close(self) -> None:
        for runtime, stream in zip(self.runtimes, self.streams, strict=True):
            await stream.close()
            await runtime.shutdown()

    def truth(self) -> dict[int, set[int]]:
        return {worker.id: worker.held for worker in self.workers}


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    await fleet.start()
    yield fleet
    await fleet.close()


class Router:
    """Router in this process."""

    def __init__(self, endpoint: EndpointId, *, threshold: int = THRESHOLD, resets: bool = False) -> None:
        self.runtime = DistributedRuntime()
        config = RoutingConfig(block_size=4, durable_kv_events=True, snapshot_threshold=threshold, reset_states=resets)
        self.kv = KvPushRouter(self.runtime, endpoint, config)
        assert self.kv.durable is not None
        self.durable: DurableEvents = self.kv.durable
        self.stream = stream_name(endpoint)

    def indexed_blocks(self) -> dict[int, set[int]]:
        """Return the blocks of each worker, from the index alone."""
        index = self.kv.machine.index
        index.validate()
        held: dict[int, set[int]] = {}
        for reported in events.dump(index):
            blocks, data = held.setdefault(reported.worker_id, set()), reported.event.data
            assert not isinstance(data, str)
            if data.stored is not None:
                blocks.update(block.block_hash for block in data.stored.blocks)
            if data.removed is not None:
                blocks.difference_update(data.removed.block_hashes)
        return held

    async def until_indexed(self, truth: dict[int, set[int]]) -> None:
        wanted = {worker: held for worker, held in truth.items() if held}
        async with asyncio.timeout(TIMEOUT_S):
            await self.durable.caught_up()
            while {worker: held for worker, held in self.indexed_blocks().items() if held} != wanted:  # noqa: ASYNC110 - heard
                await asyncio.sleep(0.02)

    async def until_messages(self, most: int) -> None:
        """Wait until the stream holds at most that many messages."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self.messages() > most:  # noqa: ASYNC110 - the server is asked
                await asyncio.sleep(0.05)

    async def messages(self) -> int:
        """Return the number of messages of the stream."""
        return int((await self.query(lambda context: context.stream_info(self.stream))).state.messages)

    async def query(self, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the server's response; a request whose connection is lost is repeated, as all requests of routers are."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                await self.durable._connection.wait_up()
                try:
                    return await send(self.durable._context())
                except nats.errors.Error:
                    await asyncio.sleep(0.05)


async def pieces_of(router: Router, store: SnapshotStore) -> dict[str, int] | None:
    """Return the subjects of all stored pieces of snapshots."""
    subjects = store._pieces_of(">")
    info = await router.query(lambda context: context.stream_info(store._stream, subjects_filter=subjects))
    found: dict[str, int] | None = info.state.subjects
    return found


@asynccontextmanager
async def router_of(fleet: Fleet, **more: int) -> AsyncIterator[Router]:
    router = Router(fleet.endpoint, **more)  # type: ignore[arg-type]
    try:
        await router.kv.start()
        yield router
    finally:
        await router.kv.close()
        await router.runtime.shutdown()


@pytest.mark.parametrize("step", STEPS)
async def test_router_killed_after_any_step_loses_no_event(fleet: Fleet, step: str) -> None:
    await fleet.work(40)
    victim = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, str(fleet.endpoint), step, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    async with asyncio.timeout(TIMEOUT_S):
        assert await victim.wait() == -signal.SIGKILL
    await fleet.work(20)
    async with router_of(fleet) as second:
        await second.until_indexed(fleet.truth())
        await second.until_messages(THRESHOLD)
        await fleet.work(5)
        await second.until_indexed(fleet.truth())
    async with asyncio.timeout(TIMEOUT_S):
        while await fleet.runtimes[0].discovery.snapshot(KV_ROUTERS):  # noqa: ASYNC110 - the victim's record expires
            await asyncio.sleep(0.05)
    async with router_of(fleet) as third:
        await third.until_indexed(fleet.truth())
        async with asyncio.timeout(TIMEOUT_S):
            # Orphans are deleted, again after each lost connection.
            while [one.name for one in await third.query(third.durable._consumers)] != [third.durable.name]:  # noqa: ASYNC110 - the server sets no event
                await asyncio.sleep(0.05)


async def test_upload_blocks_neither_events_nor_routing_and_is_not_repeated(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    go_on, begun = asyncio.Event(), []
    send = SnapshotStore.send_piece

    async def slow(self: SnapshotStore, subject: str, piece: bytes) -> None:
        begun.append(subject)
        await go_on.wait()
        await send(self, subject, piece)

    monkeypatch.setattr(SnapshotStore, "send_piece", slow)
    monkeypatch.setattr(kv_snapshots, "LOCK_TTL_S", 30.0)
    await fleet.work(40)
    async with router_of(fleet) as first, router_of(fleet) as second:
        async with asyncio.timeout(TIMEOUT_S):
            while not begun:  # noqa: ASYNC110 - begun by a task of the router
                await asyncio.sleep(0.02)
        await fleet.work(40)
        for router in (first, second):
            await router.until_indexed(fleet.truth())
        await asyncio.sleep(2.5)  # Both have polled again.
        assert len(begun) == 1
        assert await first.messages() >= 240, "nothing is purged before the snapshot is durable"
        assert "initiated" in caplog.text
        assert "uploaded" not in caplog.text
        go_on.set()
        await first.until_messages(THRESHOLD)
        assert "uploaded" in caplog.text
        assert bucket_name(fleet.endpoint) in caplog.text


async def test_messages_unread_by_another_router_are_kept(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.work(40)
    held, has_stopped = asyncio.Event(), asyncio.Event()
    fetch = DurableEvents._fetch
    async with router_of(fleet, threshold=1000) as slow:
        await slow.until_indexed(fleet.truth())

        async def waits(self: DurableEvents, pulled: Any) -> Any:
            if self is slow.durable:
                has_stopped.set()
                await held.wait()
            return await fetch(self, pulled)

        monkeypatch.setattr(DurableEvents, "_fetch", waits)
        async with asyncio.timeout(TIMEOUT_S):
            await has_stopped.wait()  # Its last fetch has ended.
        await fleet.work(40)
        async with router_of(fleet) as quick:
            await quick.until_indexed(fleet.truth())
            await quick.until_messages(121)
            assert await quick.messages() >= 120, "what the slow one has not read is there"
            held.set()
            await slow.until_indexed(fleet.truth())


async def test_late_snapshot_is_ignored(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = SnapshotStore.commit
    late: list[ObjectInfo] = []

    async def after_another(self: SnapshotStore, info: ObjectInfo, version: int) -> None:
        if not late:
            late.append(info)
            await self._context.publish(self._meta, b'{"name":"radix-state","bucket":"b","nuid":"n"}')
        await commit(self, info, version)

    monkeypatch.setattr(SnapshotStore, "commit", after_another)
    await fleet.work(40)
    async with router_of(fleet) as router:
        await router.until_messages(THRESHOLD)
        assert "Failed to upload snapshot" in caplog.text
        assert "another router's snapshot was committed first" in caplog.text
        store = SnapshotStore(router.durable._context(), fleet.endpoint)
        pieces = await pieces_of(router, store)
        assert pieces is not None
        assert store._pieces_of(late[0].nuid) not in pieces, "what was sent in vain is deleted"
        await router.until_indexed(fleet.truth())


async def test_router_resets_durable_state_when_configured(fleet: Fleet) -> None:
    await fleet.work(40)
    async with router_of(fleet) as router:
        await router.until_messages(THRESHOLD)
    async with router_of(fleet, resets=True) as router:
        async with asyncio.timeout(TIMEOUT_S):
            await router.durable.caught_up()
        assert router.indexed_blocks() == {}
        assert await router.messages() == 0


async def test_restarted_server_loses_no_event(
    fleet: Fleet, server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.work(40)
    async with router_of(fleet, threshold=100_000) as router:
        await router.until_indexed(fleet.truth())
        server.kill()
        for worker in fleet.workers:
            worker.work(30)
        server.start()
        await router.until_indexed(fleet.truth())
        await fleet.work(10)
        await router.until_indexed(fleet.truth())
    assert "retrying" in caplog.text


async def test_router_queries_workers_for_events_missing_from_the_stream(fleet: Fleet) -> None:
    async with AsyncExitStack() as opened:
        runtime = DistributedRuntime()
        opened.push_async_callback(runtime.shutdown)
        stream = stream_of(runtime, fleet.endpoint)
        opened.push_async_callback(stream.close)
        source = KvEventSource(runtime.endpoint(str(fleet.endpoint)), runtime.instance_id, 0, stream)
        opened.push_async_callback(source.close)
        source.put(Stored(None, None, [StoredBlock(1, 11), StoredBlock(2, 12)]))
        source.flush()
        stream._unsent.clear()  # Lost: the server never receives it.
        stream.start()
        await source.open()
        truth = {runtime.instance_id: {1, 2}}
        async with router_of(fleet) as router:
            await router.until_indexed(truth)
            source.put(Stored(2, None, [StoredBlock(3, 13)]))
            source.put(Removed([3]))
            source.put(Stored(2, None, [StoredBlock(4, 14)]))
            truth[runtime.instance_id] = {1, 2, 4}
            await router.until_indexed(truth)


async def test_router_shutdown_is_bounded_and_removes_its_consumer(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, send = asyncio.Event(), SnapshotStore.send_piece

    async def stuck(self: SnapshotStore, subject: str, piece: bytes) -> None:
        await send(self, subject, piece)
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(kv_durable, "UPLOAD_SHUTDOWN_S", 0.2)
    await fleet.work(40)
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotStore, "send_piece", stuck)
        async with router_of(fleet) as router:
            async with asyncio.timeout(TIMEOUT_S):
                await begun.wait()
            async with asyncio.timeout(TIMEOUT_S):
                await router.kv.close()
            assert router.durable._upload is not None
            assert router.durable._upload.done()
    async with router_of(fleet) as router:
        await router.until_messages(THRESHOLD)
        await router.until_indexed(fleet.truth())
        store = SnapshotStore(router.durable._context(), fleet.endpoint)
        async with asyncio.timeout(TIMEOUT_S):
            while len(await pieces_of(router, store) or {}) != 1:  # noqa: ASYNC110 - the server sets no event
                await asyncio.sleep(0.05)


async def test_python_engine_publishes_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DURABLE_KV_EVENTS", "1")
    endpoint = EndpointId.parse(f"durable.c{next(SERVICE)}.generate")
    runtime = DistributedRuntime()
    publisher = KvEventPublisher(runtime.endpoint(str(endpoint)), kv_block_size=4, enable_local_indexer=True)
    try:
        publisher.publish_stored(list(range(12)), [4, 4, 4], [1, 2, 3])
        publisher.publish_removed([3])
        truth = {runtime.instance_id: {1, 2}}
        router = Router(endpoint)
        await router.kv.start()
        try:
            await router.until_indexed(truth)
            assert await router.messages() == 2
        finally:
            await router.kv.close()
            await router.runtime.shutdown()
    finally:
        publisher.shutdown()
        assert publisher.closing is not None
        await publisher.closing
        await runtime.shutdown()
