"""RequestFrames: request stream received while the response is written (`serve_bidirectional_endpoint`)."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

UNREAD_MAX = 256  # Frames; reading pauses beyond, so that a handler that does not read cannot exhaust memory.


class FrameTap(Protocol):
    """Source of frames."""

    def pause_reading(self) -> None:
        """Pause the source."""

    def resume_reading(self) -> None:
        """Resume the source."""

    def close(self) -> None:
        """Close the source: no further frames are needed."""


class RequestFrames:
    """Request frames in order, still encoded; used on the loop's thread only."""

    def __init__(self) -> None:
        self._unread: deque[bytes] = deque()
        self._tap: FrameTap | None = None
        self._is_over = False
        self._is_paused = False
        self._wake: asyncio.Future[None] | None = None

    def follow(self, tap: FrameTap) -> None:
        """Set the source of the following frames."""
        self._tap = tap

    def add(self, frame: bytes) -> None:
        """Append a received frame."""
        self._unread.append(frame)
        if len(self._unread) >= UNREAD_MAX and not self._is_paused and self._tap is not None:
            self._is_paused = True
            self._tap.pause_reading()
        self._rouse()

    def end(self) -> None:
        """Mark the end of the stream."""
        self._is_over = True
        self._rouse()

    def close(self) -> None:
        """Stop reading and close the source."""
        self.end()
        self._unread.clear()
        if self._tap is not None:
            self._tap.close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._unread:
            if self._is_over:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        frame = self._unread.popleft()
        if self._is_paused and len(self._unread) <= UNREAD_MAX // 2 and self._tap is not None:
            self._is_paused = False
            self._tap.resume_reading()
        return frame

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
