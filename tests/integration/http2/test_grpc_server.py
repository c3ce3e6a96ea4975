"""The gRPC server with real clients: grpcio's, and sockets that break the protocol."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.settle import turns

from dynamo.core.errors import StartupError
from dynamo.http2 import frames, grpc_server
from dynamo.http2.grpc_call import GrpcCall, GrpcCode, GrpcStatus
from dynamo.http2.grpc_server import GrpcServer

pytestmark = [pytest.mark.integration, pytest.mark.kserve]

ENDED: list[str] = []


async def echo(call: GrpcCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


async def fail(call: GrpcCall) -> None:
    if await call.read() == b"known":
        raise GrpcStatus(GrpcCode.NOT_FOUND, "nothing here: é")
    raise ValueError("a secret")


STARTED = asyncio.Event()


async def wait(_: GrpcCall) -> None:
    STARTED.set()
    try:
        await asyncio.Event().wait()
    finally:
        ENDED.append("wait")


async def has_started() -> None:
    async with asyncio.timeout(30):
        await STARTED.wait()
    STARTED.clear()


METHODS = {"/s/Echo": echo, "/s/Fail": fail, "/s/Wait": wait}


@pytest.fixture
async def server() -> AsyncIterator[tuple[GrpcServer, int]]:
    ENDED.clear()
    STARTED.clear()
    made = GrpcServer(METHODS, message_bytes_max=8 << 20)
    port = await made.listen("127.0.0.1", 0, "--port")
    yield made, port
    await made.stop(0.0)


Served = tuple[GrpcServer, int]


async def test_concurrent_streams_of_messages_of_any_size(server: Served) -> None:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server[1]}", [("grpc.max_receive_message_length", -1)]
    ) as channel:

        async def exchange(number: int) -> None:
            call = channel.stream_stream("/s/Echo")()
            for size in (0, 1, 100, 70_000, number * 20_000):
                message = bytes([number]) * size
                await call.write(message)
                assert await call.read() == message
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

        await asyncio.gather(*(exchange(number) for number in range(40)))


async def test_message_of_megabytes_is_echoed_at_once(server: Served) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}", options) as channel:
        message = bytes(range(256)) * (6 << 12)
        assert await channel.unary_unary("/s/Echo")(message, timeout=30) == message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/Echo")(bytes(9 << 20), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("method", "message", "code", "text"),
    [
        ("/s/Fail", b"known", grpc.StatusCode.NOT_FOUND, "nothing here: é"),
        ("/s/Fail", b"", grpc.StatusCode.INTERNAL, "internal error"),
        ("/s/Absent", b"", grpc.StatusCode.UNIMPLEMENTED, "method /s/Absent: unknown"),
    ],
)
async def test_call_that_fails_has_its_status(
    server: Served, method: str, message: bytes, code: grpc.StatusCode, text: str
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(message, timeout=30)
    assert (caught.value.code(), caught.value.details()) == (code, text)


async def test_deadline_cancel_and_lost_client_end_the_method(server: Served) -> None:
    made, port = server
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        timeout_s = 0.2
        while not STARTED.is_set():  # A call of which the time is over before the client has sent it does not start.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/s/Wait")(b"", timeout=timeout_s)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await turns(10)
            timeout_s *= 2
        await has_started()
        assert await made.tasks.wait(30)
        call = channel.unary_unary("/s/Wait")(b"")
        await has_started()
        call.cancel()
        assert await made.tasks.wait(30)
        lost = channel.unary_unary("/s/Wait")(b"")
        await has_started()
    assert await made.tasks.wait(30)
    assert lost.done()
    assert ENDED == ["wait"] * 3


async def test_stop_lets_calls_end_and_refuses_others(server: Served) -> None:
    made, port = server
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/s/Echo")()
        await call.write(b"1")
        assert await call.read() == b"1"
        stopping = asyncio.create_task(made.stop(30))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/Echo")(b"2", timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        await call.write(b"3")
        assert await call.read() == b"3"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await stopping


async def test_stop_ends_calls_after_its_budget(server: Served) -> None:
    made, port = server
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/s/Wait")()
        await call.write(b"1")
        await has_started()
        await made.stop(0.0)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def answer_to(port: int, data: bytes) -> bytes:
    """Return what the server answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"this port serves gRPC (HTTP/2) only"),
        (frames.PREFACE + frames.frame(frames.PUSH_PROMISE, 0, 1), b"PUSH_PROMISE of a client"),
        (
            frames.PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\x0f"),
            b"headers: ",
        ),
    ],
)
async def test_connection_that_breaks_the_protocol_is_closed_with_a_reason(
    server: Served, data: bytes, reason: bytes
) -> None:
    assert reason in await answer_to(server[1], data)


async def test_request_that_is_not_grpc_is_refused(server: Served) -> None:
    path = b"\x04\x07/s/Echo"
    request = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"\x83\x86" + path)
    reader, writer = await asyncio.open_connection("127.0.0.1", server[1])
    writer.write(frames.PREFACE + frames.settings_frame({}) + request)
    async with asyncio.timeout(30):
        assert await reader.readuntil(b"415")
    writer.close()


async def test_silent_connection_is_closed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "PREFACE_S", 0.1)
    await answer_to(server[1], b"PRI")


async def test_connections_beyond_the_limit_are_closed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CONNECTIONS_MAX", 1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}") as channel:
        assert await channel.unary_unary("/s/Echo")(b"1", timeout=30) == b"1"
        assert await answer_to(server[1], b"") == b""


async def flood(client: socket.socket, data: bytes, limit: int) -> int:
    """Send data until the peer takes no more for a second, or the limit is reached; return the number of bytes."""
    sent, loop = 0, asyncio.get_running_loop()
    while sent < limit:
        try:
            async with asyncio.timeout(1):
                await loop.sock_sendall(client, data)
        except TimeoutError:
            return sent
        sent += len(data)
    return sent


async def test_client_that_does_not_read_stops_being_read(server: Served) -> None:
    """Pings are answered only as fast as the answers are read: the server keeps no more than its socket's buffers."""
    with socket.create_connection(("127.0.0.1", server[1])) as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(client, frames.PREFACE + frames.settings_frame({}))
        assert await flood(client, frames.frame(frames.PING, 0, 0, b"12345678") * 4096, 64 << 20) < 64 << 20


async def test_port_in_use_names_its_setting(server: Served) -> None:
    with pytest.raises(StartupError, match=f"--port {server[1]}: the port is in use"):
        await GrpcServer(METHODS, message_bytes_max=1).listen("127.0.0.1", server[1], "--port")
