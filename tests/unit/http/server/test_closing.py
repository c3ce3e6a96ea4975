"""A connection lingers after its last response within bounds, and a half-closed one is probed a few times."""

import asyncio
from typing import Any
from unittest.mock import Mock

from dynamo.http.server.closing import (
    LINGER_BYTES_MAX,
    LINGER_IDLE_S,
    LINGER_S,
    PROBES_S,
    HalfClosedProbes,
    Lingering,
)


def test_lingering_is_over_when_the_client_sends_nothing_or_for_too_long() -> None:
    lingering = Lingering(100.0, 0)
    assert not lingering.is_over(100.0 + LINGER_IDLE_S)
    assert lingering.is_over(100.0 + LINGER_IDLE_S + 0.1)
    at = 100.0
    while at < 100.0 + LINGER_S:
        at += 1
        lingering.drop(1, at)
        assert lingering.is_over(at) is (at > 100.0 + LINGER_S)
    assert lingering.is_over(at + 0.1)


def test_dropped_bytes_are_bounded() -> None:
    lingering = Lingering(0.0, 10)
    lingering.drop(LINGER_BYTES_MAX - 10, 1.0)
    assert not lingering.is_too_much
    lingering.drop(1, 2.0)
    assert lingering.is_too_much


class Loop:
    """Event loop that records the delays, and runs the next call on demand."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.next: Any = None

    def call_later(self, delay_s: float, call: Any, *args: Any) -> Mock:
        self.delays.append(delay_s)
        self.next = lambda: call(*args)
        return Mock(spec=asyncio.TimerHandle)


def test_half_closed_connection_is_probed_at_once_and_at_the_given_times() -> None:
    loop, probe = Loop(), Mock()
    HalfClosedProbes(loop, probe, lambda: False)  # type: ignore[arg-type]
    while len(loop.delays) < len(PROBES_S) - 1:
        loop.next()
    loop.next()
    assert probe.call_count == len(PROBES_S)
    assert sum(loop.delays) == PROBES_S[-1]


def test_connection_that_closes_is_probed_no_more() -> None:
    loop, probe = Loop(), Mock()
    probes = HalfClosedProbes(loop, probe, lambda: True)  # type: ignore[arg-type]
    assert (probe.call_count, loop.delays) == (1, [])
    probes.cancel()
