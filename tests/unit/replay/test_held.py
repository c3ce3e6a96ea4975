"""HeldRequests: expired requests, and the time of the next check."""

from dynamo.replay.held import HeldRequests
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.outcome import Flight

TURN = Turn("r", 9, 9, (1,))


def flight(key: str) -> Flight:
    return Flight(key, ReplaySession("s", [TURN]), 0, TURN, 0.0)


def test_one_timeout_is_scheduled_for_the_request_that_waits_longest() -> None:
    held = HeldRequests(100.0)
    assert held.add(flight("a"), 0.0) == 100.0
    assert held.add(flight("b"), 30.0) is None
    late, next_ms = held.expire(100.0)
    assert [one.key for one in late] == ["a"]
    assert next_ms == 130.0
    assert held.pop("b").key == "b"
    assert held.expire(130.0) == ([], None)
    assert held.add(flight("c"), 140.0) == 240.0
