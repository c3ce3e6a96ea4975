"""Whether a worker that the registry lost still lives: who is asked, how often, and what follows."""

import asyncio
from collections.abc import Callable, Collection

import pytest

from dynamo.core.errors import ConnectionTimeout, Disconnected, WorkerUnavailable
from dynamo.runtime.request_plane.base import Item
from dynamo.runtime.request_plane.tcp.liveness_probe import INTERVAL_S, LivenessProbe


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


async def test_one_question_is_asked_at_a_time() -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.suspect(1)
    assert connection.questions == 1
    connection.probe.on_error(WorkerUnavailable("unknown endpoint "))
    connection.probe.suspect(1)
    assert connection.questions == 1, "it has just shown that it lives"


async def test_who_lives_is_asked_again_until_its_calls_are_over() -> None:
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


async def test_who_does_not_answer_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.on_error(ConnectionTimeout("no acknowledgement within 10 s"))
    assert connection.is_aborted
    assert "host:1" in caplog.text


async def test_a_connection_that_broke_is_asked_nothing() -> None:
    connection = FakeConnection()
    connection.probe.suspect(1)
    connection.probe.on_error(Disconnected("broke"))
    assert connection.timer is None
    connection.probe.suspect(1)
    connection.probe.on_error(WorkerUnavailable("unknown endpoint "))
    connection.probe.close()
    assert connection.timer is None
    assert not connection.is_aborted
