"""Simulated event plane: production's `MemoryEventPlane` with the network between publishers and subscribers.

Each process has a bus of its own; its events reach the subscribers of all processes.
"""

from collections import defaultdict
from collections.abc import Iterator

from tests.simulation.loop import Process
from tests.simulation.network import Network

from dynamo.runtime.event_plane.memory import MemoryBus, MemorySubscriber


class EventNetwork:
    """Subscribers of all processes, by topic."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.topics: defaultdict[str, list[tuple[Process, MemorySubscriber]]] = defaultdict(list)


class SimBus(MemoryBus):
    """Bus of one process, whose events reach the subscribers of other processes through the network."""

    def __init__(self, event_network: EventNetwork, process: Process) -> None:
        self.listeners = _Topics(event_network, process)  # type: ignore[assignment]


class _Topics:
    def __init__(self, event_network: EventNetwork, process: Process) -> None:
        self._event_network = event_network
        self._process = process

    def __getitem__(self, name: str) -> "_Topic":
        return _Topic(self._event_network, self._process, name)


class _Topic:
    def __init__(self, event_network: EventNetwork, process: Process, name: str) -> None:
        self._event_network = event_network
        self._process = process
        self._listeners = event_network.topics[name]

    def append(self, subscriber: MemorySubscriber) -> None:
        self._listeners.append((self._process, subscriber))

    def remove(self, subscriber: MemorySubscriber) -> None:
        self._listeners.remove((self._process, subscriber))

    def __contains__(self, subscriber: MemorySubscriber) -> bool:
        return (self._process, subscriber) in self._listeners

    def __iter__(self) -> Iterator["_RemoteSubscriber"]:
        return iter(
            [_RemoteSubscriber(self._event_network.network, self._process, *listener) for listener in self._listeners]
        )


class _RemoteSubscriber:
    """Subscriber as seen by a publisher of another process."""

    def __init__(self, network: Network, source: Process, target: Process, subscriber: MemorySubscriber) -> None:
        self._send = lambda *args: network.datagram(source, target, *args)
        self._subscriber = subscriber

    def add(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self._send(self._subscriber.add, publisher_id, sequence, payload)

    def gone(self, publisher_id: int) -> None:
        self._send(self._subscriber.gone, publisher_id)
