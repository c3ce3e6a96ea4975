"""HttpClient: what a server says, whole or in parts, and what becomes of its connection."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.settle import turns

from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, ResponseTimeout
from dynamo.core.http_client import BlockingHttpClient, Deadlines, HttpClient

DEADLINES = Deadlines(5.0, 5.0, 5.0)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """A writer that goes nowhere."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Lines:
    """The connections that were opened; what the server says on each is fed to its reader."""

    def __init__(self) -> None:
        self.opened: list[tuple[asyncio.StreamReader, Wire]] = []
        self.says: list[bytes] = []
        self.ends = False

    async def open(self, *_: object, **__: object) -> tuple[asyncio.StreamReader, Wire]:
        reader = asyncio.StreamReader()
        if self.says:
            reader.feed_data(self.says.pop(0))
        if self.ends:
            reader.feed_eof()
        self.opened.append((reader, Wire()))
        return self.opened[-1]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    made = Lines()
    monkeypatch.setattr(asyncio, "open_connection", made.open)
    return made


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), more, body)


async def got(client: HttpClient) -> tuple[int, bytes]:
    async with client.request("GET", "/x") as answer:
        return answer.status, await answer.read()


async def test_http_client_reuses_the_connection_after_a_complete_response(lines: Lines) -> None:
    lines.says = [whole(b"one")]
    client = HttpClient("http://h:1/base/", DEADLINES, headers={"authorization": "Bearer k"})
    assert await got(client) == (200, b"one")
    lines.opened[0][0].feed_data(whole(b"no", b"503 Busy"))
    assert await got(client) == (503, b"no")
    assert len(lines.opened) == 1
    sent = lines.opened[0][1].sent
    assert sent.count(b"GET /base/x HTTP/1.1\r\nhost: h:1\r\n") == 2
    assert sent.count(b"authorization: Bearer k\r\n") == 2
    client.close()
    assert lines.opened[0][1].is_closed


async def test_http_client_closes_the_connection_when_the_caller_stops_reading(lines: Lines) -> None:
    lines.says = [HEAD + chunk(b"data: 1\n\n")]
    client = HttpClient("http://h:1", DEADLINES)
    async with client.request("POST", "/x", b"{}") as answer:
        assert await answer.events() == [b"1"]
    assert lines.opened[0][1].is_closed


async def test_http_client_closes_the_connection_of_a_cancelled_request(lines: Lines) -> None:
    lines.says = [HEAD + chunk(b"data: 1\n\n")]
    client = HttpClient("http://h:1", DEADLINES)
    began = asyncio.Event()

    async def ask() -> None:
        async with client.request("POST", "/x", b"{}") as answer:
            began.set()
            await answer.read()

    task = asyncio.create_task(ask())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lines.opened[0][1].is_closed


async def test_http_client_closes_the_connection_when_waiting_for_the_response_is_cancelled(lines: Lines) -> None:
    client = HttpClient("http://h:1", DEADLINES)
    task = asyncio.create_task(got(client))
    await turns(5)
    assert lines.opened[0][1].sent
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lines.opened[0][1].is_closed


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_http_client_splits_server_sent_events_at_any_chunk_boundary(lines: Lines, size: int) -> None:
    text = b'data: {"a": 1}\r\n\r\n: a comment\n\nevent: x\ndata: 2\n\ndata: [DONE]\n\n'
    cut = b"".join(chunk(text[at : at + size]) for at in range(0, len(text), size))
    lines.says = [HEAD + cut + b"0\r\n\r\n"]
    found: list[bytes] = []
    client = HttpClient("http://h:1", DEADLINES)
    async with client.request("GET", "/x") as answer:
        while (events := await answer.events()) is not None:
            found += events
    assert found == [b'{"a": 1}', b"2", b"[DONE]"]
    assert not lines.opened[0][1].is_closed


async def test_http_client_retries_when_an_idle_connection_was_closed(lines: Lines) -> None:
    lines.says = [whole(b"one"), whole(b"two")]
    client = HttpClient("http://h:1", DEADLINES)
    await got(client)
    reader = lines.opened[0][0]
    was_at_eof = reader.at_eof
    reader.at_eof = lambda: False  # type: ignore[method-assign] - its end comes only when it is read
    reader.feed_eof()
    assert await got(client) == (200, b"two")
    assert was_at_eof()
    assert [wire.is_closed for _, wire in lines.opened] == [True, False]


async def test_http_client_fails_when_a_new_connection_ends_at_once(lines: Lines) -> None:
    lines.ends = True
    with pytest.raises(Disconnected):
        await got(HttpClient("http://h:1", DEADLINES))
    assert len(lines.opened) == 1


async def test_http_client_fails_when_a_response_is_truncated(lines: Lines) -> None:
    lines.says, lines.ends = [HEAD + chunk(b"data: 1\n\n")], True
    with pytest.raises(Disconnected):
        await got(HttpClient("http://h:1", DEADLINES))


async def test_http_client_accepts_a_body_that_ends_with_its_connection(lines: Lines) -> None:
    lines.says, lines.ends = [b"HTTP/1.1 200 OK\r\n\r\nall of it"], True
    assert await got(HttpClient("http://h:1", DEADLINES)) == (200, b"all of it")
    assert lines.opened[0][1].is_closed


async def test_http_client_does_not_keep_connections_that_the_server_closes(lines: Lines) -> None:
    lines.says = [whole(b"one", more=b"connection: close\r\n"), b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\n2"]
    client = HttpClient("http://h:1", DEADLINES)
    assert await got(client) == (200, b"one")
    assert await got(client) == (200, b"2")
    assert [wire.is_closed for _, wire in lines.opened] == [True, True]


async def test_http_client_accepts_a_response_without_a_body(lines: Lines) -> None:
    lines.says = [b"HTTP/1.1 204 No Content\r\n\r\n"]
    client = HttpClient("http://h:1", DEADLINES)
    assert await got(client) == (204, b"")


@pytest.mark.parametrize("limits", [Deadlines(5.0, 0.01, 5.0), Deadlines(5.0, 5.0, 0.01)])
async def test_http_client_has_deadlines_before_and_between_chunks(lines: Lines, limits: Deadlines) -> None:
    lines.says = [b""] if limits.first_s < 1 else [HEAD + chunk(b"data: 1\n\n")]
    with pytest.raises(ResponseTimeout, match=r"0\.01 s"):
        await got(HttpClient("http://h:1", limits))
    assert lines.opened[0][1].is_closed


async def test_http_client_fails_on_bytes_that_are_not_http(lines: Lines) -> None:
    lines.says = [b"nonsense\r\n\r\n"]
    with pytest.raises(Disconnected, match="not valid HTTP"):
        await got(HttpClient("http://h:1", DEADLINES))


async def test_http_client_stops_reading_a_response_that_is_too_large(lines: Lines) -> None:
    lines.says = [whole(b"x" * 100)]
    async with asyncio.timeout(5):
        with pytest.raises(Disconnected, match="exceeds 10 bytes"):
            async with HttpClient("http://h:1", DEADLINES).request("GET", "/x") as answer:
                await answer.read(10)


@asynccontextmanager
async def served(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def test_http_client_error_names_an_unreachable_server() -> None:
    async with served(lambda _reader, writer: writer.close()) as port:
        pass
    with pytest.raises(CannotConnect, match=f"127.0.0.1:{port}: Connection refused"):
        await got(HttpClient(f"127.0.0.1:{port}", DEADLINES))


async def test_http_client_connect_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    with pytest.raises(CannotConnect, match="within"):
        await got(HttpClient("http://h:1", Deadlines(0.01, 5.0, 5.0)))


def test_http_client_keeps_the_brackets_of_an_ipv6_address() -> None:
    assert HttpClient("http://[::1]:80", DEADLINES).authority == "[::1]:80"
    assert HttpClient("https://h", DEADLINES).authority == "h:443"


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:x"])
def test_http_client_refuses_an_invalid_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--there"):
        HttpClient(url, DEADLINES, setting="--there")


# In the caller's thread ----------------------------------------------------------------------------------------------


def served_once(answer: bytes) -> tuple[int, threading.Thread]:
    """The port of a server that responds to one request, and its thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(answer)
            if not answer:
                connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody", b"body"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"body"),
        (b"HTTP/1.1 200 OK\r\n\r\nbody", b"body"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
def test_blocking_client_reads_a_body_of_any_framing(answer: bytes, body: bytes) -> None:
    port, thread = served_once(answer)
    with BlockingHttpClient(f"http://127.0.0.1:{port}", DEADLINES).request("GET", "/x") as response:
        assert response.read() == body
    thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbo", Disconnected, "before the end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n" + b"x" * 400, Disconnected, "exceeds 100 bytes"),
        (b"nonsense\r\n\r\n", Disconnected, "not valid HTTP"),
        (b"", ResponseTimeout, "no complete response within 0.05 s"),
    ],
)
def test_blocking_client_reports_a_response_that_is_unusable(
    answer: bytes, error: type[Exception], message: str
) -> None:
    port, thread = served_once(answer)
    client = BlockingHttpClient(f"http://127.0.0.1:{port}", Deadlines(5.0, 5.0, 5.0, 0.05 if not answer else None))
    with pytest.raises(error, match=message), client.request("GET", "/x") as response:
        response.read(100)
    thread.join()


def test_blocking_client_reports_a_server_that_does_not_listen() -> None:
    request = BlockingHttpClient("http://127.0.0.1:1", DEADLINES).request("GET", "/x")
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:1"), request:
        pass
