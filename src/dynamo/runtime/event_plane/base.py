"""Interface of an event plane: publishers number their events; subscribers receive them and detect gaps.

An event is bytes about an endpoint, under a topic. Delivery is best effort and in order per publisher; lost events are
reported as a gap, so that the subscriber can request a snapshot from the source.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import Struct

from dynamo.protocols.discovery import EndpointId

BACKLOG_MAX = 100_000  # Unread events of a slow subscriber, as in Dynamo; beyond it the newest are dropped.


class Event(Struct, frozen=True):
    """Received event."""

    publisher_id: int
    sequence: int
    """Sequence number of the publisher, from 0."""
    payload: bytes
    missed: int = 0
    """Number of lost events of this publisher between the previous event and this one."""


class PublisherGone(Struct, frozen=True):
    """Notification that a publisher left the registry and sends no further events."""

    publisher_id: int


class Publisher(Protocol):
    """Publisher of one topic of one endpoint."""

    id: int

    def publish(self, payload: bytes) -> None:
        """Send to the current subscribers; never block or fail."""

    async def close(self) -> None:
        """Deregister the publisher."""


class Subscriber(Protocol):
    """Subscriber to all publishers of one topic of one endpoint."""

    def __aiter__(self) -> AsyncIterator[Event | PublisherGone]:
        """Return an iterator over the events, until `close`."""

    async def close(self) -> None:
        """End the iteration."""


class EventPlane(Protocol):
    """Event plane of one process."""

    async def publisher(self, endpoint: EndpointId, topic: str) -> Publisher:
        """Return a registered publisher."""

    async def subscriber(self, endpoint: EndpointId, topic: str) -> Subscriber:
        """Return a listening subscriber."""

    @property
    def is_sound(self) -> bool:
        """Return False while a subscriber's crashed watch is being restarted."""

    async def close(self) -> None:
        """Close every publisher and subscriber."""


class GapDetector:
    """Next expected sequence number of each publisher."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def missed(self, publisher_id: int, sequence: int) -> int | None:
        """Return how many events were lost before this one; None for a duplicate.

        A late subscriber has missed all events since 0.
        """
        expected = self._next.get(publisher_id, 0)
        if sequence < expected:
            return None
        self._next[publisher_id] = sequence + 1
        return sequence - expected

    def forget(self, publisher_id: int) -> None:
        self._next.pop(publisher_id, None)


class Backlog:
    """Unread events of a subscriber. Events beyond the limit are dropped and reported as a gap by the next one."""

    def __init__(self, size_max: int = BACKLOG_MAX) -> None:
        self.dropped = 0
        self._size_max = size_max
        self._unread: deque[tuple[int, int, bytes] | PublisherGone] = deque()
        self._gaps = GapDetector()
        self._is_closed = False
        self._wake = asyncio.Event()

    def add(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        if len(self._unread) >= self._size_max:
            self.dropped += 1
            return
        self._unread.append((publisher_id, sequence, payload))
        self._wake.set()

    def gone(self, publisher_id: int) -> None:
        """Append the notification even when the backlog is full: there are few publishers."""
        self._unread.append(PublisherGone(publisher_id))
        self._wake.set()

    def end(self) -> None:
        """End the iteration; unread events are dropped."""
        self._is_closed = True
        self._unread.clear()
        self._wake.set()

    def __aiter__(self) -> "Backlog":
        return self

    async def __anext__(self) -> Event | PublisherGone:
        while True:
            while self._unread:
                event = self._to_event(self._unread.popleft())
                if event is not None:
                    return event
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    def _to_event(self, unread: tuple[int, int, bytes] | PublisherGone) -> Event | PublisherGone | None:
        if isinstance(unread, PublisherGone):
            self._gaps.forget(unread.publisher_id)
            return unread
        publisher_id, sequence, payload = unread
        missed = self._gaps.missed(publisher_id, sequence)
        return None if missed is None else Event(publisher_id, sequence, payload, missed)
