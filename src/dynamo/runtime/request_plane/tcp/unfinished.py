"""Incomplete frames: bounds on their total size and age over all connections of a process."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from dynamo.runtime.request_plane.tcp.common import TcpMetrics, peer_of

logger = logging.getLogger(__name__)

FRAME_TIMEOUT_S = 30.0  # From a frame's first byte to its last: the largest frame at 1 MB/s.
FRAMES_HELD_MAX = 8  # Frames of the largest size; further connections pause, except that of the oldest frame.
LOOK_S = 1.0


class FrameReader(Protocol):
    """Connection that reads frames."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """Return the transport, None once it is closed."""


@dataclass(slots=True)
class _Held:
    size: int
    since: float
    is_paused: bool = False


class UnfinishedFrames:
    """Incomplete frames of one process. Reading pauses when they exceed the limit; a late frame closes its connection.

    The connection of the oldest frame is never paused, so that its frame completes or times out.
    """

    def __init__(self, bytes_max: int, metrics: TcpMetrics, timeout_s: float = FRAME_TIMEOUT_S) -> None:
        self._bytes_max = bytes_max
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._held: dict[FrameReader, _Held] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.size = 0
        """Total size in bytes."""

    def __len__(self) -> int:
        return len(self._held)

    def note(self, reader: FrameReader, size: int, *, is_new: bool) -> None:
        """Set the size of a connection's incomplete frame; `is_new` if it is another frame than before."""
        if size == 0 or self._is_closed:
            self.forget(reader)
            return
        held = self._held.get(reader)
        if held is None or is_new:
            self.forget(reader)
            held = self._held[reader] = _Held(0, self._loop.time())
            if self._timer is None:
                self._timer = self._loop.call_later(LOOK_S, self._look)
        self.size += size - held.size
        held.size = size
        if self.size > self._bytes_max and next(iter(self._held)) is not reader:
            held.is_paused = True
            if reader.transport is not None and not reader.transport.is_closing():
                reader.transport.pause_reading()

    def forget(self, reader: FrameReader) -> None:
        """Remove a connection without an incomplete frame."""
        held = self._held.pop(reader, None)
        if held is None:
            return
        self.size -= held.size
        if held.is_paused:
            _read_on(reader)
        self._resume()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held.clear()

    def _resume(self) -> None:
        for reader, held in self._held.items():
            is_oldest = next(iter(self._held)) is reader
            if held.is_paused and (is_oldest or self.size <= self._bytes_max):
                held.is_paused, held.since = False, self._loop.time()
                _read_on(reader)
            if self.size > self._bytes_max:
                return

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for reader, held in list(self._held.items()):
            if held.is_paused or now - held.since < self._timeout_s:
                continue
            self._metrics.errors.inc()
            logger.warning(
                "closing connection of %s: %d bytes of a frame that was not complete within %g s",
                peer_of(reader.transport),
                held.size,
                self._timeout_s,
            )
            self.forget(reader)
            if reader.transport is not None:
                reader.transport.abort()
        if self._held:
            self._timer = self._loop.call_later(LOOK_S, self._look)


def _read_on(reader: FrameReader) -> None:
    if reader.transport is not None and not reader.transport.is_closing():
        reader.transport.resume_reading()
