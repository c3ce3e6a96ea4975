"""What both TCP framings share."""

import asyncio
import socket

from dynamo.runtime.request_plane.tcp.common import AckWatch, TcpLimits, tune


class Timers:
    """A loop's clock and timers, turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: object) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback)

    def call_at(self, when: float, callback: object) -> asyncio.TimerHandle:
        entry = (when, callback)
        self.timers.append(entry)
        timers = self.timers

        class Handle:
            def cancel(self) -> None:
                timers.remove(entry)

        return Handle()  # type: ignore[return-value]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for entry in [entry for entry in self.timers if entry[0] <= self.now]:
            self.timers.remove(entry)
            entry[1]()  # type: ignore[operator]


async def watch(expired: list[str]) -> tuple[AckWatch[str], Timers]:
    made: AckWatch[str] = AckWatch(10.0, expired.append)
    timers = Timers()
    made._loop = timers  # type: ignore[assignment]
    return made, timers


async def test_expiry_timer_expires_only_unacknowledged_entries() -> None:
    expired: list[str] = []
    acks, timers = await watch(expired)
    acks.add("a")
    timers.advance(4)
    acks.add("b")
    acks.add("c")
    acks.discard("b")
    assert acks.waited_s == 4
    timers.advance(6)
    assert expired == ["a"]
    assert acks.waited_s == 6
    timers.advance(3.9)
    assert expired == ["a"]
    timers.advance(0.1)
    assert expired == ["a", "c"]
    assert acks.waited_s == 0
    assert timers.timers == []


async def test_expiry_timer_uses_one_loop_timer() -> None:
    acks, timers = await watch([])
    for number in range(100):
        acks.add(str(number))
    assert len(timers.timers) == 1


async def test_expiry_timer_close_returns_waiting_entries_without_expiring_them() -> None:
    expired: list[str] = []
    acks, timers = await watch(expired)
    acks.add("a")
    acks.add("b")
    acks.discard("a")
    assert acks.close() == ["b"]
    timers.advance(100)
    assert expired == []


async def test_expiry_timer_entry_may_start_again_when_it_expires() -> None:
    again: list[str] = []

    def expire(name: str) -> None:
        again.append(name)
        if len(again) == 1:
            acks.add("second")

    acks: AckWatch[str] = AckWatch(10.0, expire)
    timers = Timers()
    acks._loop = timers  # type: ignore[assignment]
    acks.add("first")
    timers.advance(10)
    timers.advance(10)
    assert again == ["first", "second"]


def test_tcp_response_limit_equals_request_limit_with_envelope() -> None:
    limits = TcpLimits(message_bytes_max=100)
    assert limits.answer_bytes_max > 100
    assert limits.write_buffer_bytes_max >= 2 * 100


class PairTransport:
    def __init__(self, sock: socket.socket | None) -> None:
        self.sock = sock
        self.high = 0

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.sock


def test_tcp_connection_disables_delay_and_bounds_unsent_data() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        transport = PairTransport(sock)
        tune(transport, 7)  # type: ignore[arg-type]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert transport.high == 7
    tune(PairTransport(None), 7)  # type: ignore[arg-type]


async def test_expiry_timer_callback_may_remove_another_entry() -> None:
    expired: list[str] = []

    def expire(call: str) -> None:
        expired.append(call)
        acks.discard("other")

    acks: AckWatch[str] = AckWatch(10.0, expire)
    timers = Timers()
    acks._loop = timers  # type: ignore[assignment]
    acks.add("one")
    acks.add("other")
    timers.advance(10)
    assert expired == ["one"]
