"""Hot routes over a recording transport."""

import asyncio
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.settle import turns, until
from uvicorn.server import ServerState

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.server.closing import LINGER_BYTES_MAX, LINGER_IDLE_S
from dynamo.http.server.cors import Cors
from dynamo.http.server.exchange import CHUNK_SIZES_MAX, COMMENT, CONTINUE, FREED_HERE_BYTES, BodyBudget, Exchange
from dynamo.http.server.gate import Gate, KeyMetrics, Keys
from dynamo.http.server.limits import ConnectionCounts, HttpLimits
from dynamo.http.server.paced_input import InputTurns
from dynamo.http.server.protocol import BODY_BYTES_FREE, PIPELINE_MAX, SLICE_BYTES, HttpProtocol
from dynamo.serving.choice import Frame
from dynamo.serving.errors import ErrorAnswer

LIMITS = HttpLimits(body_bytes=10, header_bytes=1000, headers=20, requests_per_connection=0)
REQUEST = b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"


class Transport(asyncio.Transport):
    """Transport that records the written data."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.unsent = 0
        self.extra: dict[str, Any] = {}
        self.is_closed = False
        self.is_reading_paused = False
        self.has_ended = False

    @property
    def is_over(self) -> bool:
        """Return whether no data follows."""
        return self.is_closed or self.has_ended

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.extra.get(name, default)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_read_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Server:
    """One connection whose hot route keeps its exchanges."""

    def __init__(self, limits: HttpLimits = LIMITS, extra: Mapping[str, Any] | None = None, **more: Any) -> None:
        """`extra`: the transport's extra information."""
        self.exchanges: list[Exchange] = []
        self.counts = ConnectionCounts(MetricsRegistry(), "p")
        routes = {
            (b"POST", b"/hot"): self.exchanges.append,
            (b"POST", b"/now"): lambda exchange: exchange.refuse(ErrorAnswer(418, "no")),
        }
        fixed = {"hot_routes": routes, "limits": limits, "counts": self.counts, "turns": InputTurns(lambda: 0.0)}
        kind = type("P", (HttpProtocol,), {**fixed, **more})
        config = uvicorn.Config(
            self.app, lifespan="off", log_config=None, access_log=False, ws="none", interface="asgi3"
        )
        config.load()
        self.protocol = kind(config, ServerState(), {}, asyncio.get_running_loop())
        self.transport = Transport()
        self.transport.extra |= extra or {}
        self.protocol.connection_made(self.transport)
        self.asgi_paths: list[str] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asgi_paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def server() -> Server:
    return Server()


async def test_hot_request_is_delivered_complete_at_any_segmentation(server: Server) -> None:
    for place in range(len(REQUEST)):
        server.protocol.data_received(REQUEST[place : place + 1])
    assert [bytes(one.body) for one in server.exchanges] == [b"hello"]
    server.exchanges[0].respond(200, b"{}")
    assert server.transport.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert server.transport.sent.endswith(b"content-length: 2\r\n\r\n{}")


async def test_stream_is_chunked_and_sends_its_status_with_the_first_event(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    exchange = server.exchanges[0]
    assert server.transport.sent == b""
    exchange.write(b"data: 1\n\n")
    exchange.end(b"data: [DONE]\n\n")
    head, _, body = server.transport.sent.partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    assert body == b"9\r\ndata: 1\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def test_stream_can_send_its_status_before_the_first_event(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    (exchange,) = server.exchanges
    exchange.begin()
    exchange.begin()
    head = server.transport.sent
    assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n") and exchange.response_started
    exchange.write(b"data: 1\n\n")
    exchange.end()
    assert server.transport.sent.removeprefix(head) == b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"


async def test_query_string_is_served_by_the_hot_route(server: Server) -> None:
    server.protocol.data_received(REQUEST.replace(b"/hot", b"/hot?x=1"))
    assert len(server.exchanges) == 1


async def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    server.protocol.data_received(REQUEST + REQUEST.replace(b"hello", b"again") + REQUEST.replace(b"hello", b"third"))
    assert [bytes(one.body) for one in server.exchanges] == [b"hello"]
    server.exchanges[0].respond(200, b"1")
    assert [bytes(one.body) for one in server.exchanges] == [b"", b"again"]
    server.exchanges[1].end(b"2")
    assert [bytes(one.body) for one in server.exchanges] == [b"", b"", b"third"]


async def test_other_routes_are_served_by_asgi_on_the_same_connection(server: Server) -> None:
    server.protocol.data_received(b"GET /other HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.gather(*server.protocol.tasks)
    assert server.asgi_paths == ["/other"]
    server.protocol.data_received(REQUEST)
    assert len(server.exchanges) == 1


@pytest.mark.parametrize("length", [b"content-length: 11", b"transfer-encoding: chunked"])
async def test_body_over_the_limit_is_refused_with_413(server: Server, length: bytes) -> None:
    body = b"a" * 11 if b"length" in length else b"b\r\n" + b"a" * 11 + b"\r\n0\r\n\r\n"
    server.protocol.data_received(b"POST /hot HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n" + body)
    assert server.transport.sent.startswith(b"HTTP/1.1 413 ")
    assert b"DYN_HTTP_BODY_LIMIT_MB" in server.transport.sent
    assert server.transport.is_over
    assert server.exchanges == []


async def test_client_disconnect_is_reported_once(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    left: list[bool] = []
    server.exchanges[0].on_disconnect = lambda: left.append(True)
    server.protocol.connection_lost(None)
    server.exchanges[0].write(b"data: late\n\n")
    assert left == [True]
    assert server.transport.sent == b""


async def test_disconnect_after_the_response_is_not_reported(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    exchange = server.exchanges[0]
    exchange.on_disconnect = lambda: pytest.fail("the response was complete")
    exchange.respond(200, b"")
    server.protocol.connection_lost(None)


async def test_client_that_does_not_read_is_disconnected(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    server.protocol.pause_writing()
    server.transport.unsent = LIMITS.unsent_bytes
    server.exchanges[0].write(b"x")
    assert not server.transport.is_closed
    server.transport.unsent += 1
    server.exchanges[0].write(b"x")
    assert server.transport.is_over


async def test_received_at_is_set_only_while_a_request_is_awaited(server: Server) -> None:
    protocol: Any = server.protocol
    assert protocol.received_at is not None, "nothing has come yet"
    protocol.data_received(REQUEST)
    assert protocol.received_at is None
    server.exchanges[0].respond(200, b"{}")
    protocol.data_received(REQUEST[:20])
    assert protocol.received_at is not None


async def test_malformed_http_gets_a_json_400(server: Server) -> None:
    server.protocol.data_received(b"\x16\x03\x01garbage\r\n\r\n")
    head, _, body = server.transport.sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and body.startswith(b'{"error"')


async def test_http_1_0_connection_is_closed_after_the_response(server: Server) -> None:
    server.protocol.data_received(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    server.exchanges[0].respond(529, b"{}")
    assert server.transport.sent.startswith(b"HTTP/1.1 529 Overloaded\r\n")
    assert server.transport.is_over


async def test_empty_write_sends_no_chunk(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    (exchange,) = server.exchanges
    exchange.write(b"")
    exchange.write(b"one")
    exchange.write(b"")
    assert server.transport.sent.endswith(b"\r\n\r\n3\r\none\r\n")


async def test_request_that_arrives_too_slowly_gets_408(server: Server) -> None:
    protocol: Any = server.protocol
    protocol.data_received(REQUEST[:-1])
    since_s = protocol.received_at
    protocol.sweep(since_s + LIMITS.arrival_s - 0.5)
    assert not server.transport.is_closed
    protocol.sweep(since_s + LIMITS.arrival_s + 1)
    assert server.transport.sent.startswith(b"HTTP/1.1 408 ") and server.transport.is_over
    assert server.counts.late.value == 1


async def test_idle_new_connection_is_closed_without_a_response(server: Server) -> None:
    protocol: Any = server.protocol
    protocol.sweep(protocol.received_at + LIMITS.arrival_s + 1)
    assert server.transport.sent == b"" and server.transport.is_over


@pytest.mark.parametrize("size", [1, CHUNK_SIZES_MAX])
async def test_framed_text_is_one_chunk_of_head_text_and_tail(server: Server, size: int) -> None:
    server.protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    server.transport.sent = b""
    text = b"x" * size
    server.exchanges[0].write_framed(Frame(b"data: ", b"\n\n"), text)
    assert server.transport.sent == b"%x\r\ndata: %b\n\n\r\n" % (size + 8, text)


async def test_slow_reader_of_framed_text_is_disconnected(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    server.protocol.pause_writing()
    server.transport.unsent = LIMITS.unsent_bytes + 1
    server.exchanges[0].write_framed(Frame(b"data: ", b"\n\n"), b"2")
    assert server.transport.is_over
    server.transport.sent = b""
    server.exchanges[0].left()
    server.exchanges[0].write_framed(Frame(b"data: ", b"\n\n"), b"3")
    assert server.transport.sent == b""


async def test_reader_that_catches_up_keeps_its_stream(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    server.protocol.pause_writing()
    server.protocol.resume_writing()
    server.transport.unsent = LIMITS.unsent_bytes + 1
    server.exchanges[0].write_framed(Frame(b"data: ", b"\n\n"), b"2")
    assert not server.transport.is_over


class Socket:
    """A pipe in place of a connection's socket."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        for end in (self.reader, self.writer):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        return self.writer

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80

    getpeername = getsockname

    def received(self) -> bytes:
        """Return all data in the pipe."""
        with suppress(BlockingIOError):
            return os.read(self.reader, 1 << 20)
        return b""

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def wire() -> Iterator[Socket]:
    made = Socket()
    yield made
    made.close()


def streaming(wire: Socket, **extra: Any) -> tuple[Server, Exchange]:
    """Return a connection and an exchange whose stream has begun."""
    server = Server(extra={"socket": wire, **extra})
    server.protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    server.transport.sent = b""
    return server, server.exchanges[0]


FRAME = Frame(b"data: ", b"\n\n")


async def test_framed_text_goes_to_the_socket_while_the_transport_holds_nothing(wire: Socket) -> None:
    server, exchange = streaming(wire)
    server.transport.unsent = 1
    exchange.write_framed(FRAME, b"2")
    assert (wire.received(), server.transport.sent) == (b"", b"9\r\ndata: 2\n\n\r\n")
    server.transport.unsent = 0
    server.transport.sent = b""
    exchange.write_framed(FRAME, b"3")
    exchange.write_framed(FRAME, b"4")
    assert (wire.received(), server.transport.sent) == (b"9\r\ndata: 3\n\n\r\n9\r\ndata: 4\n\n\r\n", b"")


@pytest.mark.parametrize("write", [Exchange.probe, Exchange.comment])
async def test_framed_text_after_another_write_waits_behind_it(wire: Socket, write: Callable[[Exchange], None]) -> None:
    server, exchange = streaming(wire)
    exchange.write_framed(FRAME, b"2")
    assert wire.received()
    write(exchange)
    server.transport.unsent = 1
    exchange.write_framed(FRAME, b"3")
    assert not wire.received()
    assert server.transport.sent == COMMENT + b"9\r\ndata: 3\n\n\r\n"


async def test_text_that_a_full_socket_does_not_take_passes_to_the_transport_in_order(wire: Socket) -> None:
    server, exchange = streaming(wire)
    text = b"x" * 4000
    for _ in range(40):
        exchange.write_framed(FRAME, text)
        server.transport.unsent = len(server.transport.sent)
    assert server.transport.sent
    whole = wire.received() + server.transport.sent
    assert whole == b"%x\r\ndata: %b\n\n\r\n" % (len(text) + 8, text) * 40


async def test_slow_reader_of_a_socket_is_disconnected_at_the_limit(wire: Socket) -> None:
    server, exchange = streaming(wire)
    while not server.transport.sent:
        exchange.write_framed(FRAME, b"x" * 4000)
    server.protocol.pause_writing()
    server.transport.unsent = LIMITS.unsent_bytes + 1
    exchange.write_framed(FRAME, b"x")
    assert server.transport.is_over and server.counts.slow_readers.value == 1


async def test_framed_text_of_a_tls_connection_goes_to_its_transport(wire: Socket) -> None:
    server, exchange = streaming(wire, sslcontext=True)
    exchange.write_framed(FRAME, b"2")
    assert not wire.received() and server.transport.sent.endswith(b"data: 2\n\n\r\n")


async def test_captured_response_contains_the_framed_text(wire: Socket) -> None:
    server, exchange = streaming(wire)
    capture = exchange.capture()
    exchange.write_framed(FRAME, b"2")
    assert not wire.received() and server.transport.sent.endswith(b"data: 2\n\n\r\n")
    assert capture is exchange.transport


@pytest.mark.parametrize("close", [Exchange.abort, Exchange.left, Exchange.end])
async def test_nothing_is_written_to_the_socket_of_a_closed_response(
    wire: Socket, close: Callable[[Exchange], None]
) -> None:
    _, exchange = streaming(wire)
    exchange.write_framed(FRAME, b"2")
    assert wire.received()
    close(exchange)
    exchange.write_framed(FRAME, b"3")
    assert not wire.received()


async def test_slow_response_does_not_time_out_its_request(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    protocol: Any = server.protocol
    protocol.sweep(protocol.loop.time() + 1e6)
    assert not server.transport.is_closed


async def test_pipelined_request_does_not_time_out_while_reading_is_paused(server: Server) -> None:
    protocol: Any = server.protocol
    protocol.data_received(REQUEST + REQUEST[:-1])
    protocol.sweep(protocol.loop.time() + 1e6)
    assert not server.transport.is_closed


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", b"POST /hot HTTP/1.1\r\nx: " + b"a" * 2000])
async def test_malformed_pipelined_request_is_not_answered_before_an_open_response(
    server: Server, behind: bytes
) -> None:
    server.protocol.data_received(REQUEST)
    server.protocol.data_received(behind)
    assert server.transport.sent == b"" and server.transport.is_over


async def test_client_that_stalls_its_response_is_disconnected(server: Server) -> None:
    protocol: Any = server.protocol
    protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    protocol.pause_writing()
    protocol.sweep(protocol.stalled_at + LIMITS.stalled_s)
    assert not server.transport.is_closed
    protocol.resume_writing()
    protocol.sweep(protocol.stalled_at + LIMITS.stalled_s + 1)
    assert not server.transport.is_closed
    protocol.pause_writing()
    protocol.sweep(protocol.stalled_at + LIMITS.stalled_s + 1)
    assert server.transport.is_over
    assert server.counts.slow_readers.value == 1


@pytest.mark.parametrize(
    "head",
    [b"x-long: " + b"a" * 1000 + b"\r\n", b"x: y\r\n" * 21, b"x-much: " + b"a" * 100_000],
    ids=["too long", "too many", "without an end"],
)
@pytest.mark.parametrize("step", [64, 1 << 20])
@pytest.mark.parametrize("path", [b"/hot", b"/other"])
async def test_headers_over_the_limit_are_refused_at_any_segmentation(
    server: Server, head: bytes, step: int, path: bytes
) -> None:
    request = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n"
    for place in range(0, len(request), step):
        if not server.transport.is_closed:
            server.protocol.data_received(request[place : place + step])
    assert server.transport.sent.startswith(b"HTTP/1.1 431 ")
    assert server.transport.sent.count(b"HTTP/1.1") == 1
    assert server.transport.is_over and server.exchanges == [] and server.asgi_paths == []


async def test_asgi_route_body_has_the_same_limit(server: Server) -> None:
    server.protocol.data_received(b"POST /other HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\n")
    assert server.transport.sent.startswith(b"HTTP/1.1 413 ") and server.transport.is_over
    assert server.asgi_paths == []


async def test_chunked_asgi_route_body_over_the_limit_is_refused(server: Server) -> None:
    server.protocol.data_received(b"POST /other HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    server.protocol.data_received(b"b\r\n" + b"a" * 11 + b"\r\n")
    assert server.transport.sent.startswith(b"HTTP/1.1 413 ") and server.transport.is_over


async def test_pipelined_request_on_a_closing_connection_is_not_started(server: Server) -> None:
    long = b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\n" + b"a" * 11
    server.protocol.data_received(long + REQUEST)
    assert server.exchanges == []
    assert server.transport.sent.count(b"HTTP/1.1") == 1


async def test_connection_closes_after_its_maximum_number_of_requests() -> None:
    server = Server(HttpLimits(requests_per_connection=2))
    server.protocol.data_received(REQUEST)
    server.exchanges[0].respond(200, b"{}")
    assert not server.transport.is_closed
    server.protocol.data_received(REQUEST)
    server.exchanges[1].respond(200, b"{}")
    assert server.transport.is_over and b"connection: close\r\n" in server.transport.sent


async def test_connection_over_the_limit_gets_503_and_is_closed() -> None:
    server = Server(connections_max=0)
    assert server.transport.sent.startswith(b"HTTP/1.1 503 ") and server.transport.is_over
    assert server.counts.refused.value == 1
    server.protocol.connection_lost(None)
    assert server.counts.open.value == 0


def gate(**more: Any) -> Gate:
    return Gate({b"/health"}, KeyMetrics(MetricsRegistry(), "p"), now=lambda: 0.0, **more)


def with_header(line: bytes) -> bytes:
    return REQUEST.replace(b"host: x\r\n", b"host: x\r\n" + line + b"\r\n")


async def test_request_without_a_valid_key_gets_401_without_reaching_the_handler(tmp_path: Path) -> None:
    server = Server(gate=gate(keys=Keys(["sk-secret-1"], None)))
    server.protocol.data_received(REQUEST)
    assert server.exchanges == []
    assert server.transport.sent.startswith(b"HTTP/1.1 401 ")
    assert b"invalid_api_key" in server.transport.sent and b"www-authenticate: Bearer\r\n" in server.transport.sent
    server.protocol.data_received(with_header(b"authorization: Bearer sk-secret-1"))
    assert len(server.exchanges) == 1


async def test_hot_request_counts_as_concurrent_until_response_or_disconnect(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nconcurrent_requests = 1\n')
    keys = Keys([], str(path))
    first, second = Server(gate=gate(keys=keys)), Server(gate=gate(keys=keys))
    request = with_header(b"x-api-key: sk-secret-1")
    first.protocol.data_received(request)
    second.protocol.data_received(request)
    assert second.exchanges == []
    assert second.transport.sent.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1\r\n" in second.transport.sent
    first.exchanges[0].respond(200, b"{}")
    second.protocol.data_received(request)
    assert len(second.exchanges) == 1
    second.protocol.connection_lost(None)
    first.protocol.data_received(request)
    assert len(first.exchanges) == 2


async def test_asgi_request_counts_as_concurrent_until_the_response(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nconcurrent_requests = 1\n')
    server = Server(gate=gate(keys=Keys([], str(path))))
    for _ in range(2):
        server.protocol.data_received(b"GET /other HTTP/1.1\r\nhost: x\r\nx-api-key: sk-secret-1\r\n\r\n")
        await asyncio.gather(*server.protocol.tasks)
    assert server.asgi_paths == ["/other", "/other"]
    assert server.transport.sent.count(b"HTTP/1.1 204 ") == 2


async def test_body_of_a_refused_request_is_discarded() -> None:
    server = Server(HttpLimits(), gate=gate(keys=Keys(["sk-secret-1"], None)))
    server.protocol.data_received(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhell")
    (exchange,) = server.protocol.exchanges
    assert exchange.body == b""
    server.protocol.data_received(b"o")
    assert server.transport.sent.startswith(b"HTTP/1.1 401 ")


async def test_cors_preflight_and_request_are_allowed() -> None:
    server = Server(gate=gate(cors=Cors.of(["https://chat.example.org"])))
    server.protocol.data_received(
        b"OPTIONS /hot HTTP/1.1\r\nhost: x\r\norigin: https://chat.example.org\r\n"
        b"access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n\r\n"
    )
    assert server.transport.sent.startswith(b"HTTP/1.1 204 ")
    assert b"access-control-allow-headers: authorization\r\n" in server.transport.sent
    server.transport.sent = b""
    server.protocol.data_received(with_header(b"origin: https://chat.example.org"))
    server.exchanges[0].respond(200, b"{}")
    assert b"access-control-allow-origin: https://chat.example.org\r\n" in server.transport.sent
    server.transport.sent = b""
    server.protocol.data_received(b"GET /other HTTP/1.1\r\nhost: x\r\norigin: https://chat.example.org\r\n\r\n")
    await asyncio.gather(*server.protocol.tasks)
    assert b"access-control-allow-origin: https://chat.example.org\r\n" in server.transport.sent


async def test_route_errors_are_written_in_the_format_of_the_route() -> None:
    def body(error: ErrorAnswer) -> bytes:
        return b"own form %d" % error.status

    server = Server(gate=gate(keys=Keys(["sk-secret-1"], None)), error_bodies={b"/hot": body})
    server.protocol.data_received(REQUEST)
    assert server.transport.sent.endswith(b"own form 401")


async def test_stream_content_type_is_set_once(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    exchange = server.exchanges[0]
    exchange.open(b"audio/wav")
    exchange.open(b"audio/mpeg")
    exchange.write(b"RIFF")
    exchange.end()
    head, _, body = server.transport.sent.partition(b"\r\n\r\n")
    assert b"content-type: audio/wav\r\n" in head
    assert body == b"4\r\nRIFF\r\n0\r\n\r\n"


async def test_websocket_upgrade_request_is_delivered_to_its_hot_route() -> None:
    exchanges: list[Exchange] = []
    server = Server(hot_routes={(b"GET", b"/hot"): exchanges.append})
    upgrade = b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    server.protocol.data_received(b"GET /hot?a=b HTTP/1.1\r\nhost: x\r\n" + upgrade)
    assert exchanges[0].header(b"upgrade") == b"websocket"
    exchanges[0].respond(400, b"{}")
    assert server.transport.sent.startswith(b"HTTP/1.1 400 ")


async def test_absolute_request_target_is_served_by_its_path(server: Server) -> None:
    for target in (b"http://x/hot", b"http://x/hot?a=b"):
        server.protocol.data_received(REQUEST.replace(b"/hot", target))
        server.exchanges[-1].respond(200, b"{}")
    assert len(server.exchanges) == 2
    server.protocol.data_received(b"GET http://x/other HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.gather(*server.protocol.tasks)
    assert server.asgi_paths == ["/other"]


UPGRADE = REQUEST.replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c")


@pytest.mark.parametrize("place", range(1, len(UPGRADE)))
async def test_body_of_a_declined_upgrade_request_is_read(server: Server, place: int) -> None:
    server.protocol.data_received(UPGRADE[:place])
    server.protocol.data_received(UPGRADE[place:])
    assert [bytes(one.body) for one in server.exchanges] == [b"hello"]
    server.exchanges[0].respond(200, b"{}")
    server.protocol.data_received(REQUEST)
    assert len(server.exchanges) == 2, "the connection does not go on"


CHUNKS = b"POST /hot HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"


async def test_trailer_is_not_a_header(server: Server) -> None:
    server.protocol.data_received(CHUNKS)
    server.protocol.data_received(b"0\r\nx-late: 1\r\n\r\n")
    assert bytes(server.exchanges[0].body) == b"hello"
    assert server.exchanges[0].header(b"host") == b"x" and server.exchanges[0].header(b"x-late") is None


@pytest.mark.parametrize(("begin", "more"), [(b"0\r\n", b"x-a: b\r\n" * 4000), (b"5;", b"a" * 32_000)])
async def test_trailers_and_chunk_headers_are_bounded(server: Server, begin: bytes, more: bytes) -> None:
    server.protocol.data_received(CHUNKS + begin)
    for _ in range(40):
        server.protocol.data_received(more)
        if server.transport.is_closed:
            break
    assert server.transport.is_over
    assert server.transport.sent.startswith(b"HTTP/1.1 400 ") and not server.exchanges


def upload(size: int, sent: int | None = None) -> bytes:
    head = b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
    return head + b"a" * (size if sent is None else sent)


async def test_an_aborted_upload_is_freed_without_the_garbage_collector() -> None:
    budget = BodyBudget(10 << 20)
    server = Server(HttpLimits(body_bytes=4 << 20), bodies=budget)
    server.protocol.data_received(upload(2 << 20, 1 << 20))
    assert budget.held == 1 << 20
    protocol = weakref.ref(server.protocol)
    gc.disable()
    try:
        server.protocol.connection_lost(ConnectionResetError())
        assert budget.held == 0
        del server.protocol
        assert protocol() is None
    finally:
        gc.enable()


async def test_body_of_an_answered_request_is_freed_on_a_keep_alive_connection() -> None:
    budget = BodyBudget(10 << 20)
    server = Server(HttpLimits(body_bytes=4 << 20), bodies=budget)
    server.protocol.data_received(upload(1 << 20))
    (exchange,) = server.exchanges
    assert budget.held == len(exchange.body) == 1 << 20
    exchange.respond(200, b"{}")
    assert (budget.held, exchange.body, server.transport.is_over) == (0, b"", False)


async def test_a_long_body_has_its_memory_from_the_start_and_is_filled_in_place() -> None:
    server = Server(HttpLimits())
    size = 3 << 20
    pieces = [bytes([number]) * (1 << 18) for number in range(12)]
    head = upload(size, 0)
    server.protocol.data_received(head)
    buffers = set()
    for piece in pieces:
        server.protocol.data_received(piece)
        exchange, *_ = server.protocol.exchanges
        buffers.add(id(exchange.body))
        assert len(exchange.body) == size
    assert len(buffers) == 1
    assert server.exchanges[0].body == b"".join(pieces)


async def test_a_large_body_is_freed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "dynamo.http.server.exchange.start_in_few_threads", lambda work, name, count: started.append((name, count))
    )
    server = Server(HttpLimits())
    for size, threads in ((FREED_HERE_BYTES, []), (FREED_HERE_BYTES + 1, [("free", 1)])):
        server.protocol.data_received(upload(size))
        server.exchanges[-1].respond(200, b"{}")
        assert started == threads
        assert server.exchanges[-1].body == b""


async def test_an_upload_is_not_read_while_its_application_is_behind() -> None:
    server = Server(HttpLimits())
    goes_on, seen = asyncio.Event(), 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal seen
        await goes_on.wait()
        more = True
        while more:
            message = await receive()
            seen, more = seen + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server.protocol.app = slow
    server.protocol.data_received(upload(1 << 20, 1 << 18).replace(b"/hot", b"/other"))
    assert server.transport.is_reading_paused
    await turns(3)
    assert server.transport.is_reading_paused
    goes_on.set()
    await until(lambda: not server.transport.is_reading_paused)
    server.protocol.data_received(bytes((1 << 20) - (1 << 18)))
    await asyncio.gather(*server.protocol.tasks)
    assert seen == 1 << 20
    assert not server.transport.is_reading_paused


async def test_request_bodies_share_a_budget_that_small_bodies_bypass() -> None:
    budget = BodyBudget(1 << 20)
    limits = HttpLimits(body_bytes=4 << 20)
    first, second, third = (Server(limits, bodies=budget) for _ in range(3))
    first.protocol.data_received(upload(2 << 20, 1 << 20))
    second.protocol.data_received(upload(2 << 20, 1 << 20))
    assert second.transport.sent.startswith(b"HTTP/1.1 503 ") and b"DYN_HTTP_BODIES_LIMIT_MB" in second.transport.sent
    assert b"retry-after: 1\r\n" in second.transport.sent and second.transport.has_ended
    assert not first.transport.sent and budget.held == 1 << 20
    third.protocol.data_received(upload(BODY_BYTES_FREE))
    assert len(third.exchanges) == 1
    first.protocol.connection_lost(None)
    assert budget.held == 0


async def test_refused_upload_is_drained_before_the_connection_closes(server: Server) -> None:
    server.protocol.data_received(upload(1000, 500))
    assert server.transport.sent.startswith(b"HTTP/1.1 413 ") and b"connection: close" in server.transport.sent
    assert server.transport.has_ended and not server.transport.is_closed
    protocol: Any = server.protocol
    protocol.data_received(b"a" * 500 + REQUEST)
    assert not server.exchanges, "nothing more is read as a request"
    protocol.sweep(protocol._lingering.last_byte_at + LINGER_IDLE_S - 1)
    assert not server.transport.is_closed
    protocol.sweep(protocol._lingering.last_byte_at + LINGER_IDLE_S + 1)
    assert server.transport.is_closed


async def test_drained_bytes_after_a_refusal_are_bounded(server: Server) -> None:
    server.protocol.data_received(upload(1 << 40, 0))
    piece = bytes(64 << 20)
    for _ in range((LINGER_BYTES_MAX // len(piece)) + 1):
        assert not server.transport.is_closed
        server.protocol.data_received(piece)
    assert server.transport.is_closed


async def test_refused_upload_gets_no_100_continue(server: Server) -> None:
    request = upload(1000, 0).replace(b"host: x", b"host: x\r\nexpect: 100-continue")
    server.protocol.data_received(request)
    assert server.transport.sent.startswith(b"HTTP/1.1 413 ")


async def test_refused_pipelined_upload_is_answered_after_earlier_responses(server: Server) -> None:
    server.protocol.data_received(REQUEST + upload(1000, 0))
    assert not server.transport.sent
    server.exchanges[0].respond(200, b"1")
    assert server.transport.sent.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 413 " in server.transport.sent
    assert server.transport.has_ended


async def test_half_closed_client_gets_its_response_before_the_close(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    assert server.protocol.eof_received() is True
    (exchange,) = server.exchanges
    assert server.transport.sent == CONTINUE, "what finds out whether the client is there"
    exchange.respond(200, b"{}")
    assert server.transport.sent.removeprefix(CONTINUE).startswith(b"HTTP/1.1 200 ")
    assert server.transport.is_closed


async def test_half_closed_client_gets_all_pipelined_responses(server: Server) -> None:
    server.protocol.data_received(REQUEST + REQUEST)
    assert server.protocol.eof_received() is True
    server.exchanges[0].respond(200, b"1")
    assert not server.transport.is_closed
    server.exchanges[1].respond(200, b"2")
    assert server.transport.is_closed and server.transport.sent.count(b"HTTP/1.1 200 ") == 2


async def test_half_closed_stream_client_is_probed_by_a_comment(server: Server) -> None:
    server.protocol.data_received(REQUEST)
    server.exchanges[0].write(b"data: 1\n\n")
    assert server.protocol.eof_received() is True
    assert server.transport.sent.endswith(COMMENT)
    server.exchanges[0].end(b"data: [DONE]\n\n")
    assert server.transport.is_closed


async def test_http_1_0_client_gets_no_interim_response(server: Server) -> None:
    server.protocol.data_received(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert server.protocol.eof_received() is True
    assert not server.transport.sent


@pytest.mark.parametrize("sent", [b"", REQUEST[:20], REQUEST[:-1], REQUEST + REQUEST[:20]])
async def test_connection_with_an_incomplete_request_is_closed_at_end_of_file(server: Server, sent: bytes) -> None:
    if sent:
        server.protocol.data_received(sent)
    assert not server.protocol.eof_received()


async def test_half_closed_client_of_an_asgi_route_gets_its_response(server: Server) -> None:
    server.protocol.data_received(b"GET /other HTTP/1.1\r\nhost: x\r\n\r\n")
    assert server.protocol.eof_received() is True
    await turns(5)
    assert server.transport.sent.startswith(b"HTTP/1.1 204 ") and server.transport.is_closed


async def test_requests_beyond_a_full_pipeline_are_parsed_when_it_empties(server: Server) -> None:
    count = 50 * PIPELINE_MAX
    server.protocol.data_received(REQUEST * count)
    assert server.transport.is_reading_paused
    waiting = len(server.protocol.pipeline)
    assert PIPELINE_MAX <= waiting <= PIPELINE_MAX + SLICE_BYTES // len(REQUEST)
    server.protocol.data_received(REQUEST)  # A read that was already under way.
    assert len(server.protocol.pipeline) == waiting
    for _ in range(count + 1):
        await until(lambda: server.exchanges)
        server.exchanges.pop(0).respond(200, b"{}")
        assert len(server.protocol.pipeline) <= waiting
    assert server.transport.sent.count(b"HTTP/1.1 200 OK") == count + 1
    await until(lambda: not server.transport.is_reading_paused)


async def test_many_refusals_behind_a_response_do_not_recurse(server: Server) -> None:
    server.protocol.data_received(REQUEST + REQUEST.replace(b"POST /hot", b"POST /now") * 5000)
    server.exchanges.pop().respond(200, b"{}")
    await until(lambda: server.transport.sent.count(b"HTTP/1.1 418 ") == 5000)


async def test_many_heads_in_one_read_are_not_one_long_head(server: Server) -> None:
    ended = REQUEST.replace(b"/hot", b"/now") * 100
    server.protocol.data_received(ended + REQUEST[:20])
    await until(lambda: server.transport.sent.count(b"HTTP/1.1 418 ") == 100)
    server.protocol.data_received(REQUEST[20:])
    assert len(server.exchanges) == 1 and not server.transport.is_over


async def test_connection_waits_for_a_turn_while_others_parse() -> None:
    shared = InputTurns(lambda: 0.0)
    server = Server(turns=shared)
    shared.add(lambda: None)
    server.protocol.data_received(REQUEST * 2)
    assert not server.exchanges and server.transport.is_reading_paused
    await until(lambda: server.exchanges)
