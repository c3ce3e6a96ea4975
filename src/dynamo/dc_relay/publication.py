"""PoolPublication: the sequence of one pool's filter changes, and its subscribers.

A subscriber receives the frames of one snapshot, then every delta. Changes are collected for a short time, or for a
number of events, and published as one delta. A subscriber whose queue is full is ended: it must begin again with a
snapshot.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from dynamo.dc_relay.bucket_images import DELTA_IMAGES_MAX, delta, snapshot_chunks
from dynamo.dc_relay.config import RelayLimits
from dynamo.dc_relay.pool_state import PoolState
from dynamo.protocols.kv_events import WorkerKvEvent


class FilterFrameKind(IntEnum):
    """Kind of a frame, as on the wire."""

    SNAPSHOT_CHUNK = 1
    DELTA = 2
    HEARTBEAT = 3


@dataclass(frozen=True, slots=True)
class FilterFrame:
    """One message about a pool's filter."""

    kind: FilterFrameKind
    base_sequence: int
    sequence: int
    payload: bytes = b""


class SubscriberEnded(Exception):
    """End of a subscription by the relay."""

    def __init__(self, *, is_lagged: bool) -> None:
        super().__init__("the subscriber does not keep up" if is_lagged else "the pool is gone")
        self.is_lagged = is_lagged


class PoolSubscriber:
    """Queue of one subscriber."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._frames: deque[FilterFrame] = deque()
        self._bytes = 0
        self._ended: SubscriberEnded | None = None
        self._wake = asyncio.Event()

    def put(self, frame: FilterFrame) -> None:
        """Queue a frame; end the subscription if the queue is full."""
        if self._ended is not None:
            return
        too_many = len(self._frames) >= self._limits.publication_queue_capacity
        if too_many or self._bytes + len(frame.payload) > self._limits.publication_queue_bytes:
            self.end(is_lagged=True)
            return
        self._frames.append(frame)
        self._bytes += len(frame.payload)
        self._wake.set()

    def end(self, *, is_lagged: bool = False) -> None:
        """End the subscription."""
        self._frames.clear()
        self._ended = self._ended or SubscriberEnded(is_lagged=is_lagged)
        self._wake.set()

    async def next(self) -> FilterFrame:
        """Return the next frame. Raises `SubscriberEnded`."""
        while True:
            if self._ended is not None:
                raise self._ended
            if self._frames:
                frame = self._frames.popleft()
                self._bytes -= len(frame.payload)
                return frame
            self._wake.clear()
            await self._wake.wait()


class PoolPublication:
    """Receiver of one pool's KV events (`KvEventListener`), and publisher of its filter."""

    def __init__(self, dc_id: int, bucket_count: int, limits: RelayLimits) -> None:
        self.state = PoolState(bucket_count)
        self.sequence = 0
        self._dc_id = dc_id
        self._limits = limits
        self._events = 0
        self._timer: asyncio.TimerHandle | None = None
        self._subscribers: set[PoolSubscriber] = set()

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def apply(self, kv_event: WorkerKvEvent) -> bool:
        """Apply an event; it is published soon."""
        is_applied = self.state.apply(kv_event)
        self._changed()
        return is_applied

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Remove a rank's blocks."""
        self.state.forget(worker_id, dp_rank)
        self._changed()

    def flush(self) -> None:
        """Publish the collected changes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._events = 0
        changed = self.state.filter.changed
        if not changed:
            return
        base, self.sequence = self.sequence, self.sequence + 1
        if len(changed) > DELTA_IMAGES_MAX:
            for frame in self._snapshot(base):
                self._send(frame)
        else:
            self._send(FilterFrame(FilterFrameKind.DELTA, base, self.sequence, self._delta(base)))
        changed.clear()

    def subscribe(self) -> tuple[Iterator[FilterFrame], PoolSubscriber]:
        """Return the frames of a snapshot, and a subscriber that receives the changes after it."""
        self.flush()
        subscriber = PoolSubscriber(self._limits)
        self._subscribers.add(subscriber)
        return self._snapshot(self.sequence), subscriber

    def unsubscribe(self, subscriber: PoolSubscriber) -> None:
        """Remove a subscriber."""
        self._subscribers.discard(subscriber)

    def close(self) -> None:
        """End every subscription."""
        if self._timer is not None:
            self._timer.cancel()
        for subscriber in self._subscribers:
            subscriber.end()

    def _changed(self) -> None:
        self._events += 1
        if self._events >= self._limits.publication_threshold:
            self.flush()
        elif self._timer is None:
            delay_s = self._limits.publication_delay_ms / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.flush)

    def _delta(self, base: int) -> bytes:
        return delta(self.state.filter, self._dc_id, base, self.sequence) if self._subscribers else b""

    def _snapshot(self, base: int) -> Iterator[FilterFrame]:
        image, sequence = self.state.filter.image(), self.sequence
        return (
            FilterFrame(FilterFrameKind.SNAPSHOT_CHUNK, base, sequence, chunk)
            for chunk in snapshot_chunks(image, self._dc_id, sequence)
        )

    def _send(self, frame: FilterFrame) -> None:
        for subscriber in self._subscribers:
            subscriber.put(frame)
