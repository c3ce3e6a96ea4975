"""Liveness of workers without a discovery record: probed workers, intervals, and results."""

import asyncio
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConnectionTimeout, Disconnected, WorkerUnavailable
from dynamo.runtime.request_plane.base import Item
from dynamo.runtime.request_plane.tcp.liveness_probe import INTERVAL_S, LOOKS, AckWatch, KeepAlive, LivenessProbe


class FakeConnection:
    """A connection with calls to some instances; the test is its worker and its loop's timer."""

    address = "host:1"

    def __init__(self) -> None:
        self.calls = {1}
        self.questions = 0
        self.is_aborted = False
        self.timer: tuple[float, Callable[[], None]] | None = None
        self.probe = LivenessProbe(self)
        self.probe._loop = self  # type: ignore[assignment]

    def send_probe(self, probe: LivenessProbe) -> None:
        assert probe is self.probe
        self.questions += 1

    def serves(self, instances: Collection[int]) -> bool:
        return bool(self.calls & set(instances))

    def abort(self) -> None:
        self.is_aborted = True

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.timer = (delay_s, callback)
        connection = self

        class Handle:
            def cancel(self) -> None:
                connection.timer = None

        return Handle()  # type: ignore[return-value]

    def wait(self) -> None:
        """The timer rings."""
        assert self.timer is not None
        (delay_s, callback), self.timer = self.timer, None
        assert delay_s == INTERVAL_S
        callback()


async def test_liveness_probe_sends_one_probe_at_a_time() -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.suspect(1)
    assert connection.questions == 1
    connection.probe.on_error(WorkerUnavailable("unknown endpoint "))
    connection.probe.suspect(1)
    assert connection.questions == 1, "it has just shown that it lives"


async def test_liveness_probe_repeats_until_the_calls_end() -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.on_error(WorkerUnavailable("unknown endpoint "))
    connection.wait()
    assert connection.questions == 2
    connection.probe.on_token(1)
    connection.probe.on_item(Item(None))
    connection.probe.on_end()
    connection.calls.clear()
    connection.wait()
    assert (connection.questions, connection.timer, connection.is_aborted) == (2, None, False)
    connection.calls.add(1)
    connection.probe.suspect(2)
    assert connection.questions == 2, "that doubt is over"


async def test_liveness_probe_closes_a_connection_without_answer(caplog: pytest.LogCaptureFixture) -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.on_error(ConnectionTimeout("no acknowledgement within 10 s"))
    assert connection.is_aborted
    assert "host:1" in caplog.text


async def test_liveness_probe_sends_no_probe_on_a_broken_connection() -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.on_error(Disconnected("broke"))
    assert connection.timer is None
    connection.probe.suspect(1)
    connection.probe.on_error(WorkerUnavailable("unknown endpoint "))
    connection.probe.close()
    assert connection.timer is None
    assert not connection.is_aborted


def test_active_connection_is_never_probed() -> None:
    keep_alive = KeepAlive()
    assert not any(keep_alive.look(received) for received in range(1, 50))
    assert not keep_alive.is_silent(49)


def test_silent_connection_is_probed_once_before_it_counts_as_silent() -> None:
    keep_alive = KeepAlive()
    keep_alive.look(1)
    requested = [keep_alive.look(1) for _ in range(LOOKS - 1)]
    assert requested == [True] + [False] * (LOOKS - 2)
    assert keep_alive.is_silent(1)


def test_late_response_resets_the_probe_which_repeats_later() -> None:
    keep_alive = KeepAlive()
    keep_alive.look(1)
    for _ in range(LOOKS - 2):
        keep_alive.look(1)
    assert not keep_alive.is_silent(1)
    assert not keep_alive.look(2)
    assert keep_alive.look(2), "quiet again: it is asked again"
    assert not keep_alive.is_silent(2)


def test_connection_is_not_silent_after_the_first_received_message() -> None:
    keep_alive = KeepAlive()
    for _ in range(LOOKS):
        keep_alive.look(0)
    assert keep_alive.is_silent(0)
    assert not keep_alive.is_silent(1)


@given(st.lists(st.booleans(), max_size=100))
def test_connection_is_silent_after_consecutive_checks_without_messages(looks: list[bool]) -> None:
    keep_alive, received, quiet = KeepAlive(), 0, 0
    for speaks in looks:
        received += speaks
        quiet = 0 if speaks else quiet + 1
        assert keep_alive.look(received) == (quiet == 1)
        assert keep_alive.is_silent(received) == (quiet >= LOOKS - 1)


class Timers:
    """Clock and timers of a loop, which the test advances."""

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
