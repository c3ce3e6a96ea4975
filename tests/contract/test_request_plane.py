"""Contract of request plane transports: both TCP framings, plain and with TLS, and a real NATS server."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.certificates import Certificates

from dynamo.core.codec import decode, encode, json_encode
from dynamo.core.errors import (
    CannotConnect,
    ConnectionTimeout,
    DynamoException,
    HttpError,
    InvalidArgument,
    Unknown,
    WorkerOverloaded,
    WorkerUnavailable,
)
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import RESPONSE_FRAMES, Instance
from dynamo.runtime.config import tcp_options
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Bare, Call, Item, Reply, Request, RequestPlane, Target
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.runtime.request_plane.nats import NatsPlane
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpOptions
from dynamo.runtime.request_plane.tcp.plane import TcpPlane
from dynamo.runtime.request_plane.tcp.tls import TcpTls
from dynamo.runtime.server import Dispatcher, ServeOptions
from dynamo.runtime.transports.nats.options import NatsOptions

PATH = "1f/ns/comp/generate"
TIMEOUT_S = 30.0  # For operations that take milliseconds on an idle machine.
TCP = ["tcp-batched", "tcp-upstream"]
TLS = ["tls-batched", "tls-upstream"]
NATS = pytest.param("nats", marks=pytest.mark.integration)
ALL = ["memory", *TCP, *TLS, NATS]
MESSAGE_BYTES_MAX = 100_000


class ReceivedOutput:
    """Receiver that records every message."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.items: list[Any] = []
        self.order: list[Any] = []
        self.end: Exception | str | None = "open"
        self.changed = asyncio.Event()
        self.done: list[tuple[int, Exception | None]] = []

    def on_token(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.order.append(token_id)
        self.changed.set()

    def on_item(self, item: Item) -> None:
        value = decode(item.data, item.codec) if item.data is not None else None
        # Upstream's framing has no bare tokens: the ready tokens of a tick may arrive as one delta.
        if isinstance(value, dict) and set(value) == {"token_ids", "index"}:
            for token_id in value["token_ids"]:
                self.on_token(token_id)
            return
        self.items.append(value)
        self.order.append(value)
        self.changed.set()

    def on_end(self) -> None:
        assert self.end == "open", "ended twice"
        self.end = None
        self.changed.set()

    def on_error(self, error: Exception) -> None:
        assert self.end == "open", "ended twice"
        assert isinstance(error, DynamoException)
        self.end = error
        self.changed.set()

    def on_done(self, instance_id: int, error: Exception | None) -> None:
        self.done.append((instance_id, error))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ended(self) -> Exception | None:
        await self.until(lambda: self.end != "open")
        assert self.done == [(0x1F, self.end)]
        assert not isinstance(self.end, str)
        return self.end


class Wire:
    """Worker and caller connected by one transport."""

    def __init__(self, kind: str, limits: TcpLimits, nats_url: str = "", tls: TcpTls | None = None) -> None:
        self.kind = kind
        self.tls = tls or TcpTls()
        self.nats_url = nats_url
        self.hub = MemoryHub()
        self.limits = limits
        self.planes: list[RequestPlane] = []
        self.dispatcher = Dispatcher()
        self.replies: list[Reply] = []
        self.requests: list[Request] = []
        self.arrived = asyncio.Event()
        # A port that no other process takes between two listeners.
        self.worker = self.join(self.dispatcher, free_port())
        self.caller = self.join(Dispatcher())

    def join(self, dispatcher: Dispatcher, port: int = 0) -> RequestPlane:
        if self.kind == "memory":
            plane: RequestPlane = MemoryPlane(dispatcher, self.hub)
        elif self.kind == "nats":
            tcp = TcpOptions(host="127.0.0.1", limits=self.limits, tls=self.tls)
            plane = NatsPlane(dispatcher, NatsOptions(server=self.nats_url), tcp, MetricsRegistry())
        else:
            options = TcpOptions(
                host="127.0.0.1",
                port=port,
                speaks_batched=self.kind.endswith("batched"),
                limits=self.limits,
                tls=self.tls,
            )
            plane = TcpPlane(dispatcher, options, MetricsRegistry())
        self.planes.append(plane)
        return plane

    async def start(self) -> None:
        await self.worker.listen()
        await self.worker.open(PATH)

    def handle(self, request: Request, reply: Reply) -> None:
        """Handler that passes the response to the test."""
        self.requests.append(request)
        self.replies.append(reply)
        self.arrived.set()

    def serve(self, handler: Callable[[Request, Reply], None] | None = None, **options: Any) -> Any:
        return self.dispatcher.add(PATH, handler or self.handle, ServeOptions(**options))

    def target(self, path: str = PATH) -> Target:
        instance = Instance(
            component="comp",
            endpoint="generate",
            namespace="ns",
            instance_id=0x1F,
            transport=self.worker.address(path),
            request_plane_codec="msgpack",
            response_frames=RESPONSE_FRAMES if self.worker.speaks_batched else 0,
        )
        return Target.of(instance)

    async def call(self, collected: ReceivedOutput, request: Request | None = None, path: str = PATH) -> Call:
        target = self.target(path)
        await self.caller.connect(target)
        call = self.caller.send(target, request or Request("r1", b"\x80"), collected, collected.on_done)
        assert call is not None
        return call

    async def reply(self) -> Reply:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.replies:
                self.arrived.clear()
                await self.arrived.wait()
        return self.replies.pop(0)


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TcpTls:
    """Return TLS options in which both sides present and verify certificates."""
    return tcp_options(Certificates(tmp_path_factory.mktemp("tls")).variables()).tls


@pytest.fixture(params=ALL)
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    url = request.getfixturevalue("nats_server").url if request.param == "nats" else ""
    tls = request.getfixturevalue("tls") if request.param in TLS else None
    made = Wire(request.param, TcpLimits(message_bytes_max=MESSAGE_BYTES_MAX), url, tls)
    await made.start()
    yield made
    for plane in made.planes:
        await plane.close()


only_tcp = pytest.mark.parametrize("wire", TCP, indirect=True)


# Answers ---------------------------------------------------------------------------------------------------------


async def test_tokens_and_items_arrive_in_order(wire: Wire) -> None:
    wire.serve()
    collected = ReceivedOutput()
    await wire.call(collected)
    reply = await wire.reply()
    expected: list[Any] = []
    for step in range(40):
        reply.token(step)
        expected.append(step)
        if step % 3 == 0:
            item = {"text": f"item {step}"}
            reply.item(item)
            expected.append(item)
        if step % 7 == 0:
            await asyncio.sleep(0)
    reply.finish()
    assert await collected.ended() is None
    assert collected.order == expected


async def test_concurrent_streams_do_not_mix(wire: Wire) -> None:
    wire.serve()
    everyone = [ReceivedOutput() for _ in range(30)]
    for number, collected in enumerate(everyone):
        await wire.call(collected, Request(str(number), b"\x80"))
    replies = {reply.request_id: reply for reply in [await wire.reply() for _ in everyone]}
    for step in range(20):
        for number in range(len(everyone)):
            replies[str(number)].token(1000 * number + step)
        await asyncio.sleep(0)
    for reply in replies.values():
        reply.finish()
    for number, collected in enumerate(everyone):
        assert await collected.ended() is None
        assert collected.tokens == [1000 * number + step for step in range(20)]


async def test_largest_token_id_is_transferred(wire: Wire) -> None:
    wire.serve(lambda _, reply: (reply.token(0), reply.token(2**32 - 1), reply.finish()))
    collected = ReceivedOutput()
    await wire.call(collected)
    await collected.ended()
    assert collected.tokens == [0, 2**32 - 1]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_handler_receives_the_request_unchanged(wire: Wire, codec: str) -> None:
    wire.serve()
    collected = ReceivedOutput()
    body = json_encode({"n": 1}) if codec == "json" else b"\x81\xa1n\x01"
    sent = Request("id-7", body, codec, {"traceparent": "00-a-b-01"}, {"tenant": "t"})
    await wire.call(collected, sent)
    reply = await wire.reply()
    [received] = wire.requests
    assert (received.id, received.body, received.codec) == ("id-7", body, codec)
    assert received.headers["traceparent"] == "00-a-b-01"
    assert received.metadata == {"tenant": "t"}
    assert reply.request_id == "id-7"
    reply.item({"answer": [1, None, "ü"]})
    reply.token(9)
    reply.finish()
    assert await collected.ended() is None
    assert collected.order == [{"answer": [1, None, "ü"]}, 9]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_bare_value_is_transferred(wire: Wire, codec: str) -> None:
    wire.serve(lambda _, reply: (reply.item(Bare({"Events": [1, 2]})), reply.item({"x": 1}), reply.finish()))
    collected = ReceivedOutput()
    await wire.call(collected, Request("r", encode({}, codec), codec))
    assert await collected.ended() is None
    assert collected.order == [{"Events": [1, 2]}, {"x": 1}]


async def test_response_without_elements_ends(wire: Wire) -> None:
    wire.serve(lambda _, reply: reply.finish())
    collected = ReceivedOutput()
    await wire.call(collected)
    assert await collected.ended() is None
    assert collected.order == []


async def test_writing_after_the_end_is_ignored(wire: Wire) -> None:
    wire.serve()
    collected = ReceivedOutput()
    await wire.call(collected)
    reply = await wire.reply()
    reply.token(1)
    reply.finish()
    reply.token(2)
    reply.item({})
    reply.finish()
    reply.fail(ValueError())
    assert await collected.ended() is None
    assert collected.order == [1]


async def test_large_item_is_transferred(wire: Wire) -> None:
    wire.serve(lambda _, reply: (reply.item("x" * 90_000), reply.finish()))
    collected = ReceivedOutput()
    await wire.call(collected)
    assert await collected.ended() is None
    assert collected.items == ["x" * 90_000]


# Errors ----------------------------------------------------------------------------------------------------------


async def test_typed_error_arrives_after_earlier_elements(wire: Wire) -> None:
    wire.serve(lambda _, reply: (reply.token(1), reply.fail(InvalidArgument("too long", param="messages"))))
    collected = ReceivedOutput()
    await wire.call(collected)
    error = await collected.ended()
    assert isinstance(error, InvalidArgument)
    assert (str(error), error.param) == ("too long", "messages")
    assert collected.tokens == [1]


async def test_exception_of_a_handler_ends_the_response(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    def raise_http(request: Request, reply: Reply) -> None:
        raise HttpError(418, "teapot")

    def raise_bug(request: Request, reply: Reply) -> None:
        raise RuntimeError("boom")

    for handler, kind in ((raise_http, HttpError), (raise_bug, Unknown)):
        wire.serve(handler)
        collected = ReceivedOutput()
        await wire.call(collected)
        assert type(await collected.ended()) is kind
    assert "Traceback" in caplog.text


async def test_unknown_handler_is_refused_at_once(wire: Wire) -> None:
    collected = ReceivedOutput()
    await wire.call(collected, path="1f/ns/comp/other")
    error = await collected.ended()
    assert isinstance(error, WorkerUnavailable)
    assert "unknown endpoint" in str(error)
    assert ("ns_comp.other-1f" if wire.kind == "nats" else "1f/ns/comp/other") in str(error)


async def test_draining_endpoint_refuses_new_requests_and_finishes_running_ones(wire: Wire) -> None:
    served = wire.serve()
    running, late = ReceivedOutput(), ReceivedOutput()
    await wire.call(running)
    reply = await wire.reply()
    drained = asyncio.create_task(served.drain(TIMEOUT_S))
    await asyncio.sleep(0)
    await wire.call(late)
    assert isinstance(await late.ended(), WorkerUnavailable)
    reply.finish()
    assert await running.ended() is None
    assert await drained


async def test_endpoint_without_graceful_drain_ends_its_streams(wire: Wire) -> None:
    served = wire.serve(graceful_shutdown=False)
    collected = ReceivedOutput()
    await wire.call(collected)
    await wire.reply()
    assert await served.drain(TIMEOUT_S)
    error = await collected.ended()
    assert isinstance(error, WorkerUnavailable)


async def test_full_endpoint_refuses_requests(wire: Wire) -> None:
    wire.serve(inflight_max=1)
    first, second = ReceivedOutput(), ReceivedOutput()
    await wire.call(first)
    reply = await wire.reply()
    await wire.call(second)
    assert isinstance(await second.ended(), WorkerOverloaded)
    reply.finish()
    assert await first.ended() is None


async def test_request_over_the_size_limit_is_a_client_error(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.request_plane.memory.BODY_BYTES_MAX", MESSAGE_BYTES_MAX)
    wire.serve()
    collected = ReceivedOutput()
    with pytest.raises(InvalidArgument, match="exceeds the limit"):
        await wire.call(collected, Request("big", bytes(MESSAGE_BYTES_MAX + 1)))
    assert collected.done == []
    ordinary = ReceivedOutput()
    await wire.call(ordinary)
    (await wire.reply()).finish()
    assert await ordinary.ended() is None


async def test_failing_receiver_ends_only_its_own_stream(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.serve()
    broken, sound = ReceivedOutput(), ReceivedOutput()
    broken.on_token = broken.on_item = lambda _: int("no number")  # type: ignore[method-assign, assignment]
    for collected, name in ((broken, "broken"), (sound, "sound")):
        await wire.call(collected, Request(name, b"\x80"))
    replies = {reply.request_id: reply for reply in (await wire.reply(), await wire.reply())}
    for reply in replies.values():
        reply.token(1)
    assert isinstance(await broken.ended(), DynamoException)
    replies["sound"].token(2)
    replies["sound"].finish()
    assert await sound.ended() is None
    assert sound.tokens == [1, 2]
    assert "no number" in caplog.text


# Stopping --------------------------------------------------------------------------------------------------------


async def until_cancelled(reply: Reply) -> None:
    cancelled = asyncio.Event()
    reply.on_cancel(cancelled.set)
    await asyncio.wait_for(cancelled.wait(), TIMEOUT_S)
    assert reply.is_cancelled


async def test_stopped_request_may_still_send_its_last_tokens(wire: Wire) -> None:
    wire.serve()
    collected = ReceivedOutput()
    call = await wire.call(collected)
    reply = await wire.reply()
    reply.token(1)
    await collected.until(lambda: collected.tokens == [1])
    call.stop()
    await until_cancelled(reply)
    reply.token(2)
    reply.finish()
    assert await collected.ended() is None
    assert collected.tokens == [1, 2]


async def test_request_stopped_before_its_arrival_is_stopped(wire: Wire) -> None:
    wire.serve()
    collected = ReceivedOutput()
    call = await wire.call(collected)
    call.stop()
    reply = await wire.reply()
    await until_cancelled(reply)
    reply.finish()
    await collected.ended()


async def test_receiver_gets_nothing_after_a_kill(wire: Wire) -> None:
    served = wire.serve()
    collected = ReceivedOutput()
    call = await wire.call(collected)
    reply = await wire.reply()
    reply.token(1)
    await collected.until(lambda: collected.tokens == [1])
    call.kill()
    assert collected.done == [(0x1F, None)]
    await until_cancelled(reply)
    reply.token(2)
    reply.finish()
    call.kill()
    call.stop()
    after = ReceivedOutput()
    await wire.call(after)
    (await wire.reply()).finish()
    await after.ended()
    assert (collected.tokens, collected.end, collected.done) == ([1], "open", [(0x1F, None)])
    assert served.inflight == 0


async def test_callback_added_after_the_event_is_called_at_once(wire: Wire) -> None:
    wire.serve()
    call = await wire.call(ReceivedOutput())
    reply = await wire.reply()
    call.kill()
    await until_cancelled(reply)
    called: list[int] = []
    reply.on_cancel(lambda: called.append(1))
    assert called == [1]


async def test_lost_worker_ends_every_open_stream(wire: Wire) -> None:
    wire.serve()
    everyone = [ReceivedOutput(), ReceivedOutput()]
    for collected in everyone:
        await wire.call(collected)
    for reply in [await wire.reply() for _ in everyone]:
        reply.token(5)
    for collected in everyone:
        await collected.until(lambda collected=collected: collected.tokens == [5])  # type: ignore[misc]
    await crash(wire.worker)
    for collected in everyone:
        assert isinstance(await collected.ended(), WorkerUnavailable)


async def test_lost_caller_cancels_its_requests(wire: Wire) -> None:
    served = wire.serve()
    await wire.call(ReceivedOutput())
    reply = await wire.reply()
    await crash(wire.caller)
    await until_cancelled(reply)
    assert served.inflight == 0


async def crash(plane: RequestPlane) -> None:
    """Close a plane without a message, as a killed process does."""
    if isinstance(plane, TcpPlane):
        for peer in (*plane._links.values(), *plane._sessions, *plane._responses.open):
            peer.abort()
        for connection in list(plane._response_listener.connections):
            assert connection._transport is not None
            connection._transport.abort()
    if isinstance(plane, NatsPlane):
        for reply in list(plane._worker.responses.open):
            reply.abort()
        for connection in list(plane._caller.response_listener.connections):
            assert connection._transport is not None
            connection._transport.abort()
    await plane.close()


# Connections -----------------------------------------------------------------------------------------------------


async def test_refused_connection_is_a_connection_error(wire: Wire) -> None:
    target = wire.target()
    await wire.worker.close()
    if wire.kind == "nats":  # Only the server has the list of subscribers; it answers a request for it.
        collected = ReceivedOutput()
        await wire.call(collected)
        assert isinstance(await collected.ended(), CannotConnect)
        return
    assert wire.caller.send(target, Request("r", b""), ReceivedOutput(), lambda _, __: None) is None
    with pytest.raises(CannotConnect):
        await wire.caller.connect(target)


async def test_closing_twice_has_no_effect(wire: Wire) -> None:
    await wire.worker.close()
    await wire.worker.close()


@only_tcp
async def test_request_after_a_broken_connection_reconnects(wire: Wire) -> None:
    wire.serve()
    before = ReceivedOutput()
    await wire.call(before)
    await wire.reply()
    address = wire.target().address
    await crash(wire.worker)
    await before.ended()
    wire.worker = wire.join(wire.dispatcher, port=int(address.rpartition(":")[2]))
    await wire.worker.listen()
    after = ReceivedOutput()
    await wire.call(after)
    (await wire.reply()).finish()
    assert await after.ended() is None


@only_tcp
async def test_time_to_first_element_is_measured_once_per_response(wire: Wire) -> None:
    wire.serve(lambda _, reply: (reply.token(1), reply.item("x"), reply.token(2), reply.finish()))
    for _ in range(3):
        collected = ReceivedOutput()
        await wire.call(collected)
        await collected.ended()
        assert collected.order == [1, "x", 2]
    assert isinstance(wire.caller, TcpPlane)
    assert wire.caller._metrics.first_response.count == 3


@pytest.mark.parametrize("kind", TCP)
async def test_request_fails_when_the_worker_does_not_acknowledge(kind: str) -> None:
    silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    wire = Wire(kind, TcpLimits(request_timeout_s=0.02))
    host, port = silent.sockets[0].getsockname()
    target = Target(0x1F, f"{host}:{port}", PATH, "msgpack", kind == "tcp-batched")
    collected = ReceivedOutput()
    await wire.caller.connect(target)
    wire.caller.send(target, Request("r", b""), collected, collected.on_done)
    assert isinstance(await collected.ended(), ConnectionTimeout)
    await wire.caller.close()
    silent.close()


@only_tcp
async def test_malformed_data_closes_only_its_connection(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.serve()
    collected = ReceivedOutput()
    await wire.call(collected)
    reply = await wire.reply()
    host, _, port = wire.target().address.rpartition(":")
    for garbage in (
        b"\x00\x00nonsense that is no greeting",
        frame.HELLO + b"\xff" * 64,
        frame.HELLO + frame.stream_frame(99, 1),
        frame.HELLO + frame.frame(frame.REQUEST, b"\0\0\0\0\1\0\0\0\xc1"),
        b"\x00\x01p\x00\x00\xff\xff\xff\xff",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
                writer.close()
                await writer.wait_closed()
    reply.token(3)
    reply.finish()
    assert await collected.ended() is None
    assert collected.tokens == [3]


@pytest.mark.parametrize("kind", TCP)
async def test_caller_that_does_not_read_is_disconnected(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    wire = Wire(kind, TcpLimits(message_bytes_max=MESSAGE_BYTES_MAX))
    await wire.start()
    wire.serve()
    collected = ReceivedOutput()
    await wire.call(collected)
    reply = await wire.reply()
    pause_reading(wire.caller)
    async with asyncio.timeout(TIMEOUT_S):
        while not reply.is_cancelled:
            reply.item("x" * 50_000)
            await asyncio.sleep(0)
    assert "unread" in caplog.text or "does not read" in caplog.text
    assert isinstance(wire.worker, TcpPlane)
    assert wire.worker._metrics.slow_readers.value == 1
    await wire.worker.close()
    await wire.caller.close()


def pause_reading(plane: RequestPlane) -> None:
    assert isinstance(plane, TcpPlane)
    for connection in (*plane._links.values(), *plane._response_listener.connections):
        assert connection._transport is not None
        connection._transport.pause_reading()


async def test_address_contains_the_path_of_the_handler(wire: Wire) -> None:
    target = wire.target()
    assert target.path == PATH
    assert target.is_batched == (wire.kind not in {"tcp-upstream", "tls-upstream", "nats"})
    if wire.kind in TCP:
        assert target.address.startswith("127.0.0.1:")


@pytest.mark.integration
async def test_response_to_a_nats_request_uses_tls(tls: TcpTls, request: pytest.FixtureRequest) -> None:
    wire = Wire("nats", TcpLimits(), request.getfixturevalue("nats_server").url, tls)
    await wire.start()
    wire.serve(lambda _, reply: (reply.token(7), reply.finish()))
    collected = ReceivedOutput()
    await wire.call(collected)
    assert await collected.ended() is None
    assert collected.tokens == [7]
    assert isinstance(wire.caller, NatsPlane)
    server = wire.caller._caller._server
    assert server is not None
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(frame.two_part(b"{}", b""))
    async with asyncio.timeout(TIMEOUT_S):
        assert await reader.read() == b"", "it listens to whoever does not speak TLS"
    writer.close()
    for plane in wire.planes:
        await plane.close()


@pytest.mark.integration
async def test_nats_caller_without_tls_response_address_reports_the_setting(
    tls: TcpTls, request: pytest.FixtureRequest
) -> None:
    wire = Wire("nats", TcpLimits(), request.getfixturevalue("nats_server").url, TcpTls(client=tls.client))
    await wire.start()
    with pytest.raises(CannotConnect, match="--tcp-tls-cert-path"):
        await wire.call(ReceivedOutput())
    for plane in wire.planes:
        await plane.close()
