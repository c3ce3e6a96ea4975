"""Frames are read in order, a caller that sends too fast is paused, and no frame follows the end."""

import asyncio

from tests.settle import turns

from dynamo.runtime.request_plane.request_frames import UNREAD_MAX, RequestFrames


class Tap:
    def __init__(self) -> None:
        self.outputs: list[str] = []

    def pause_reading(self) -> None:
        self.outputs.append("pause")

    def resume_reading(self) -> None:
        self.outputs.append("resume")

    def close(self) -> None:
        self.outputs.append("close")


async def test_request_frames_are_read_from_the_first_to_the_last() -> None:
    frames = RequestFrames()
    frames.add(b"1")
    reading = asyncio.ensure_future(_all(frames))
    await turns()
    frames.add(b"2")
    await turns()
    frames.add(b"3")
    frames.end()
    assert await asyncio.wait_for(reading, 5) == [b"1", b"2", b"3"]


async def test_request_frames_apply_backpressure_to_the_caller() -> None:
    frames, tap = RequestFrames(), Tap()
    frames.follow(tap)
    for number in range(UNREAD_MAX + 1):
        frames.add(b"%d" % number)
    assert tap.outputs == ["pause"]
    for _ in range(UNREAD_MAX // 2 + 1):
        await anext(aiter(frames))
    assert tap.outputs == ["pause", "resume"]


async def test_request_frames_are_dropped_when_no_longer_read() -> None:
    frames, tap = RequestFrames(), Tap()
    frames.follow(tap)
    frames.add(b"1")
    frames.close()
    assert tap.outputs == ["close"]
    assert await _all(frames) == []


async def _all(frames: RequestFrames) -> list[bytes]:
    return [frame async for frame in frames]
