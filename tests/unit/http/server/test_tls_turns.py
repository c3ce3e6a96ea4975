"""Turns of TLS connections, with a clock, a loop and a TLS protocol made for the test."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.http.server.paced_input import TURN_S
from dynamo.http.server.tls_turns import HANDSHAKE_S, SLICE_BYTES, TlsConnection, TlsTurns, tls_protocol


class StepLoop:
    """A loop whose iterations and timers are run by the test."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []
        self.timers: list[SimpleNamespace] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.ready.append(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        timer = SimpleNamespace(delay_s=delay_s, call=call, is_cancelled=False)
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        self.timers.append(timer)
        return timer

    def iterate(self) -> None:
        ready, self.ready = self.ready, []
        for call in ready:
            call()


class Socket:
    """A transport that only notes whether it reads."""

    is_reading = True
    is_aborted = False

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class Tls:
    """A TLS protocol that takes so long for each piece of data."""

    def __init__(self, bench: "Bench") -> None:
        self.bench = bench
        self.buffer = bytearray(1 << 18)
        self.received: list[bytes] = []
        self.transport: Any = None
        self.pauses = False
        self.calls: list[Any] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, size: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, size: int) -> None:
        self.received.append(bytes(self.buffer[:size]))
        self.bench.now_s += self.bench.cost_s
        if self.pauses:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        return True

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append(error)
        self.bench.now_s += self.bench.cost_s


class Bench:
    """Connections of one listener."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost_s: float = TURN_S * 0.26) -> None:
        self.now_s = 1.0
        self.cost_s = cost_s
        self.loop: Any = StepLoop()
        monkeypatch.setattr("asyncio.get_running_loop", lambda: self.loop)
        self.turns = TlsTurns(lambda: self.now_s)
        self.made: list[Tls] = []

    def make(self) -> Tls:
        self.made.append(Tls(self))
        return self.made[-1]

    def connect(self) -> TlsConnection:
        connection = TlsConnection(self.make, self.turns, self.loop)
        connection.connection_made(Socket())  # type: ignore[arg-type]
        return connection

    def send(self, connection: TlsConnection, data: bytes) -> None:
        connection.get_buffer(-1)[: len(data)] = data
        connection.buffer_updated(len(data))

    def received(self) -> int:
        return sum(len(one.received) for one in self.made)


def is_reading(connection: TlsConnection) -> bool:
    return connection._transport.is_reading  # type: ignore[no-any-return]


def test_data_that_arrives_alone_is_passed_on_at_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    one = bench.connect()
    for data in (b"hello", b"x" * SLICE_BYTES):
        bench.send(one, data)
        assert bench.made[0].received[-1] == data
        assert is_reading(one)
        bench.loop.iterate()
        bench.loop.iterate()
    assert not bench.loop.ready  # An idle listener wakes no loop.


def test_a_connection_without_data_has_no_tls_protocol_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    one, other = bench.connect(), bench.connect()
    bench.send(other, b"a")
    assert len(bench.made) == 1
    assert [timer.delay_s for timer in bench.loop.timers] == [HANDSHAKE_S, HANDSHAKE_S]
    assert [timer.is_cancelled for timer in bench.loop.timers] == [False, True]
    assert one.eof_received() is None
    bench.loop.timers[0].call()
    assert one._transport.is_aborted


def test_handshakes_at_the_same_time_are_spread_over_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    connections = [bench.connect() for _ in range(100)]
    for one in connections:
        bench.send(one, b"first")
    seen = [bench.received()]
    assert [is_reading(one) for one in connections] == [True] * 4 + [False] * 96
    while bench.received() < 100:
        bench.loop.iterate()
        seen.append(bench.received())
    assert max(after - before for before, after in pairwise(seen)) == 4
    assert [one.transport for one in bench.made] == [one._transport for one in connections]  # In order of arrival.
    assert all(map(is_reading, connections))


def test_records_of_one_connection_are_spread_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, cost_s=TURN_S)
    one, other = bench.connect(), bench.connect()
    bench.send(one, b"1")
    bench.send(one, b"2")
    assert not is_reading(one)
    bench.send(one, b"3")  # A read that the transport had begun.
    bench.send(other, b"4")
    assert bench.received() == 1
    bench.loop.iterate()
    assert b"".join(bench.made[0].received) == b"123"
    assert is_reading(one)
    assert not is_reading(other)
    bench.loop.iterate()
    assert bench.made[1].received == [b"4"]


def test_reading_stays_paused_if_the_tls_protocol_paused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, cost_s=TURN_S)
    one = bench.connect()
    bench.send(one, b"1")
    bench.made[0].pauses = True
    bench.send(one, b"2")
    bench.loop.iterate()
    assert b"".join(bench.made[0].received) == b"12"
    assert not is_reading(one)


def test_thousands_of_lost_connections_are_ended_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    connections = [bench.connect() for _ in range(50)]
    for one in connections:
        bench.send(one, b"a")
        bench.loop.iterate()
        bench.loop.iterate()
    error = ConnectionResetError()
    for one in connections:
        one.connection_lost(error)
    assert sum(one.calls == [error] for one in bench.made) == 4
    bench.loop.iterate()
    assert sum(one.calls == [error] for one in bench.made) == 8
    for _ in range(20):
        bench.loop.iterate()
    assert all(one.calls == [error] for one in bench.made)


def test_a_connection_that_is_lost_before_its_turn_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, cost_s=TURN_S)
    first, late = bench.connect(), bench.connect()
    bench.send(first, b"1")
    bench.send(late, b"2")
    late.connection_lost(None)
    bench.loop.iterate()
    assert len(bench.made) == 1


def test_flow_control_reaches_the_tls_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    one = bench.connect()
    one.pause_writing()
    one.resume_writing()
    bench.send(one, b"a")
    one.pause_writing()
    one.resume_writing()
    assert bench.made[0].calls == ["pause", "resume"]
    assert one.eof_received()


def test_the_loops_own_tls_protocol_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Any = SimpleNamespace()
    assert tls_protocol(loop) is asyncio.sslproto.SSLProtocol
    uvloop = pytest.importorskip("uvloop.loop")
    other = uvloop.Loop()
    assert tls_protocol(other) is uvloop.SSLProtocol
    other.close()
    monkeypatch.setattr("asyncio.sslproto.SSLProtocol", SimpleNamespace())
    assert tls_protocol(loop) is None
