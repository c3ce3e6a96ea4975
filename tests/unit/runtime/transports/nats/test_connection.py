"""NATS connection with a fake client library."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.settle import turns, until

from dynamo.core.errors import CannotConnect, ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.transports.nats import connection as module
from dynamo.runtime.transports.nats import outbox
from dynamo.runtime.transports.nats.connection import NatsConnection, load_client
from dynamo.runtime.transports.nats.options import NatsOptions

TIMEOUT_S = 5.0


class FakeServer:
    """Server of all fake clients."""

    def __init__(self) -> None:
        self.is_there = True
        self.error: Exception = OSError(111, "refused")
        self.clients: list[FakeClient] = []
        self.sent: list[tuple[str, bytes]] = []
        self.reported: list[str] = []
        self.registry = MetricsRegistry()
        self.takes = asyncio.Event()
        self.takes.set()


class FakeClient:
    """The library's `Client`, as far as a connection uses it."""

    server: FakeServer

    def __init__(self) -> None:
        self.subjects: dict[str, Callable[[Any], Awaitable[None]]] = {}
        self.is_closed = False
        self.max_payload = 1000
        self.pending_data_size = 0
        self.is_silent = False
        self._pending: list[bytes] = []
        self._pending_data_size = 0
        self._transport = None
        self._ps = SimpleNamespace(buf=b"")
        self.stats: Any = {"in_msgs": 0}
        self.on_error: Any = None

    async def connect(self, servers: list[str], **options: Any) -> None:
        self.on_error = options["error_cb"]
        if not self.server.is_there:
            raise self.server.error
        self.server.clients.append(self)

    async def rtt(self, timeout: float) -> float:  # noqa: ASYNC109 - the library calls it so
        if self.is_silent:
            await asyncio.Event().wait()
        return 0.0

    async def subscribe(self, subject: str, queue: str, cb: Any) -> Any:
        self.subjects[subject] = cb

        async def unsubscribe() -> None:
            del self.subjects[subject]

        return SimpleNamespace(pending_msgs=0, unsubscribe=unsubscribe)

    async def publish(self, subject: str, data: bytes, reply: str, headers: Any) -> None:
        await self.server.takes.wait()
        if self.is_closed:
            raise ConnectionError("closed")
        self.server.sent.append((subject, data))

    async def close(self) -> None:
        self.is_closed = True

    async def breaks(self) -> None:
        self.is_closed = True
        await self.on_error(ConnectionResetError(104, "reset"))


class Growing(dict[str, int]):
    """Counters that have grown whenever they are looked at."""

    looks = 0

    def __getitem__(self, name: str) -> int:
        self.looks += 1
        return self.looks


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return make_server(monkeypatch)


def make_server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    made = FakeServer()
    monkeypatch.setattr(FakeClient, "server", made, raising=False)
    monkeypatch.setattr(module, "load_client", lambda: FakeClient)
    monkeypatch.setattr(module, "BACKOFF_MIN_S", 0.001)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 0.001)
    return made


OPTIONS = NatsOptions(startup_timeout_s=0.1, connect_timeout_s=0.1, ping_interval_s=0.01)


@pytest.fixture
async def nats(server: FakeServer) -> AsyncIterator[NatsConnection]:
    made = NatsConnection(OPTIONS, "test", registry=server.registry, on_down=lambda: server.reported.append("down"))
    await made.start()
    yield made
    await made.close()


async def test_nats_connection_sends_messages_in_order(nats: NatsConnection, server: FakeServer) -> None:
    for number in range(5):
        assert nats.publish("s", b"%d" % number)
    await nats.flush()
    assert server.sent == [("s", b"%d" % number) for number in range(5)]
    assert nats.dropped == 0


async def test_nats_connection_subscribes_again_after_reconnect(nats: NatsConnection, server: FakeServer) -> None:
    received: list[str] = []
    await nats.subscribe("a", received.append)
    await server.clients[0].breaks()
    await until(lambda: len(server.clients) == 2 and nats.is_up)
    await server.clients[1].subjects["a"]("again")
    assert received == ["again"]
    text = server.registry.render()
    assert 'dynamo_transport_nats_outages_total{purpose="test"} 1' in text
    assert 'dynamo_transport_nats_connected{purpose="test"} 1' in text
    assert server.reported == ["down"]


async def test_nats_connection_subscribes_later_during_an_outage(nats: NatsConnection, server: FakeServer) -> None:
    server.is_there = False
    await server.clients[0].breaks()
    await until(lambda: not nats.is_up)
    await nats.subscribe("late", lambda _: None)
    server.is_there = True
    await until(lambda: nats.is_up)
    assert set(server.clients[1].subjects) == {"late"}


async def test_nats_connection_continues_after_a_failing_handler(
    nats: NatsConnection, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    await nats.subscribe("a", lambda _: int("no number"))
    await server.clients[0].subjects["a"](SimpleNamespace())
    assert "handler of a message on a failed" in caplog.text
    assert nats.is_up


async def test_nats_connection_disconnects_from_a_silent_server(nats: NatsConnection, server: FakeServer) -> None:
    server.clients[0].is_silent = True
    await until(lambda: len(server.clients) == 2 and nats.is_up)
    assert server.clients[0].is_closed


async def test_nats_connection_keeps_a_busy_server(nats: NatsConnection, server: FakeServer) -> None:
    """The answer to a ping may wait behind a large message."""
    client = server.clients[0]
    client.stats = Growing(in_msgs=0)
    client.is_silent = True
    await until(lambda: client.stats.looks > 10)
    assert len(server.clients) == 1
    assert nats.is_up


async def test_nats_connection_refuses_requests_during_an_outage(nats: NatsConnection, server: FakeServer) -> None:
    server.takes.clear()
    assert nats.publish("s", b"under way")
    assert nats.publish("s", b"waiting")
    await until(lambda: len(nats._outbox) == 1)
    server.is_there = False
    await server.clients[0].breaks()
    await until(lambda: not nats.is_up)
    assert not nats.publish("s", b"too late")
    server.takes.set()
    server.is_there = True
    await until(lambda: nats.is_up)
    await nats.flush()
    assert server.sent == []
    assert nats.dropped == 3


async def test_nats_connection_buffers_events_during_an_outage(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "UNSENT_MAX", 3)
    server.is_there = False
    nats = NatsConnection(OPTIONS, "test", keeps_unsent=True)
    assert [nats.publish("s", b"%d" % number) for number in range(5)] == [True, True, True, False, False]
    assert nats.dropped == 2
    server.is_there = True
    await nats.start()
    await nats.flush()
    assert server.sent == [("s", b"0"), ("s", b"1"), ("s", b"2")]
    monkeypatch.setattr(outbox, "UNSENT_BYTES_MAX", 10)
    assert not nats.publish("s", bytes(11))
    await nats.close()
    assert not nats.publish("s", b"")


async def test_nats_connection_waits_out_a_short_outage_only(nats: NatsConnection, server: FakeServer) -> None:
    loop = asyncio.get_running_loop()
    server.is_there = False
    await server.clients[0].breaks()
    await until(lambda: not nats.is_up)
    with pytest.raises(CannotConnect, match=r"not connected to NATS at .*: Connection refused"):
        await nats.wait_up()
    began = loop.time()
    with pytest.raises(CannotConnect):
        await nats.wait_up()
    assert loop.time() - began < OPTIONS.connect_timeout_s
    server.is_there = True
    await until(lambda: nats.is_up)
    await nats.wait_up()


async def test_nats_connection_does_not_retry_a_refusal(server: FakeServer) -> None:
    server.is_there = False
    server.error = Exception("nats: 'Authorization Violation'")
    nats = NatsConnection(NatsOptions(startup_timeout_s=1000), "test")
    with pytest.raises(ConfigError, match=r"authorization rejected \(NATS_AUTH_\*\): Authorization Violation"):
        await asyncio.wait_for(nats.start(), TIMEOUT_S)
    await nats.close()


async def test_nats_connection_can_be_closed_twice(nats: NatsConnection, server: FakeServer) -> None:
    await nats.close()
    await nats.close()
    assert server.clients[0].is_closed
    with pytest.raises(CannotConnect):
        await nats.start()


def test_nats_connection_error_without_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats.aio.client", None)
    with pytest.raises(ConfigError, match=r"pip install 'nats-py\[nkeys\]"):
        load_client()


# Random sequences ------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["publish", "subscribe", "unsubscribe", "break", "go", "come", "hold", "take", "settle"]),
    max_size=40,
)


@settings(max_examples=60)
@given(STEPS)
def test_nats_connection_keeps_order_counts_losses_and_resubscribes_after_any_faults(steps: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        server = make_server(patch)
        runner.run(live(server, steps))


async def live(server: FakeServer, steps: list[str]) -> None:
    server.takes.set()
    nats = NatsConnection(OPTIONS, "test", keeps_unsent=True)
    nats.begin()
    published = 0
    subscriptions: list[Any] = []
    for step in steps:
        if step == "publish":
            nats.publish("s", b"%d" % published)
            published += 1
        elif step == "subscribe":
            subscriptions.append(await nats.subscribe(f"subject {published} {len(subscriptions)}", lambda _: None))
        elif step == "unsubscribe" and subscriptions:
            await nats.unsubscribe(subscriptions.pop())
        elif step == "break" and server.clients and not server.clients[-1].is_closed:
            await server.clients[-1].breaks()
        elif step == "go":
            server.is_there = False
        elif step == "come":
            server.is_there = True
        elif step == "hold":
            server.takes.clear()
        elif step == "take":
            server.takes.set()
        elif step == "settle":
            await turns()
    server.is_there = True
    server.takes.set()
    await until(lambda: nats.is_up and not server.clients[-1].is_closed)
    await nats.flush()
    numbers = [int(data) for _, data in server.sent]
    assert numbers == sorted(set(numbers)), "repeated or out of order"
    assert len(numbers) + nats.dropped == published
    assert {one.subject for one in subscriptions} == set(server.clients[-1].subjects)
    await nats.close()
