"""Gaps: what a subscriber missed, told once and exactly."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.runtime.event_plane.base import Backlog, Event, GapDetector, PublisherGone


@given(heard=st.lists(st.integers(0, 40), max_size=30))
def test_what_is_missed_and_what_is_heard_add_up(heard: list[int]) -> None:
    gaps = GapDetector()
    covered = 0
    for sequence in heard:
        missed = gaps.missed(7, sequence)
        if missed is None:
            assert sequence < covered
        else:
            covered += missed + 1
            assert covered == sequence + 1


def test_publishers_are_counted_apart_and_forgotten() -> None:
    gaps = GapDetector()
    assert gaps.missed(1, 4) == 4
    assert gaps.missed(2, 0) == 0
    assert gaps.missed(1, 4) is None
    gaps.forget(1)
    assert gaps.missed(1, 0) == 0


async def test_a_full_backlog_drops_the_newest_and_still_tells_who_left() -> None:
    backlog = Backlog(size_max=2)
    for sequence in range(5):
        backlog.add(1, sequence, b"")
    backlog.gone(1)
    assert backlog.dropped == 3
    assert [await anext(backlog) for _ in range(3)] == [Event(1, 0, b""), Event(1, 1, b""), PublisherGone(1)]


async def test_a_waiting_reader_is_woken_by_an_event_and_by_the_end() -> None:
    backlog = Backlog()
    reading = asyncio.ensure_future(anext(backlog))
    await turns()
    backlog.add(1, 0, b"x")
    assert await reading == Event(1, 0, b"x")
    ending = asyncio.ensure_future(anext(backlog, None))
    await turns()
    backlog.end()
    assert await ending is None
