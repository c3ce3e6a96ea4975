"""Unfinished frames are bounded in their sum and in time; the oldest one is always read on."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane.tcp.common import TcpMetrics
from dynamo.runtime.request_plane.tcp.unfinished import LOOK_S, UnfinishedFrames


class FakeTransport:
    def __init__(self) -> None:
        self.is_paused = False
        self.is_aborted = False

    def pause_reading(self) -> None:
        assert not self.is_aborted
        self.is_paused = True

    def resume_reading(self) -> None:
        assert not self.is_aborted
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_extra_info(self, name: str) -> None:
        return None


class Reader:
    def __init__(self) -> None:
        self.fake = FakeTransport()

    @property
    def transport(self) -> asyncio.Transport | None:
        return cast("asyncio.Transport", self.fake)


class FakeLoop:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "FakeLoop":
        self.due.append((self.now + delay_s, callback))
        return self

    def cancel(self) -> None:
        self.due.clear()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due and self.due[0][0] <= end:
            self.now, callback = self.due.pop(0)
            callback()
        self.now = end


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    made = FakeLoop()
    monkeypatch.setattr("dynamo.runtime.request_plane.tcp.unfinished.asyncio.get_running_loop", lambda: made)
    return made


def unfinished(bytes_max: int = 100) -> UnfinishedFrames:
    return UnfinishedFrames(bytes_max, TcpMetrics(MetricsRegistry()), timeout_s=30.0)


def test_unfinished_frame_watch_closes_a_connection_after_its_deadline(loop: FakeLoop) -> None:
    frames, slow, other = unfinished(), Reader(), Reader()
    frames.note(slow, 10, is_new=True)
    loop.advance(20)
    frames.note(slow, 20, is_new=False)
    frames.note(other, 10, is_new=True)
    loop.advance(12)
    assert slow.fake.is_aborted
    assert not other.fake.is_aborted
    assert frames.size == 10


def test_unfinished_frame_watch_restarts_the_deadline_for_the_next_frame(loop: FakeLoop) -> None:
    frames, busy = unfinished(), Reader()
    for _ in range(10):
        frames.note(busy, 10, is_new=True)
        loop.advance(20)
    assert not busy.fake.is_aborted
    frames.note(busy, 0, is_new=True)
    assert (frames.size, len(frames)) == (0, 0)


def test_unfinished_frame_watch_pauses_connections_beyond_the_bound(loop: FakeLoop) -> None:
    frames, first, second, third = unfinished(), Reader(), Reader(), Reader()
    frames.note(first, 60, is_new=True)
    frames.note(second, 60, is_new=True)
    frames.note(third, 60, is_new=True)
    assert [one.fake.is_paused for one in (first, second, third)] == [False, True, True]
    frames.note(first, 90, is_new=False)
    assert not first.fake.is_paused, "the oldest frame is read on"
    loop.advance(29)
    frames.note(first, 0, is_new=True)
    assert [one.fake.is_paused for one in (second, third)] == [False, True]
    loop.advance(29)
    assert not second.fake.is_aborted, "waiting for the others does not count"
    loop.advance(2 + LOOK_S)
    assert second.fake.is_aborted
    assert not third.fake.is_paused


def test_unfinished_frame_watch_ignores_closed_connections(loop: FakeLoop) -> None:
    frames, late = unfinished(), Reader()
    frames.note(Reader(), 10, is_new=True)
    frames.close()
    frames.note(late, 10, is_new=True)
    assert not loop.due
    assert len(frames) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 70), st.booleans(), st.floats(0, 20)), max_size=60))
def test_unfinished_frame_watch_sums_sizes_and_never_pauses_the_oldest(
    steps: list[tuple[int, int, bool, float]],
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        loop = FakeLoop()
        patched.setattr("dynamo.runtime.request_plane.tcp.unfinished.asyncio.get_running_loop", lambda: loop)
        frames = unfinished()
        readers = [Reader() for _ in range(6)]
        for index, size, is_new, seconds in steps:
            reader = readers[index]
            if reader.fake.is_aborted:
                continue
            if reader.fake.is_paused:
                frames.forget(reader)
            else:
                before = frames._held.get(reader)
                grown = size if is_new or size == 0 or before is None else max(size, before.size)
                frames.note(reader, grown, is_new=is_new)
            loop.advance(seconds)
            held = frames._held
            assert frames.size == sum(one.size for one in held.values())
            assert all(held[one].is_paused == one.fake.is_paused for one in readers if one in held)
            assert not any(one.fake.is_paused for one in readers if one not in held)
            if held:
                assert not next(iter(held.values())).is_paused
            if frames.size <= 100:
                assert not any(one.is_paused for one in held.values()), "it waits though there is room"
