"""System server over sockets: HTTP framing, limits of a connection, and paths as they are sent."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.settle import turns, until

from dynamo.core.errors import ConfigError
from dynamo.core.http_server import ServerLimits
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.system import SystemServer

TIMEOUT_S = 60.0
ASSET = "/v1/metadata/m/_base/tokenizer.json"


class ListeningServer:
    def __init__(self, limits: ServerLimits | None = None) -> None:
        self.health = SystemHealth(variables={})
        self.metrics = MetricsRegistry()
        self.routes: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        self.system = SystemServer(self.health, self.metrics, self.routes, self.files, limits=limits)

    async def send(self, data: bytes) -> bytes:
        """Send data on a new connection; return everything received until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.system.port)
        writer.write(data)
        answer = b""
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):  # A disconnected client may see a reset instead of an end.
                answer = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer

    async def request(self, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        return parse(await self.send(head.encode() + body), is_head=method == "HEAD")


def parse(answer: bytes, *, is_head: bool = False) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(body) == (0 if is_head else int(headers["content-length"]))
    return int(first.split(" ")[1]), headers, body


@asynccontextmanager
async def listening(limits: ServerLimits | None = None) -> AsyncIterator[ListeningServer]:
    made = ListeningServer(limits)
    await made.system.listen("127.0.0.1", 0)
    yield made
    await made.system.close()


@pytest.fixture
async def server() -> AsyncIterator[ListeningServer]:
    async with listening() as made:
        yield made


async def test_connection_serves_several_requests_in_turn(server: ListeningServer) -> None:
    server.health.set(True)
    one = b"GET /live HTTP/1.1\r\n\r\n"
    last = b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n"
    answer = await server.send(one + one + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_head_response_has_no_body(server: ListeningServer) -> None:
    server.metrics.counter("c_total", "c")
    status, headers, body = await server.request("/metrics", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(server.metrics.render())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / SPDY/3\r\n\r\n", 400),
        (b"x" * 20_000, 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
    ],
)
async def test_malformed_request_is_refused_and_the_connection_closed(
    server: ListeningServer, data: bytes, status: int
) -> None:
    assert parse(await server.send(data))[0] == status


async def test_occupied_port_is_named_in_the_error(server: ListeningServer) -> None:
    with pytest.raises(ConfigError, match=f"DYN_SYSTEM_PORT={server.system.port}"):
        await ListeningServer().system.listen("127.0.0.1", server.system.port)


async def test_silent_connection_is_closed() -> None:
    async with listening(ServerLimits(idle_s=0.0)) as server:
        assert await server.send(b"") == b""


async def test_client_that_sends_more_without_reading_is_disconnected(server: ListeningServer) -> None:
    forever = asyncio.Event()

    async def wait(value: dict[str, Any]) -> dict[str, Any]:
        await forever.wait()
        return {}

    server.routes["wait"] = wait
    assert await server.send(b"GET /engine/wait HTTP/1.1\r\n\r\n" + b"x" * 1_200_000) == b""


async def test_connections_over_the_limit_get_503() -> None:
    async with listening(ServerLimits(connections=0)) as server:
        assert parse(await server.send(b""))[0] == 503


@pytest.mark.parametrize(
    "path",
    [
        "/v1/metadata/m/_base/secret.txt",
        "/v1/metadata/m/_base/../secret.txt",
        "/v1/metadata/m/_base/%2e%2e/secret.txt",
        "/v1/metadata/m/_base/tokenizer.json/../secret.txt",
        "/v1/metadata/m/_base//tokenizer.json",
        "/v1/metadata/",
    ],
)
async def test_files_outside_the_asset_directory_are_not_served(
    server: ListeningServer, tmp_path: Path, path: str
) -> None:
    (tmp_path / "tokenizer.json").touch()
    server.files[ASSET] = str(tmp_path / "tokenizer.json")
    (tmp_path / "secret.txt").write_text("secret")
    status, _, body = await server.request(path)
    assert status == 404
    assert b"secret" not in body.replace(path.encode(), b"")


async def test_client_that_does_not_read_an_asset_is_disconnected(tmp_path: Path) -> None:
    asset = tmp_path / "tokenizer.json"
    asset.touch()
    os.truncate(asset, 32 << 20)
    async with listening(ServerLimits(idle_s=0.05)) as server:
        server.files[ASSET] = str(asset)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.system.port, limit=1 << 16)
        writer.write(b"GET /v1/metadata/m/_base/tokenizer.json HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: server.system.http.connections)
            await until(lambda: not server.system.http.connections)
        reader.feed_eof()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_system_server_answers_a_client_that_half_closed_its_connection(server: ListeningServer) -> None:
    async def slow(body: dict[str, Any]) -> dict[str, Any]:
        await turns()
        return {"status": "ok"}

    server.routes["sleep"] = slow
    reader, writer = await asyncio.open_connection("127.0.0.1", server.system.port)
    writer.write(b"POST /engine/sleep HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.write_eof()
    async with asyncio.timeout(TIMEOUT_S):
        assert parse(await reader.read())[0] == 200
    writer.close()


async def test_system_server_reads_a_chunked_body(server: ListeningServer) -> None:
    async def double(value: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * value["n"]}

    server.routes["double"] = double
    head = b"POST /engine/double HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    status, _, body = parse(await server.send(head + b'4\r\n{"n"\r\n4\r\n: 4}\r\n0\r\n\r\n'))
    assert (status, json.loads(body)) == (200, {"twice": 8})


async def test_system_server_refuses_a_chunked_body_that_is_too_long() -> None:
    async with listening(ServerLimits(body_bytes=10)) as server:
        head = b"POST /engine/double HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert parse(await server.send(head + b"b\r\nxxxxxxxxxxx\r\n0\r\n\r\n"))[0] == 413


async def test_system_server_refuses_a_head_that_is_too_long() -> None:
    async with listening(ServerLimits(head_bytes=64)) as server:
        assert parse(await server.send(b"GET /live HTTP/1.1\r\nx-long: " + b"x" * 64))[0] == 400
