"""Whether a worker that the registry lost still lives: who is asked, how often, and what follows."""

import asyncio
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConnectionTimeout, Disconnected, WorkerUnavailable
from dynamo.runtime.request_plane.base import Item
from dynamo.runtime.request_plane.tcp.liveness_probe import INTERVAL_S, LOOKS, KeepAlive, LivenessProbe


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


async def test_liveness_probe_sends_nothing_on_a_broken_connection() -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.on_error(Disconnected("broke"))
    assert connection.timer is None
    connection.probe.suspect(1)
    connection.probe.on_error(WorkerUnavailable("unknown endpoint "))
    connection.probe.close()
    assert connection.timer is None
    assert not connection.is_aborted


def test_who_speaks_is_never_asked() -> None:
    keep_alive = KeepAlive()
    assert not any(keep_alive.look(heard) for heard in range(1, 50))
    assert not keep_alive.is_silent(49)


def test_who_says_nothing_is_asked_once_and_then_given_time() -> None:
    keep_alive = KeepAlive()
    keep_alive.look(1)
    asked = [keep_alive.look(1) for _ in range(LOOKS - 1)]
    assert asked == [True] + [False] * (LOOKS - 2)
    assert keep_alive.is_silent(1)


def test_who_answers_at_the_last_moment_lives_and_is_asked_again_later() -> None:
    keep_alive = KeepAlive()
    keep_alive.look(1)
    for _ in range(LOOKS - 2):
        keep_alive.look(1)
    assert not keep_alive.is_silent(1)
    assert not keep_alive.look(2)
    assert keep_alive.look(2), "quiet again: it is asked again"
    assert not keep_alive.is_silent(2)


def test_the_silence_is_over_with_the_first_word_not_with_the_next_look() -> None:
    keep_alive = KeepAlive()
    for _ in range(LOOKS):
        keep_alive.look(0)
    assert keep_alive.is_silent(0)
    assert not keep_alive.is_silent(1)


@given(st.lists(st.booleans(), max_size=100))
def test_silence_is_so_many_looks_in_a_row_without_a_word(looks: list[bool]) -> None:
    keep_alive, heard, quiet = KeepAlive(), 0, 0
    for speaks in looks:
        heard += speaks
        quiet = 0 if speaks else quiet + 1
        assert keep_alive.look(heard) == (quiet == 1)
        assert keep_alive.is_silent(heard) == (quiet >= LOOKS - 1)
