"""HttpClient: responses whole or in parts, and the state of its connection."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator

import pytest
from tests.settle import turns

from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, InvalidArgument, ResponseTimeout
from dynamo.core.http_client import BlockingHttpClient, Connection, Deadlines, HttpClient

DEADLINES = Deadlines(5.0, 5.0, 5.0)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """Writer that discards its data."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = self.is_awaited = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    async def wait_closed(self) -> None:
        self.is_awaited = True


class Lines:
    """The connections that were opened; the server's bytes are fed to the reader of each."""

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


async def test_http_client_ignores_interim_responses(lines: Lines) -> None:
    lines.says = [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + whole(b"one")]
    async with HttpClient("http://h:1", DEADLINES).request("GET", "/x") as response:
        assert (response.status, dict(response.headers)) == (200, {"content-length": "3"})
        assert await response.read() == b"one"


async def test_http_client_refuses_a_protocol_switch(lines: Lines) -> None:
    lines.says = [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"]
    with pytest.raises(Disconnected, match="not valid HTTP"):
        await got(HttpClient("http://h:1", DEADLINES))


@pytest.mark.parametrize(
    ("method", "body", "length"), [("GET", b"", None), ("GET", b"{}", 2), ("POST", b"", 0), ("DELETE", b"", 0)]
)
async def test_http_client_describes_a_body_only_where_there_may_be_one(
    lines: Lines, method: str, body: bytes, length: int | None
) -> None:
    lines.says = [whole(b"")]
    async with HttpClient("http://h:1", DEADLINES).request(method, "/x", body):
        pass
    head = lines.opened[0][1].sent
    assert (b"content-type" in head, b"content-length" in head) == (length is not None, length is not None)
    assert length is None or b"content-length: %d\r\n" % length in head


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://h:1", b"h:1"),
        ("http://h:80", b"h"),
        ("https://h", b"h"),
        ("https://h:80", b"h:80"),
        ("http://[::1]", b"[::1]"),
    ],
)
async def test_http_client_omits_the_default_port_from_the_host_header(lines: Lines, url: str, host: bytes) -> None:
    lines.says = [whole(b"")]
    await got(HttpClient(url, DEADLINES))
    assert b"\r\nhost: %b\r\n" % host in lines.opened[0][1].sent


async def test_http_client_uses_the_given_connections(lines: Lines) -> None:
    wire = Wire()

    async def opens() -> Connection:
        reader = asyncio.StreamReader()
        reader.feed_data(whole(b"one"))
        return reader, wire  # type: ignore[return-value]

    assert await got(HttpClient("http://h:1", DEADLINES, connect=opens)) == (200, b"one")
    assert wire.sent.startswith(b"GET /x ") and not lines.opened


async def test_http_client_raises_the_errors_of_the_given_connections(lines: Lines) -> None:
    async def refuses() -> Connection:
        raise InvalidArgument("not this address")

    with pytest.raises(InvalidArgument, match="not this address"):
        await got(HttpClient("http://h:1", DEADLINES, connect=refuses))


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

    async def send_request() -> None:
        async with client.request("POST", "/x", b"{}") as answer:
            began.set()
            await answer.read()

    task = asyncio.create_task(send_request())
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


async def test_http_client_error_names_an_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:9: Connection refused"):
        await got(HttpClient("127.0.0.1:9", DEADLINES))


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


@pytest.fixture
def serve_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Return a function that sets the response of the next connection; an empty one keeps the connection open."""
    client, server = socket.socketpair()

    def connect(_address: tuple[str, int], limit_s: float) -> socket.socket:
        client.settimeout(limit_s)
        return client

    def serve(answer: bytes) -> None:
        server.sendall(answer)
        if answer:
            server.shutdown(socket.SHUT_WR)

    monkeypatch.setattr(socket, "create_connection", connect)
    with client, server:
        yield serve


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody", b"body"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"body"),
        (b"HTTP/1.1 200 OK\r\n\r\nbody", b"body"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
def test_blocking_client_reads_a_body_of_any_framing(
    serve_once: Callable[[bytes], None], answer: bytes, body: bytes
) -> None:
    serve_once(answer)
    with BlockingHttpClient("http://h:1", DEADLINES).request("GET", "/x") as response:
        assert response.read() == body


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
    serve_once: Callable[[bytes], None], answer: bytes, error: type[Exception], message: str
) -> None:
    serve_once(answer)
    client = BlockingHttpClient("http://h:1", Deadlines(5.0, 5.0, 5.0, 0.05 if not answer else None))
    with pytest.raises(error, match=message), client.request("GET", "/x") as response:
        response.read(100)


def test_blocking_client_reports_a_server_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    request = BlockingHttpClient("http://127.0.0.1:1", DEADLINES).request("GET", "/x")
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:1"), request:
        pass


async def test_http_client_is_closed_when_its_connections_are(lines: Lines) -> None:
    lines.says = [whole(b"")]
    client = HttpClient("http://h:1", DEADLINES)
    async with client.request("GET", "/x"):
        pass
    await client.closed()
    assert lines.opened[0][1].is_awaited
