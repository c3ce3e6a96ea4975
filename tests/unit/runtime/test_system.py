"""System server: a process tells about itself over HTTP."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.asgi import request
from tests.settle import turns, until

from dynamo.core.errors import ConfigError
from dynamo.core.http_server import ServerLimits
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.system import SystemServer

TIMEOUT_S = 5.0


class House:
    def __init__(self, limits: ServerLimits | None = None) -> None:
        self.health = SystemHealth(variables={})
        self.metrics = MetricsRegistry()
        self.routes: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        self.server = SystemServer(self.health, self.metrics, self.routes, self.files, limits=limits)

    async def send(self, data: bytes) -> bytes:
        """What comes back on a connection until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        answer = b""
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):  # Whoever is cut off may see a reset instead of an end.
                answer = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer

    async def ask(self, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        return parse(await self.send(head.encode() + body), is_head=method == "HEAD")


def parse(answer: bytes, *, is_head: bool = False) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(body) == (0 if is_head else int(headers["content-length"]))
    return int(first.split(" ")[1]), headers, body


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/engine/sleep"), ("GET", "/engine/sleep"), ("POST", "/v1/loras"), ("DELETE", "/v1/loras/a")],
)
async def test_system_server_refuses_control_requests_without_an_admin_key(method: str, path: str) -> None:
    async def done(body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok"}

    routes: dict[str, Any] = dict.fromkeys(("sleep", "load_lora", "unload_lora"), done)
    server = SystemServer(
        SystemHealth(variables={}), MetricsRegistry(), routes, admin_keys=("admin-secret", "other-key")
    )

    async def status(method: str, path: str, key: str | None = None) -> int:
        headers = {} if key is None else {"x-api-key": key}
        return (await request(server.application, method, path, b"{}", headers)).status_code

    for key in (None, "", "wrong-key", "admin-secre"):
        assert await status(method, path, key) == 401
    for key in ("admin-secret", "other-key"):
        assert await status(method, path, key) == 200
    for open_path in ("/health", "/live", "/metrics"):
        assert await status("GET", open_path) != 401


async def test_system_server_reads_the_key_from_either_header(house: House) -> None:
    async def done(body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok"}

    house.routes["sleep"] = done
    house.server._admin_keys = ("admin-secret",)
    for header, status in (
        ("authorization: Bearer admin-secret", 200),
        ("Authorization: bearer  admin-secret", 200),
        ("x-api-key: admin-secret", 200),
        ("authorization: Basic admin-secret", 401),
        ("x-other: admin-secret", 401),
    ):
        request = f"POST /engine/sleep HTTP/1.1\r\nhost: x\r\n{header}\r\nconnection: close\r\n\r\n"
        assert parse(await house.send(request.encode()))[0] == status


@asynccontextmanager
async def listening(limits: ServerLimits | None = None) -> AsyncIterator[House]:
    made = House(limits)
    await made.server.listen("127.0.0.1", 0)
    yield made
    await made.server.close()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with listening() as made:
        yield made


async def test_health_and_live_tell_whether_the_process_is_ready(house: House) -> None:
    for path in ("/health", "/live"):
        house.health.set(False)
        status, headers, body = await house.ask(path)
        assert (status, headers["content-type"], json.loads(body)["status"]) == (503, "text/plain", "notready")
        house.health.set(True)
        status, _, body = await house.ask(path + "?verbose=1")
        assert (status, json.loads(body)["status"]) == (200, "ready")


async def test_metrics_are_prometheus_text(house: House) -> None:
    house.metrics.counter("c_total", "c").labels().inc(3)
    status, headers, body = await house.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"c_total 3\n" in body


async def test_engine_routes_answer_json(house: House) -> None:
    async def double(value: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * value.get("n", 1)}

    async def fail(value: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("bug")

    house.routes.update(double=double, fail=fail)
    assert json.loads((await house.ask("/engine/double", "POST", b'{"n": 4}'))[2]) == {"twice": 8}
    assert json.loads((await house.ask("/engine/double"))[2]) == {"twice": 2}
    assert (await house.ask("/engine/double", "POST", b"{nonsense"))[0] == 400
    assert (await house.ask("/engine/fail"))[0] == 500
    assert (await house.ask("/engine/double", "DELETE"))[0] == 405
    status, _, body = await house.ask("/engine/foo")
    assert (status, json.loads(body)) == (404, {"error": "Route not found", "message": "Route /engine/foo not found"})


async def test_other_paths_are_not_found(house: House) -> None:
    assert (await house.ask("/metadata"))[::2] == (404, b"Discovery metadata not available")
    assert (await house.ask("/nonsense"))[0] == 404


async def test_a_connection_serves_several_requests_in_turn(house: House) -> None:
    house.health.set(True)
    one = b"GET /live HTTP/1.1\r\n\r\n"
    last = b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n"
    answer = await house.send(one + one + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_a_head_request_has_no_body(house: House) -> None:
    house.metrics.counter("c_total", "c")
    status, headers, body = await house.ask("/metrics", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(house.metrics.render())


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
async def test_what_is_no_request_is_refused_and_the_connection_closed(house: House, data: bytes, status: int) -> None:
    assert parse(await house.send(data))[0] == status


async def test_a_taken_port_is_a_wrong_setting(house: House) -> None:
    with pytest.raises(ConfigError, match=f"DYN_SYSTEM_PORT={house.server.port}"):
        await House().server.listen("127.0.0.1", house.server.port)


async def test_a_silent_connection_is_closed() -> None:
    async with listening(ServerLimits(idle_s=0.0)) as house:
        assert await house.send(b"") == b""


async def test_an_engines_metrics_that_cannot_be_read_cost_one_scrape(house: House) -> None:
    def broken() -> str:
        raise KeyError("bug")

    house.metrics.add_text(broken)
    assert (await house.ask("/metrics"))[0] == 500
    assert (await house.ask("/live"))[0] == 503


async def test_whoever_asks_on_without_listening_is_cut(house: House) -> None:
    forever = asyncio.Event()

    async def wait(value: dict[str, Any]) -> dict[str, Any]:
        await forever.wait()
        return {}

    house.routes["wait"] = wait
    assert await house.send(b"GET /engine/wait HTTP/1.1\r\n\r\n" + b"x" * 1_200_000) == b""


async def test_more_connections_than_are_kept_are_refused() -> None:
    async with listening(ServerLimits(connections=0)) as house:
        assert parse(await house.send(b""))[0] == 503


# Model assets ------------------------------------------------------------------------------------------------------


ASSET = bytes(range(256)) * 2500


@pytest.fixture
def asset(house: House, tmp_path: Path) -> Path:
    """A file of several pieces, shown at /v1/metadata/m/_base/tokenizer.json."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(ASSET)
    house.files["/v1/metadata/m/_base/tokenizer.json"] = str(file)
    return file


async def test_a_model_asset_is_shown_as_it_is(house: House, asset: Path) -> None:
    status, headers, body = await house.ask("/v1/metadata/m/_base/tokenizer.json")
    assert (status, headers["content-type"], body) == (200, "application/octet-stream", ASSET)
    status, headers, _ = await house.ask("/v1/metadata/m/_base/tokenizer.json", "HEAD")
    assert (status, headers["content-length"]) == (200, "640000")


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
async def test_no_other_file_is_shown_however_it_is_asked_for(house: House, asset: Path, path: str) -> None:
    (asset.parent / "secret.txt").write_text("secret")
    status, _, body = await house.ask(path)
    assert status == 404
    assert b"secret" not in body.replace(path.encode(), b"")


async def test_an_asset_that_vanished_is_not_found(house: House, asset: Path) -> None:
    os.unlink(asset)
    assert (await house.ask("/v1/metadata/m/_base/tokenizer.json"))[0] == 404


async def test_a_reader_who_leaves_an_asset_unread_is_cut(tmp_path: Path) -> None:
    asset = tmp_path / "tokenizer.json"
    asset.touch()
    os.truncate(asset, 32 << 20)
    async with listening(ServerLimits(idle_s=0.05)) as house:
        house.files["/v1/metadata/m/_base/tokenizer.json"] = str(asset)
        reader, writer = await asyncio.open_connection("127.0.0.1", house.server.port, limit=1 << 16)
        writer.write(b"GET /v1/metadata/m/_base/tokenizer.json HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: house.server.http.connections)
            await until(lambda: not house.server.http.connections)
        reader.feed_eof()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_system_server_answers_a_client_that_half_closed_its_connection(house: House) -> None:
    async def slow(body: dict[str, Any]) -> dict[str, Any]:
        await turns()
        return {"status": "ok"}

    house.routes["sleep"] = slow
    reader, writer = await asyncio.open_connection("127.0.0.1", house.server.port)
    writer.write(b"POST /engine/sleep HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.write_eof()
    async with asyncio.timeout(TIMEOUT_S):
        assert parse(await reader.read())[0] == 200
    writer.close()


async def test_system_server_reads_a_chunked_body(house: House) -> None:
    async def double(value: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * value["n"]}

    house.routes["double"] = double
    head = b"POST /engine/double HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    status, _, body = parse(await house.send(head + b'4\r\n{"n"\r\n4\r\n: 4}\r\n0\r\n\r\n'))
    assert (status, json.loads(body)) == (200, {"twice": 8})


async def test_system_server_refuses_a_chunked_body_that_is_too_long() -> None:
    async with listening(ServerLimits(body_bytes=10)) as house:
        head = b"POST /engine/double HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert parse(await house.send(head + b"b\r\nxxxxxxxxxxx\r\n0\r\n\r\n"))[0] == 413


async def test_system_server_refuses_a_head_that_is_too_long() -> None:
    async with listening(ServerLimits(head_bytes=64)) as house:
        assert parse(await house.send(b"GET /live HTTP/1.1\r\nx-long: " + b"x" * 64))[0] == 400
