"""Ether: the event plane, with the network between its ends.

Each process has production's `MemoryEventPlane` over a bus of its own; what it publishes reaches the subscribers of all.
"""

from collections import defaultdict
from collections.abc import Iterator

from tests.simulation.loop import Process
from tests.simulation.network import Network

from dynamo.runtime.event_plane.memory import MemoryBus, MemorySubscriber


class Ether:
    """Every subscriber of every process, by topic."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.topics: defaultdict[str, list[tuple[Process, MemorySubscriber]]] = defaultdict(list)


class SimBus(MemoryBus):
    """One process's bus: its events reach the others' subscribers through the network."""

    def __init__(self, ether: Ether, process: Process) -> None:
        self.listeners = _Topics(ether, process)  # type: ignore[assignment]


class _Topics:
    def __init__(self, ether: Ether, process: Process) -> None:
        self._ether = ether
        self._process = process

    def __getitem__(self, name: str) -> "_Topic":
        return _Topic(self._ether, self._process, name)


class _Topic:
    def __init__(self, ether: Ether, process: Process, name: str) -> None:
        self._ether = ether
        self._process = process
        self._listeners = ether.topics[name]

    def append(self, subscriber: MemorySubscriber) -> None:
        self._listeners.append((self._process, subscriber))

    def remove(self, subscriber: MemorySubscriber) -> None:
        self._listeners.remove((self._process, subscriber))

    def __contains__(self, subscriber: MemorySubscriber) -> bool:
        return (self._process, subscriber) in self._listeners

    def __iter__(self) -> Iterator["_Far"]:
        return iter([_Far(self._ether.network, self._process, *listener) for listener in self._listeners])


class _Far:
    """A subscriber as a publisher of another process reaches it."""

    def __init__(self, network: Network, source: Process, target: Process, subscriber: MemorySubscriber) -> None:
        self._send = lambda *args: network.datagram(source, target, *args)
        self._subscriber = subscriber

    def add(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self._send(self._subscriber.add, publisher_id, sequence, payload)

    def gone(self, publisher_id: int) -> None:
        self._send(self._subscriber.gone, publisher_id)
