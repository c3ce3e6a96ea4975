"""KV events across implementations: the released router indexes our caches, and ours reads and queries its mocker's.

The released router subscribes to a publisher only where an event source is registered for it, begins with the full
state of the source, and queries it again when an event number is missing (docs/kv-events.md).
"""

import asyncio
import contextlib
import os
import re
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.corpus import bench_model
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.etcd import EtcdCluster
from tests.cluster.nats import NatsServer
from tests.cluster.peers import require_peer

from dynamo.backend.worker import EngineWorker
from dynamo.core.codec import json_decode, msgpack_decode
from dynamo.core.config import load
from dynamo.kv_events.held_blocks import CachedBlocks
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.engine import MockerEngine
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId, EventSource
from dynamo.protocols.kv_events import KvSourceAnswer, KvSourceQuery, Removed, WorkerKvEvent
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, Publisher, Subscriber
from dynamo.runtime.event_plane.zmq import ZmqEventPlane

pytestmark = pytest.mark.conformance

BLOCK = 16
TIMEOUT_S = 60.0
POLL_S = 0.05
KV_ROUTER = ("--router-mode", "kv")
SMALL_CACHE = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "96")


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


class Answer:
    """Routing data that the frontend returns for one chat."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.cached_tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.worker_id: int = body["nvext"]["worker_id"]["decode_worker_id"]
        self.hit_rate: float = body["nvext"]["timing"]["kv_hit_rate"]


def prompt(number: int) -> str:
    """Return a long prompt that shares only the template's prefix with other numbers."""
    return " ".join(f"{number} item {number * 1000 + word}" for word in range(20))


def chat(stack: Stack, number: int, worker: int | None = None) -> Answer:
    return chat_about(stack, prompt(number), worker)


def chat_about(stack: Stack, content: str, worker: int | None = None) -> Answer:
    """Send a prompt, to a worker of the router's choice or to the named one."""
    named = {} if worker is None else {"backend_instance_id": worker}
    status, body = stack.send_request(
        "POST",
        "/v1/chat/completions",
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 2,
            "nvext": {"extra_fields": ["worker_id", "timing"], **named},
        },
    )
    assert status == 200, body
    return Answer(body)


def applied(metrics: str) -> dict[tuple[str, str], int]:
    """Return the number of events that the released router applied, by type and status."""
    counts: dict[tuple[str, str], int] = {}
    for line in metrics.splitlines():
        if line.startswith("dynamo_component_kv_cache_events_applied{"):
            kind, status = re.findall(r'(?:event_type|status)="(\w+)"', line)
            counts[kind, status] = counts.get((kind, status), 0) + int(float(line.rsplit(" ", 1)[1]))
    return counts


def metrics(stack: Stack) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{stack.port}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def until_known(stack: Stack, number: int, worker: int | None = None) -> None:
    """Send a prompt to its worker until the router has its blocks, and with them that worker's earlier events.

    A prompt that the router may choose the worker of could be cached by several.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while chat(stack, number, worker).hit_rate <= 0.9:
        assert time.monotonic() < deadline, "the event does not arrive"
        time.sleep(POLL_S)


# Their router, our workers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["files and ZMQ", "etcd and NATS"])
def two_workers(peer: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with contextlib.ExitStack() as open_servers:
        variables = {}
        if request.param == "etcd and NATS":
            etcd = open_servers.enter_context(EtcdCluster(tmp_path_factory.mktemp("etcd")))
            nats = open_servers.enter_context(NatsServer(tmp_path_factory.mktemp("nats")))
            variables = {
                "DYN_DISCOVERY_BACKEND": "etcd",
                "ETCD_ENDPOINTS": etcd.wait().endpoints,
                "DYN_EVENT_PLANE": "nats",
                "NATS_SERVER": nats.url,
            }
        yield open_servers.enter_context(Stack(kv_recipe(peer, variables), bench_model()))


def kv_recipe(peer: str, variables: dict[str, str]) -> Recipe:
    return Recipe(
        name="kv",
        frontend=theirs(peer),
        engine=ours(),
        workers=2,
        frontend_flags=KV_ROUTER,
        engine_flags=SMALL_CACHE,
        variables=variables,
    )


def test_released_router_sends_a_prompt_to_our_worker_that_caches_it(two_workers: Stack) -> None:
    first = {number: chat(two_workers, number) for number in range(1, 5)}
    for number, answer in first.items():
        until_known(two_workers, number, answer.worker_id)
    again = {number: chat(two_workers, number) for number in first}
    for number, answer in again.items():
        assert answer.worker_id == first[number].worker_id
        assert answer.hit_rate > 0.9, "the router must know the whole prompt"
        assert answer.cached_tokens >= 5 * BLOCK


def test_released_router_applies_stored_and_removed_events_of_our_workers(two_workers: Stack) -> None:
    until_known(two_workers, 5, chat(two_workers, 5).worker_id)
    assert chat(two_workers, 5).hit_rate > 0.9
    later = {number: chat(two_workers, number).worker_id for number in range(100, 140)}
    last = {worker: number for number, worker in later.items()}
    assert len(last) == 2
    for worker, number in last.items():
        until_known(two_workers, number, worker)
    counts = applied(metrics(two_workers))
    assert counts["stored", "ok"] > 40
    assert counts["removed", "ok"] > 0
    assert {key: count for key, count in counts.items() if key[1] != "ok" and count} == {}
    assert chat(two_workers, 5).hit_rate < 0.5, "the router must know that it was evicted"


class LossyPlane(ZmqEventPlane):
    """Event plane that drops the messages of one topic while enabled."""

    def __init__(self, discovery: Discovery) -> None:
        super().__init__(discovery)
        self.loses = ""
        self.lost = 0

    async def publisher(self, endpoint: EndpointId, topic: str) -> Any:
        return LossyPublisher(self, await super().publisher(endpoint, topic), topic)


class LossyPublisher:
    """Publisher of a `LossyPlane`."""

    def __init__(self, plane: LossyPlane, inner: Publisher, topic: str) -> None:
        self.id = inner.id
        self._plane = plane
        self._inner = inner
        self._topic = topic

    def publish(self, payload: bytes) -> None:
        if self._plane.loses == self._topic:
            self._plane.lost += 1
        else:
            self._inner.publish(payload)

    async def close(self) -> None:
        await self._inner.close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Discovery directory of this process and a stack."""
    variables = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_EVENT_PLANE_HOST": HOST,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


@contextlib.asynccontextmanager
async def stack_of(recipe: Recipe) -> AsyncIterator[Stack]:
    """Run a stack, which starts and stops in a thread, because this process's loop may have to serve it."""
    stack = Stack(recipe, bench_model())
    try:
        await asyncio.to_thread(stack.__enter__)
        yield stack
    finally:
        await asyncio.to_thread(stack.close)


def lone_router(peer: str, registry: dict[str, str]) -> Recipe:
    """Run the released frontend for workers that are not of its stack."""
    return Recipe(
        name="router", frontend=theirs(peer), engine=ours(), workers=0, frontend_flags=KV_ROUTER, variables=registry
    )


@contextlib.asynccontextmanager
async def mocker_here(runtime: DistributedRuntime, *flags: str) -> AsyncIterator[EngineWorker]:
    """Run our mocker in this process, for access to its state."""
    what = ["--model-path", bench_model(), "--model-name", MODEL_NAME, "--speedup-ratio", "0"]
    config = load(MockerConfig, [*what, *flags], {})
    worker = EngineWorker(config, MockerEngine(config), runtime)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.stop(drain_s=0.0)


def questions(runtime: DistributedRuntime) -> int:
    """Return the number of queries from routers to our sources."""
    lines = runtime.metrics.render().splitlines()
    found = [line for line in lines if line.startswith("dynamo_component_requests_total{") and "kv_query" in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in found)


async def until_requested(runtime: DistributedRuntime, times: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while questions(runtime) < times:  # noqa: ASYNC110 - another process asks
            await asyncio.sleep(0.02)
    assert questions(runtime) == times


@pytest.mark.parametrize("ranks", [1, 2])
async def test_released_router_recovers_lost_events_from_our_worker(
    peer: str, registry: dict[str, str], ranks: int
) -> None:
    runtime = DistributedRuntime(event_plane=LossyPlane)
    plane = runtime.event_plane
    assert isinstance(plane, LossyPlane)

    def query_count() -> int:
        return questions(runtime)

    flags = ("--block-size", str(BLOCK), "--data-parallel-size", str(ranks))
    async with mocker_here(runtime, *flags), stack_of(lone_router(peer, registry)) as stack:
        await until_requested(runtime, ranks)  # A router begins with the full state of each source.
        await asyncio.to_thread(until_known, stack, 1)
        assert query_count() == ranks

        plane.loses = "kv-events"
        lost = [2, 3, 4]
        for number in lost:
            await asyncio.to_thread(chat, stack, number)
        assert plane.lost >= len(lost)
        rates = [(await asyncio.to_thread(chat, stack, number)).hit_rate for number in lost]
        assert max(rates) < 0.5, "the router must not know of what it never heard"
        assert query_count() == ranks

        plane.loses = ""
        for number in range(5, 5 + 4 * ranks):  # So that each rank has an event.
            await asyncio.to_thread(chat, stack, number)
        async with asyncio.timeout(TIMEOUT_S):
            while min([(await asyncio.to_thread(chat, stack, one)).hit_rate for one in lost]) < 0.9:  # noqa: ASYNC110 - asked
                await asyncio.sleep(0.1)
        assert ranks < query_count() <= 2 * ranks


async def test_released_router_that_starts_late_loads_the_cached_blocks_of_our_worker(
    peer: str, registry: dict[str, str]
) -> None:
    runtime = DistributedRuntime()
    async with mocker_here(runtime, *SMALL_CACHE):
        async with stack_of(lone_router(peer, registry)) as early:
            for number in range(20):
                await asyncio.to_thread(chat, early, number)
        assert questions(runtime) == 1
        async with stack_of(lone_router(peer, registry)) as late:
            await until_requested(runtime, 2)
            # The router applies the state after it has received it. Chats about cached prompts cause no event.
            for number in (19, 18):
                await asyncio.to_thread(until_known, late, number)
            assert (await asyncio.to_thread(chat, late, 0)).hit_rate < 0.5, "it was evicted"


async def test_released_router_reads_a_dump_with_more_chains_than_events(peer: str, registry: dict[str, str]) -> None:
    runtime = DistributedRuntime()
    forks = [" ".join([*(prompt(one) for one in range(depth)), prompt(100 + depth)]) for depth in (4, 3, 2, 1)]
    async with mocker_here(runtime, "--block-size", str(BLOCK)) as worker:
        async with stack_of(lone_router(peer, registry)) as early:
            for fork in forks:
                await asyncio.to_thread(chat_about, early, fork)
        dump = worker.kv_sources[0].holdings.dump()
        assert len(dump) > worker.kv_sources[0].holdings.last_event_id
        async with stack_of(lone_router(peer, registry)) as late:
            await until_requested(runtime, 2)
            async with asyncio.timeout(TIMEOUT_S):
                for fork in forks:
                    # The router applies the state after it has received it.
                    while (await asyncio.to_thread(chat_about, late, fork)).hit_rate <= 0.9:  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)


async def test_released_router_follows_kv_events_of_our_cpu_engine(peer: str, registry: dict[str, str]) -> None:
    environment = {**os.environ, **registry, "DYN_LOG": "error"}
    command = [sys.executable, "-m", "dynamo.cpu", "--model-name", MODEL_NAME, "--discovery-backend", "file"]
    engine = await asyncio.create_subprocess_exec(*command, "--block-size", str(BLOCK), env=environment)
    try:
        async with stack_of(lone_router(peer, registry)) as stack:
            first = await asyncio.to_thread(chat, stack, 7)
            await asyncio.to_thread(until_known, stack, 7)
            again = await asyncio.to_thread(chat, stack, 7)
            assert (first.hit_rate < 0.5, again.hit_rate > 0.9) == (True, True)
            assert again.cached_tokens >= 5 * BLOCK
            assert {status for (_, status), count in applied(metrics(stack)).items() if count} == {"ok"}
    finally:
        engine.terminate()
        assert await asyncio.wait_for(engine.wait(), TIMEOUT_S) == 0


# Their workers, our side -----------------------------------------------------------------------------------------


def held_after(events: Iterable[WorkerKvEvent]) -> dict[int, int]:
    """Return the remaining blocks, by hash, after some events."""
    held: dict[int, int] = {}
    for worker_event in events:
        data = worker_event.event.data
        if data == "cleared":
            held.clear()
        elif isinstance(data.removed, Removed):
            for block_hash in data.removed.block_hashes:
                held.pop(block_hash, None)
        elif data.stored is not None:
            held.update((block.block_hash, block.tokens_hash) for block in data.stored.blocks)
    return held


async def receive_events(subscriber: Subscriber, last_event_id: int) -> list[WorkerKvEvent]:
    """Return the received events up to that id."""
    received: list[WorkerKvEvent] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for event in subscriber:
            assert isinstance(event, Event)
            received += msgspec.convert(msgpack_decode(event.payload), list[WorkerKvEvent])
            if received[-1].event.event_id >= last_event_id:
                break
    return received


async def test_our_subscriber_reads_released_kv_events_and_recovers_missed_ones(
    peer: str, registry: dict[str, str]
) -> None:
    recipe = Recipe(
        name="theirs",
        frontend=theirs(peer),
        engine=theirs(peer),
        frontend_flags=KV_ROUTER,
        engine_flags=SMALL_CACHE,
        variables=registry,
    )
    async with stack_of(recipe) as stack:
        runtime = DistributedRuntime()
        await asyncio.to_thread(chat, stack, 1)  # Before the subscription.
        subscriber = await runtime.event_plane.subscriber(EndpointId.parse("dynamo.backend.generate"), "kv-events")
        (record,) = (await runtime.discovery.snapshot(EVENT_SOURCES)).values()
        source = msgspec.json.decode(record, type=EventSource)
        assert json_decode(record) == msgspec.to_builtins(source), "our record must have all that theirs has"
        target, whose = source.metadata.recovery_target, source.metadata.worker
        client = await runtime.endpoint(str(target.endpoint_id)).client()
        await client.wait_for_instances(TIMEOUT_S)

        async def send_request(start: int | None) -> KvSourceAnswer:
            query = msgspec.to_builtins(KvSourceQuery(whose.worker_id, whose.dp_rank, start))
            (answer,) = [one async for one in await client.direct(query, target.instance_id, annotated=False)]
            return msgspec.convert(answer, KvSourceAnswer)

        before = await send_request(None)
        assert before.dump is not None
        for number in range(2, 30):
            await asyncio.to_thread(chat, stack, number)
        after = await send_request(None)
        assert after.dump is not None
        received = await receive_events(subscriber, after.dump.last_event_id)
        assert received[0].event.event_id > 1, "we began to listen too late for the first"

        missed = await send_request(1)
        assert missed.events is not None
        whole = missed.events.events
        assert [worker_event.event.event_id for worker_event in whole] == list(
            range(1, missed.events.last_event_id + 1)
        )
        assert received == whole[-len(received) :]
        assert held_after(whole) == held_after(after.dump.events)
        assert len(held_after(whole)) > len(held_after(before.dump.events))

        ours_of_theirs = CachedBlocks(whose.worker_id, whose.dp_rank)
        for worker_event in whole:
            ours_of_theirs.apply(worker_event)
        assert ours_of_theirs.held() == held_after(whole)
        await runtime.shutdown()
