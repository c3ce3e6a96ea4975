"""Event plane in memory: for tests and for graphs in one process."""

from collections import defaultdict

from dynamo.protocols.discovery import EndpointId, topic_prefix
from dynamo.runtime.discovery.base import new_id
from dynamo.runtime.event_plane.base import Backlog


class MemoryBus:
    """Subscribers of an in-memory cluster by topic."""

    def __init__(self) -> None:
        self.listeners: defaultdict[str, list[MemorySubscriber]] = defaultdict(list)


class MemoryEventPlane:
    """Event plane of one member of a bus."""

    def __init__(self, bus: MemoryBus | None = None) -> None:
        self._bus = bus if bus is not None else PROCESS_BUS
        self._publishers: list[MemoryPublisher] = []
        self._subscribers: list[MemorySubscriber] = []

    async def publisher(self, endpoint: EndpointId, topic: str) -> "MemoryPublisher":
        publisher = MemoryPublisher(self._bus, topic_prefix(endpoint, topic))
        self._publishers.append(publisher)
        return publisher

    async def subscriber(self, endpoint: EndpointId, topic: str) -> "MemorySubscriber":
        subscriber = MemorySubscriber(self._bus, topic_prefix(endpoint, topic))
        self._subscribers.append(subscriber)
        return subscriber

    @property
    def is_sound(self) -> bool:
        return True

    async def close(self) -> None:
        for publisher in self._publishers:
            await publisher.close()
        for subscriber in self._subscribers:
            await subscriber.close()


class MemoryPublisher:
    """Publisher on a bus."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self.id = new_id()
        self._bus = bus
        self._name = name
        self._sequence = 0
        self._is_closed = False

    def publish(self, payload: bytes) -> None:
        if self._is_closed:
            return
        sequence, self._sequence = self._sequence, self._sequence + 1
        for subscriber in self._bus.listeners[self._name]:
            subscriber.add(self.id, sequence, payload)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for subscriber in self._bus.listeners[self._name]:
                subscriber.gone(self.id)


class MemorySubscriber(Backlog):
    """Subscriber on a bus."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        super().__init__()
        self._bus = bus
        self._name = name
        bus.listeners[name].append(self)

    async def close(self) -> None:
        if self in self._bus.listeners[self._name]:
            self._bus.listeners[self._name].remove(self)
        self.end()


PROCESS_BUS = MemoryBus()
"""Default bus of the event planes in this process."""
