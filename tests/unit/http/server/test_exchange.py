"""Exchange: responses longer than the transport should hold are written piece by piece, as fast as the client reads."""

from functools import partial
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.http.server.test_protocol import LIMITS, REQUEST, Server, Transport

from dynamo.http.server.exchange import LONG_BYTES, Exchange
from dynamo.http.server.paced_input import TURN_S, InputTurns
from dynamo.serving.choice import Frame

LONG = bytes(range(256)) * (4 * LONG_BYTES // 256) + b"end"


class PacedTransport(Transport):
    """Transport that is full after every long piece, until its client reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        super().write(data)
        self.pieces.append(len(data))
        self.unsent += len(data)
        if self.unsent >= LONG_BYTES:
            self.protocol.pause_writing()

    def read(self) -> None:
        """Read everything, as a client."""
        self.unsent = 0
        self.protocol.resume_writing()


def connected() -> tuple[Server, PacedTransport, Exchange]:
    server = Server()
    transport = PacedTransport()
    transport.protocol = server.protocol
    server.transport = transport
    server.protocol.transport = transport
    server.protocol.data_received(REQUEST)
    (exchange,) = server.exchanges
    return server, transport, exchange


def body_of(sent: bytes) -> bytes:
    """Return the data of a response in chunks."""
    rest, found = sent.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return found


async def test_long_body_is_written_in_pieces_and_complete_after_the_last() -> None:
    server, transport, exchange = connected()
    exchange.respond(200, LONG)
    reads = 0
    while not exchange.response_complete:
        transport.read()
        reads += 1
    assert reads == 4 and max(transport.pieces) == LONG_BYTES
    assert transport.sent.endswith(b"\r\n\r\n" + LONG)
    server.protocol.data_received(REQUEST)
    assert len(server.exchanges) == 2, "the connection continues"


async def test_event_in_long_parts_is_one_chunk_and_what_follows_waits_behind_it() -> None:
    _, transport, exchange = connected()
    exchange.write_parts([b"data: ", LONG, b"\n\n"])
    exchange.write_framed(Frame(b"<", b">"), b"1")
    exchange.comment()
    exchange.write(b"2")
    exchange.end(b"3")
    assert not exchange.response_complete
    while not exchange.response_complete:
        assert exchange.protocol.is_stalled, "nothing waits for a client that has read all"
        transport.read()
    assert body_of(transport.sent) == b"data: " + LONG + b"\n\n<1>:\n\n23"
    assert max(transport.pieces) <= LONG_BYTES
    assert transport.sent.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("write", [Exchange.write, Exchange.end])
async def test_long_events_that_are_not_in_parts_are_written_in_pieces(write: Any) -> None:
    _, transport, exchange = connected()
    write(exchange, LONG)
    exchange.end()
    while not exchange.response_complete:
        transport.read()
    assert body_of(transport.sent) == LONG
    assert max(transport.pieces) == LONG_BYTES


async def test_client_that_reads_a_long_event_is_no_slow_reader() -> None:
    server, transport, exchange = connected()
    size = 2 * LIMITS.unsent_bytes
    exchange.write_parts([b"a" * size])
    exchange.end()
    while not exchange.response_complete:
        transport.read()
    assert body_of(transport.sent) == b"a" * size
    assert server.counts.slow_readers.value == 0


async def test_client_that_does_not_read_is_disconnected_for_what_follows_a_long_event() -> None:
    server, transport, exchange = connected()
    exchange.write_parts([LONG])
    for _ in range(LIMITS.unsent_bytes // LONG_BYTES):
        assert not transport.is_over
        exchange.write(b"x" * (LONG_BYTES - 100))
    exchange.write(b"x" * LONG_BYTES)
    assert transport.is_over and server.counts.slow_readers.value == 1


async def test_lost_connection_drops_what_was_not_read() -> None:
    server, transport, exchange = connected()
    left: list[bool] = []
    exchange.on_disconnect = lambda: left.append(True)
    exchange.write_parts([LONG])
    server.protocol.connection_lost(None)
    assert left == [True]
    before = len(transport.sent)
    exchange.resume()
    exchange.end()
    assert len(transport.sent) == before


async def test_short_parts_are_one_write() -> None:
    _, transport, exchange = connected()
    exchange.write_parts([b"a", b"b"])
    assert len(transport.pieces) == 1
    assert body_of(transport.sent) == b"ab"


async def test_handlers_of_clients_that_leave_together_run_in_several_iterations() -> None:
    now_s, left = 0.0, list[int]()
    shared = InputTurns(lambda: now_s)

    def leave(number: int) -> None:
        nonlocal now_s
        now_s += TURN_S / 2
        left.append(number)

    for number in range(5):
        server, _, exchange = connected()
        server.protocol.turns = shared
        exchange.on_disconnect = partial(leave, number)
        server.protocol.connection_lost(None)
        assert exchange.disconnected, "nothing more is written for it"
    assert left == [0, 1], "the others wait for a later iteration"
    await turns(1)
    assert left == [0, 1, 2, 3]
    await turns(1)
    assert left == [0, 1, 2, 3, 4]
