"""NATS killed and stopped: open responses continue, new requests fail in time with the right error, and recovery is
used.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.nats import NatsServer
from tests.cluster.processes import wait_until
from tests.settle import turns, until

from dynamo.core.errors import CannotConnect, ConfigError, ConnectionTimeout, Disconnected, WorkerUnavailable
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.event_plane.nats import NatsEventPlane, NatsPublisher, NatsSubscriber
from dynamo.runtime.request_plane.base import Item, Reply, Request
from dynamo.runtime.request_plane.nats import NatsPlane
from dynamo.runtime.request_plane.tcp.common import TcpOptions
from dynamo.runtime.transports.nats import outbox
from dynamo.runtime.transports.nats.connection import NatsConnection
from dynamo.runtime.transports.nats.options import NatsOptions

pytestmark = pytest.mark.integration

DEADLINE_S = 30.0
ENDPOINT = "ns.comp.generate"
AWAY_S = 3.0  # How long a request waits for an absent server in these tests: well above what a busy machine adds.
PING_S = 1.0  # A server without a response to two pings counts as gone; only for tests in which it is.
PATIENT_S = 60.0  # Timeouts that no test waits for.
TURNS = 50  # Of the event loop; what needs more of them waits for a timer or a socket.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as running:
        yield running


@pytest.fixture
def options(server: NatsServer) -> NatsOptions:
    """Return options with short timeouts; a closed connection shows that the server is gone, pings do not."""
    return NatsOptions(
        server=server.url,
        startup_timeout_s=DEADLINE_S,
        connect_timeout_s=AWAY_S,
        request_timeout_s=AWAY_S,
        ping_interval_s=PATIENT_S,
    )


class ReceivedOutput:
    """A receiver that records every message."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def on_token(self, token_id: int) -> None:
        self.tokens += 1

    def on_item(self, item: Item) -> None:
        self.tokens += 1

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.ended.set_result(error)


class Pair:
    """A worker and a caller, each with its own connection to the server."""

    def __init__(self, options: NatsOptions) -> None:
        self.replies: asyncio.Queue[Reply] = asyncio.Queue(maxsize=100)
        store = MemoryStore()
        self.worker, self.caller = (
            DistributedRuntime(
                None,
                MemoryDiscovery(store),
                lambda dispatcher, registry: NatsPlane(dispatcher, options, TcpOptions(host="127.0.0.1"), registry),
                event_plane="mem",
            )
            for _ in range(2)
        )

    async def start(self) -> None:
        await self.worker.endpoint(ENDPOINT).serve(self.handle)
        self.client = await self.caller.endpoint(ENDPOINT).client()
        await self.client.wait_for_instances(DEADLINE_S)

    def handle(self, request: Request, reply: Reply) -> None:
        self.replies.put_nowait(reply)

    async def send(self) -> ReceivedOutput:
        received = ReceivedOutput()
        await self.client.send(b"\x80", received, request_id="r")
        return received

    async def reply(self) -> Reply:
        return await asyncio.wait_for(self.replies.get(), DEADLINE_S)

    async def answers(self) -> None:
        """Send one request and wait for its end."""
        received = await self.send()
        reply = await self.reply()
        reply.token(1)
        reply.finish()
        assert await asyncio.wait_for(received.ended, DEADLINE_S) is None
        assert received.tokens == 1

    async def heals(self) -> None:
        """Wait until requests succeed again after both ends have detected that the server is back."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    received = await self.send()
                except WorkerUnavailable:
                    await asyncio.sleep(0.02)
                    continue
                getting = asyncio.ensure_future(self.replies.get())
                await asyncio.wait({getting, received.ended}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    getting.result().finish()
                    assert await received.ended is None
                    return
                getting.cancel()

    async def fails(self, kind: type[Exception]) -> float:
        """Send one request that no worker can receive; return the seconds until its error."""
        began = time.monotonic()
        try:
            error = await asyncio.wait_for((await self.send()).ended, DEADLINE_S)
        except WorkerUnavailable as raised:
            error = raised
        assert isinstance(error, kind)
        assert isinstance(error, WorkerUnavailable) and error.retry_elsewhere
        return time.monotonic() - began


@asynccontextmanager
async def running(options: NatsOptions) -> AsyncIterator[Pair]:
    made = Pair(options)
    try:
        await made.start()
        yield made
    finally:
        await made.caller.shutdown()
        await made.worker.shutdown()


@pytest.fixture
async def pair(options: NatsOptions) -> AsyncIterator[Pair]:
    async with running(options) as made:
        yield made


async def in_thread(act: Callable[[], Any]) -> None:
    """Run in a thread, while the loop continues."""
    await asyncio.to_thread(act)


# Requests --------------------------------------------------------------------------------------------------------


async def test_killed_server_keeps_open_streams_and_fails_new_requests_in_time(pair: Pair, server: NatsServer) -> None:
    open_answer = await pair.send()
    reply = await pair.reply()
    reply.token(1)
    await in_thread(server.kill)
    assert await pair.fails(WorkerUnavailable) < 2 * AWAY_S
    await asyncio.sleep(AWAY_S)
    second = asyncio.ensure_future(pair.fails(CannotConnect))
    await turns(TURNS)
    assert second.done(), "the second waits for a server that is known to be away"
    await second
    reply.token(2)
    reply.finish()
    assert await asyncio.wait_for(open_answer.ended, DEADLINE_S) is None
    await in_thread(server.start)
    await pair.heals()
    await pair.answers()


@pytest.fixture
async def watchful(options: NatsOptions) -> AsyncIterator[Pair]:
    """Return a pair that pings the server often."""
    async with running(replace(options, ping_interval_s=PING_S)) as made:
        yield made


async def test_paused_server_is_detected_and_used_after_it_resumes(watchful: Pair, server: NatsServer) -> None:
    pair = watchful
    open_answer = await pair.send()
    reply = await pair.reply()
    await in_thread(server.pause)
    assert await pair.fails(WorkerUnavailable) < 3 * AWAY_S
    reply.token(2)
    reply.finish()
    assert await asyncio.wait_for(open_answer.ended, DEADLINE_S) is None
    await in_thread(server.resume)
    await pair.heals()
    await pair.answers()


@pytest.fixture
async def patient(options: NatsOptions) -> AsyncIterator[Pair]:
    """Return a pair with long timeouts: the faults below are shorter."""
    async with running(replace(options, request_timeout_s=PATIENT_S)) as made:
        await made.answers()
        yield made


async def test_short_pause_of_the_server_only_delays_requests(patient: Pair, server: NatsServer) -> None:
    await in_thread(server.pause)
    received = await patient.send()
    await asyncio.sleep(0.1)
    assert patient.replies.empty()
    await in_thread(server.resume)
    (await patient.reply()).finish()
    assert await asyncio.wait_for(received.ended, DEADLINE_S) is None


async def test_request_in_flight_ends_at_once_when_the_server_is_killed(patient: Pair, server: NatsServer) -> None:
    await in_thread(server.pause)
    received = await patient.send()
    await asyncio.sleep(0.05)
    assert not received.ended.done()
    killing = asyncio.create_task(in_thread(server.kill))
    assert isinstance(await asyncio.wait_for(received.ended, DEADLINE_S), Disconnected), "it waits for its timeout"
    await killing


async def test_request_to_an_unresponsive_worker_times_out(server: NatsServer, options: NatsOptions) -> None:
    silent = NatsConnection(options, "silent")
    async with running(options) as pair:
        try:
            await silent.start()
            [instance] = pair.client.instances()
            assert isinstance(pair.worker.request_plane, NatsPlane)
            await pair.worker.request_plane._worker.refuse()
            await silent.subscribe(instance.transport.nats_tcp or "", lambda _: None)
            assert AWAY_S / 2 < await pair.fails(ConnectionTimeout) < DEADLINE_S
        finally:
            await silent.close()


# Startup -------------------------------------------------------------------------------------------------------


async def test_processes_wait_for_a_server_that_starts_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = NatsServer(tmp_path)
    plane = NatsConnection(NatsOptions(server=server.url, startup_timeout_s=PATIENT_S), "request_plane")
    starting = asyncio.create_task(plane.start())
    try:
        await until(lambda: "not connected to NATS" in caplog.text, "no message names the server")
        assert f"not connected to NATS at {server.url} (NATS_SERVER)" in caplog.text
        await in_thread(server.start)
        await asyncio.wait_for(starting, DEADLINE_S)
        assert plane.is_up
    finally:
        starting.cancel()
        await plane.close()
        server.close()


async def test_missing_server_is_an_error_of_one_line(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    runtime = DistributedRuntime(
        None,
        "mem",
        lambda dispatcher, _: NatsPlane(dispatcher, NatsOptions(server=server.url, startup_timeout_s=0.2)),
        event_plane="mem",
    )
    try:
        refused = rf"no NATS server at {server.url} \(NATS_SERVER\) within 0.2 s: .*refused"
        with pytest.raises(ConfigError, match=refused):
            await runtime.connect()
    finally:
        await runtime.shutdown()


# Events ----------------------------------------------------------------------------------------------------------


class Events:
    """A publisher and a subscriber, each with its own connection to the server."""

    def __init__(self, options: NatsOptions) -> None:
        store = MemoryStore()
        self.registries = [MemoryDiscovery(store), MemoryDiscovery(store)]
        self.planes = [NatsEventPlane(registry, options) for registry in self.registries]

    async def start(self) -> tuple[NatsPublisher, NatsSubscriber]:
        endpoint = EndpointId.parse(ENDPOINT)
        subscriber = await self.planes[0].subscriber(endpoint, "kv-events")
        return await self.planes[1].publisher(endpoint, "kv-events"), subscriber

    async def close(self) -> None:
        for plane in self.planes:
            await plane.close()
        for registry in self.registries:
            await registry.close()


@pytest.fixture
async def events(options: NatsOptions) -> AsyncIterator[Events]:
    made = Events(options)
    yield made
    await made.close()


async def take(subscriber: NatsSubscriber) -> Event:
    event = await asyncio.wait_for(anext(subscriber), DEADLINE_S)
    assert isinstance(event, Event)
    return event


async def test_every_event_of_an_outage_is_received_or_counted_as_missed(events: Events, server: NatsServer) -> None:
    publisher, subscriber = await events.start()
    publisher.publish(b"before")
    assert (await take(subscriber)).payload == b"before"
    await in_thread(server.kill)
    for _ in range(1000):
        publisher.publish(b"during")  # Would never return if it waited for the server.
    await in_thread(server.start)
    accounted = 1
    async with asyncio.timeout(DEADLINE_S):
        while accounted < 1001:
            publisher.publish(b"after")
            waiting = asyncio.ensure_future(anext(subscriber))
            await asyncio.wait({waiting}, timeout=0.05)
            if not waiting.done():
                waiting.cancel()
                continue
            event = waiting.result()
            assert isinstance(event, Event)
            accounted = event.sequence + 1
    assert publisher.dropped == 0


async def test_publisher_drops_excess_events_of_an_outage_and_reports_a_gap(
    events: Events, server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = await events.start()
    await in_thread(server.kill)
    publisher_nats, subscriber_nats = events.planes[1]._nats, events.planes[0]._nats
    async with asyncio.timeout(DEADLINE_S):
        while publisher_nats.is_up or subscriber_nats.is_up:  # noqa: ASYNC110 - the outage triggers no event
            await asyncio.sleep(0.01)
    monkeypatch.setattr(outbox, "UNSENT_MAX", 10)
    for _ in range(30):
        publisher.publish(b"x")
    assert publisher.dropped == 20
    assert "events of topic kv-events" in caplog.text
    monkeypatch.undo()
    publisher_nats._outbox.drop_all()  # Queued messages are lost too: only the gap remains to detect it.
    await in_thread(server.start)
    async with asyncio.timeout(DEADLINE_S):
        while not subscriber_nats.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    publisher.publish(b"after")
    assert await take(subscriber) == Event(publisher.id, 30, b"after", missed=30)


async def test_paused_server_does_not_block_a_publisher(events: Events, server: NatsServer) -> None:
    publisher, subscriber = await events.start()
    await in_thread(server.pause)
    for _ in range(200):
        publisher.publish(bytes(100_000))  # Would never return if it waited for the server.
        await asyncio.sleep(0)
    await in_thread(server.resume)
    publisher.publish(b"after")
    async with asyncio.timeout(DEADLINE_S):
        while (event := await anext(subscriber)) and isinstance(event, Event) and event.payload != b"after":
            pass
    assert event.sequence == 200  # type: ignore[union-attr]


# Processes -------------------------------------------------------------------------------------------------------

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}
LONG_CHAT = {
    **CHAT,
    "max_tokens": 1500,
    "stream_options": {"include_usage": True},
}  # Eight and a half seconds at the mocker's default speed.


@pytest.fixture
def cluster(tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A frontend and a worker, over files, requests and events through the server."""
    monkeypatch.setenv("NATS_SERVER", server.url)
    monkeypatch.setenv("DYN_REQUEST_PLANE", "nats")
    monkeypatch.setenv("DYN_EVENT_PLANE", "nats")
    with Cluster(tmp_path) as made:
        wait_until(made.is_live, "the frontend never came up")
        made.mocker()
        yield made


def is_answered(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n") and '"error":' not in answer.text


class OpenAnswer:
    """Long streamed response, read in a thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.text = ""
        self._url = f"http://127.0.0.1:{cluster.port}/v1/chat/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: "content" in self.text, "the answer never began")

    def _read(self) -> None:
        with httpx.Client(timeout=30) as client, client.stream("POST", self._url, json=LONG_CHAT) as answer:
            for text in answer.iter_text():
                self.text += text

    def tokens(self) -> int:
        return self.text.count('"content":"')

    def is_open(self) -> bool:
        return "[DONE]" not in self.text

    def ended(self) -> str:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the answer never ended"
        return self.text


@pytest.mark.parametrize(("fault", "repair"), [("kill", "start"), ("pause", "resume")])
def test_graph_survives_a_restart_of_its_server(cluster: Cluster, server: NatsServer, fault: str, repair: str) -> None:
    assert is_answered(cluster.post(CHAT))
    answer = OpenAnswer(cluster)
    getattr(server, fault)()
    before = answer.tokens()
    wait_until(lambda: answer.tokens() > before, "the open answer stands still")
    assert answer.is_open(), "it ended before it could be harmed"
    began = time.monotonic()
    refused = cluster.post(CHAT)
    assert refused.status_code >= 500 or '"error":' in refused.text
    assert time.monotonic() - began < 15, "a request hangs while the server is away"
    assert '"error":' not in answer.ended()
    assert '"completion_tokens":1500' in answer.text
    getattr(server, repair)()
    wait_until(lambda: is_answered(cluster.post(CHAT)), "nothing is answered although the server is back")
    assert cluster.is_live()


def test_process_reports_the_server_it_waits_for_and_exits_with_one_line(tmp_path: Path) -> None:
    absent = NatsServer(tmp_path)
    variables = {"NATS_SERVER": absent.url, "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.5"}
    with Cluster(tmp_path) as cluster:
        for module, argv in (("mocker", ["--model-name", "m"]), ("frontend", ["--http-port", "0"])):
            process = cluster.run(module, "--request-plane", "nats", *argv, **variables)
            assert process.wait(60) == 2
            log = (tmp_path / f"{module}{len(cluster.processes) - 1}.log").read_text()
            assert f"not connected to NATS at {absent.url} (NATS_SERVER)" in log
            assert log.splitlines()[-1].startswith(f"error: no NATS server at {absent.url} (NATS_SERVER) within 0.5 s")
            assert "Traceback" not in log


def test_killed_worker_fails_no_request(cluster: Cluster) -> None:
    """The record outlives the worker by seconds; the server reports at once that there are no subscribers."""
    second = cluster.mocker()
    assert all(is_answered(cluster.post(CHAT)) for _ in range(4))
    second.kill()
    assert second.wait(10) == -signal.SIGKILL
    assert cluster.workers() == 2, "its record went before it could harm"
    began = time.monotonic()
    assert all(is_answered(cluster.post(CHAT)) for _ in range(10))
    assert time.monotonic() - began < 8, "the dead worker was waited for"
