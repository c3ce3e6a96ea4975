import pytest

from dynamo.profiler.thorough.load import sampled
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.outcome import Flight
from dynamo.replay.report import RequestRow, rows_of


def rows(*times: tuple[float, float]) -> list[RequestRow]:
    """Return answered requests by the times of their first and last token, in milliseconds."""
    found = []
    for number, (first_ms, finished_ms) in enumerate(times):
        turn = Turn(f"r{number}", 100, 11, (number,), 0.0)
        flight = Flight(f"{number}", ReplaySession(f"s{number}", [turn]), 0, turn, 0.0)
        flight.placed_ms, flight.first_ms, flight.finished_ms = 0.0, first_ms, finished_ms
        found.append(flight)
    return rows_of(found)


def test_inter_token_latency_is_that_of_the_requests_that_start_last() -> None:
    """The first answer is delayed by the prompt of the second."""
    found = sampled(rows((40.0, 170.0), (60.0, 160.0)))
    assert found.answered == 2
    assert (found.ttft_ms, found.last_ttft_ms) == (pytest.approx(50), pytest.approx(60))
    assert found.itl_ms == pytest.approx(10)


def test_sample_without_answers_is_empty() -> None:
    assert sampled([]).answered == 0
