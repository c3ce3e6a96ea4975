"""One HTTP connection to a member: requests, streams, and malformed responses."""

import asyncio
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.runtime.transports.etcd import http
from dynamo.runtime.transports.etcd.http import HttpConnection
from dynamo.runtime.transports.etcd.options import Address
from dynamo.runtime.transports.etcd.protocol import EtcdRefused, EtcdUnavailable

ADDRESS = Address("member", 2379, is_tls=False)
TIMEOUT_S = 5.0


class Wire:
    """The other end of a connection."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.sent = b""
        self.is_aborted = False
        self.fails: OSError | None = None
        self.transport = self

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        if self.fails is not None:
            raise self.fails

    def abort(self) -> None:
        self.is_aborted = True

    def connection(self) -> HttpConnection:
        return HttpConnection(self.reader, cast(Any, self), ADDRESS)


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunks(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


async def test_etcd_http_request_has_host_path_and_authorization() -> None:
    wire = Wire()
    wire.reader.feed_data(answer(b"{}"))
    assert await wire.connection().post("/v3/kv/put", b'{"a":1}', {"Authorization": "token"}, TIMEOUT_S) == b"{}"
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v3/kv/put HTTP/1.1"
    assert {"Host: member:2379", "Content-Length: 7", "Authorization: token"} <= set(lines)
    assert body == b'{"a":1}'


async def test_etcd_http_connection_is_reused() -> None:
    wire = Wire()
    connection = wire.connection()
    asks = [asyncio.ensure_future(connection.post("/", b"%d" % number, {}, TIMEOUT_S)) for number in range(3)]
    for number in range(3):
        await turns()
        wire.reader.feed_data(answer(b"%d" % number))
        assert await asks[number] == b"%d" % number
        assert wire.sent.count(b"POST") <= number + 2


async def test_etcd_http_connection_is_reused_after_an_error_status() -> None:
    wire = Wire()
    connection = wire.connection()
    wire.reader.feed_data(answer(b'{"code":5,"message":"requested lease not found"}', "404 Not Found"))
    with pytest.raises(EtcdRefused, match="requested lease not found"):
        await connection.post("/", b"", {}, TIMEOUT_S)
    assert not wire.is_aborted
    wire.reader.feed_data(answer(b"{}"))
    assert await connection.post("/", b"", {}, TIMEOUT_S) == b"{}"


async def test_etcd_http_request_times_out() -> None:
    wire = Wire()
    with pytest.raises(EtcdUnavailable, match="no response to /v3/lease/keepalive within"):
        await wire.connection().post("/v3/lease/keepalive", b"", {}, 0.01)
    assert wire.is_aborted


async def test_etcd_http_cancelled_request_leaves_no_response_for_the_next() -> None:
    wire = Wire()
    connection = wire.connection()
    send_request = asyncio.ensure_future(connection.post("/", b"", {}, TIMEOUT_S))
    await turns()
    send_request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await send_request
    assert wire.is_aborted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "closed"),
        (answer(b"whole")[:-1], "closed"),
        (b"SSH-2.0-OpenSSH\r\n", "not valid HTTP"),
        (b"\x00\xff", "not valid HTTP"),
    ],
)
async def test_etcd_http_refuses_an_invalid_response(data: bytes, message: str) -> None:
    wire = Wire()
    wire.reader.feed_data(data)
    wire.reader.feed_eof()
    with pytest.raises(EtcdUnavailable, match=message):
        await wire.connection().post("/", b"", {}, TIMEOUT_S)


async def test_etcd_http_reports_why_a_connection_broke() -> None:
    wire = Wire()
    wire.fails = ConnectionResetError(104, "Connection reset by peer")
    with pytest.raises(EtcdUnavailable, match="Connection reset by peer"):
        await wire.connection().post("/", b"", {}, TIMEOUT_S)
    wire = Wire()
    wire.reader.set_exception(ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(EtcdUnavailable, match="Connection reset by peer"):
        await wire.connection().post("/", b"", {}, TIMEOUT_S)


async def test_etcd_http_limits_the_response_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MESSAGE_BYTES_MAX", 10)
    wire = Wire()
    wire.reader.feed_data(answer(b"x" * 11))
    with pytest.raises(EtcdUnavailable, match="exceeds 10 bytes"):
        await wire.connection().post("/", b"", {}, TIMEOUT_S)


@given(cuts=st.lists(st.integers(0, 120), max_size=6))
async def test_etcd_http_stream_splits_lines_at_any_chunk_boundary(cuts: list[int]) -> None:
    wire = Wire()
    data = chunks(b'{"result":1}\n{"re', b'sult":2}\n', b'{"result":3}\n')
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    lines: list[bytes] = []

    async def feed() -> None:
        for start, end in itertools.pairwise(edges):
            wire.reader.feed_data(data[start:end])
            await turns()
        wire.reader.feed_eof()

    async def read() -> None:
        async for line in wire.connection().stream("/v3/watch", b"", {}):
            lines.append(line)  # noqa: PERF401 - it ends with an error, and what came before counts

    with pytest.raises(EtcdUnavailable, match="closed"):
        await asyncio.gather(read(), feed())
    assert lines == [b'{"result":1}', b'{"result":2}', b'{"result":3}']


async def test_etcd_http_stream_ends_normally() -> None:
    wire = Wire()
    wire.reader.feed_data(chunks(b"a\n", b""))
    assert [line async for line in wire.connection().stream("/", b"", {})] == [b"a"]


async def test_etcd_http_stream_reports_an_error_status() -> None:
    wire = Wire()
    wire.reader.feed_data(answer(b'{"code":16,"message":"invalid auth token"}', "401 Unauthorized"))
    with pytest.raises(EtcdRefused, match="invalid auth token"):
        await anext(wire.connection().stream("/", b"", {}))
