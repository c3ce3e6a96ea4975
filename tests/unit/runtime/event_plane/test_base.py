"""Gaps: the events that a subscriber missed, reported once and exactly."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.runtime.event_plane.base import Backlog, Event, GapDetector, PublisherGone


@given(received=st.lists(st.integers(0, 40), max_size=30))
def test_event_subscriber_counts_received_and_missed_events(received: list[int]) -> None:
    gaps = GapDetector()
    covered = 0
    for sequence in received:
        missed = gaps.missed(7, sequence)
        if missed is None:
            assert sequence < covered
        else:
            covered += missed + 1
            assert covered == sequence + 1


def test_gap_detector_counts_publishers_separately_and_resets_after_forget() -> None:
    gaps = GapDetector()
    assert gaps.missed(1, 4) == 4
    assert gaps.missed(2, 0) == 0
    assert gaps.missed(1, 4) is None
    gaps.forget(1)
    assert gaps.missed(1, 0) == 0


async def test_event_subscriber_drops_the_newest_when_full_and_still_reports_departures() -> None:
    backlog = Backlog(size_max=2)
    for sequence in range(5):
        backlog.add(1, sequence, b"")
    backlog.gone(1)
    assert backlog.dropped == 3
    assert [await anext(backlog) for _ in range(3)] == [Event(1, 0, b""), Event(1, 1, b""), PublisherGone(1)]


async def test_event_subscriber_wakes_a_waiting_reader_on_event_and_on_close() -> None:
    backlog = Backlog()
    reading = asyncio.ensure_future(anext(backlog))
    await turns()
    backlog.add(1, 0, b"x")
    assert await reading == Event(1, 0, b"x")
    ending = asyncio.ensure_future(anext(backlog, None))
    await turns()
    backlog.end()
    assert await ending is None
