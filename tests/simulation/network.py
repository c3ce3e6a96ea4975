"""Network: what lies between processes: delays, losses, duplicates, partitions and connections that break.

It carries two kinds of traffic. *Datagrams* (events, news of the registry) may be lost, doubled and overtaken. A *link*
(a connection of the request plane) keeps order and loses nothing while it is up, as TCP does: what is lost below shows
as a delay, and a partition that lasts shows as a break, on each side when that side notices.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.loop import Process, SimLoop

Listener = Callable[..., None]


@dataclass
class Weather:
    """How bad the network is while it is bad."""

    loss: float = 0.0
    doubling: float = 0.0
    latency_s: float = 0.002
    spike: float = 0.0
    """Share of messages that take up to `spike_s`."""
    spike_s: float = 0.3
    notice_s: float = 2.0
    """How long an end of a dead connection takes to notice, without a reset."""


@dataclass
class Network:
    """All processes of one simulation."""

    loop: SimLoop
    rng: random.Random
    weather: Weather
    world: Process
    cuts: dict[frozenset[str], float] = field(default_factory=dict)
    """Pairs that cannot reach each other, and since when."""
    links: "dict[Link, None]" = field(default_factory=dict)
    planes: dict[str, Any] = field(default_factory=dict)
    """Who listens at which address."""
    lost_machines: set[str] = field(default_factory=set)
    is_calm: bool = False
    lost: int = 0
    doubled: int = 0
    held: int = 0

    def latency(self) -> float:
        weather = self.weather
        if not self.is_calm and weather.spike and self.rng.random() < weather.spike:
            return self.rng.uniform(0.0, weather.spike_s)
        return weather.latency_s * (0.2 + self.rng.random())

    def is_cut(self, one: Process, other: Process) -> bool:
        return frozenset((one.name, other.name)) in self.cuts

    def answers(self, source: Process, target: Process) -> bool:
        """Whether a connection attempt gets any response, be it a refusal."""
        return not self.is_cut(source, target) and target.name not in self.lost_machines

    def datagram(self, source: Process, target: Process, deliver: Listener, *args: Any) -> None:
        """Arrives once, several times or never."""
        if source.is_dead or target.is_dead:
            return
        weather, rng = self.weather, self.rng
        if self.is_cut(source, target) or (not self.is_calm and rng.random() < weather.loss):
            self.lost += 1
            return
        target.later(self.latency(), deliver, *args)
        if not self.is_calm and rng.random() < weather.doubling:
            self.doubled += 1
            target.later(self.latency() * 3, deliver, *args)

    def cut(self, one: Process, other: Process) -> None:
        """Nothing passes between them from now on; who waits long enough calls it a break."""
        pair = frozenset((one.name, other.name))
        if pair in self.cuts:
            return
        since = self.cuts[pair] = self.loop.time()
        for link in [link for link in self.links if link.pair == pair]:
            self._give_up_later(link, since)

    def _give_up_later(self, link: "Link", since: float) -> None:
        def give_up() -> None:
            if self.cuts.get(link.pair) == since:
                link.sever(at_caller_s=0.0, at_server_s=self.rng.uniform(0.0, self.weather.notice_s))

        self.world.later(self.weather.notice_s, give_up)

    def mend(self, one: Process, other: Process) -> None:
        """They reach each other again; what was held back arrives in order."""
        pair = frozenset((one.name, other.name))
        if self.cuts.pop(pair, None) is not None:
            for link in [link for link in self.links if link.pair == pair]:
                link.resume()

    def mend_all(self) -> None:
        for pair in list(self.cuts):
            del self.cuts[pair]
        for link in list(self.links):
            link.resume()

    def died(self, process: Process, *, told: bool) -> None:
        """A process is gone: its kernel resets its connections, or, where the machine died too, the peers time out."""
        for link in [link for link in self.links if process in (link.caller.process, link.server.process)]:
            after_s = self.latency() if told and not self.is_cut(*link.ends) else self.weather.notice_s
            link.sever(at_caller_s=after_s, at_server_s=after_s)
        if told:
            for address in [address for address, plane in self.planes.items() if plane.process is process]:
                del self.planes[address]
        else:
            self.lost_machines.add(process.name)


class Way:
    """One direction of a link."""

    def __init__(self, target: Process) -> None:
        self.target = target
        self.clear_s = 0.0
        self.queue: deque[tuple[Listener, tuple[Any, ...]]] = deque()
        """Messages sent and not received yet. Each arrival takes the first, so that nothing overtakes."""
        self.held = 0
        """Arrivals that a partition holds up."""


class Link:
    """A connection from one process's plane to another's."""

    def __init__(self, network: Network, caller: Any, server: Any, address: str) -> None:
        self.network = network
        self.caller = caller
        self.server = server
        self.address = address
        self.ends = (caller.process, server.process)
        self.pair = frozenset((caller.process.name, server.process.name))
        self.is_up = True
        self._to_caller = Way(caller.process)
        self._to_server = Way(server.process)
        network.links[self] = None
        since = network.cuts.get(self.pair)
        if since is not None:
            network._give_up_later(self, since)

    def to_server(self, deliver: Listener, *args: Any) -> None:
        self._post(self._to_server, deliver, args)

    def to_caller(self, deliver: Listener, *args: Any) -> None:
        self._post(self._to_caller, deliver, args)

    def _post(self, way: Way, deliver: Listener, args: tuple[Any, ...]) -> None:
        if self.is_up:
            way.queue.append((deliver, args))
            self._send(way)

    def _send(self, way: Way) -> None:
        network = self.network
        if network.is_cut(*self.ends):
            network.held += 1
            way.held += 1
        else:
            way.clear_s = max(way.clear_s, network.loop.time() + network.latency())
            network.loop.call_at(way.clear_s, self._arrive, way, context=way.target.context.copy())

    def _arrive(self, way: Way) -> None:
        if not self.is_up:
            return
        if self.network.is_cut(*self.ends):
            way.held += 1
        else:
            deliver, args = way.queue.popleft()
            deliver(*args)

    def resume(self) -> None:
        """Sends what was held back."""
        for way in (self._to_caller, self._to_server):
            held, way.held = way.held, 0
            for _ in range(held):
                self._send(way)

    def finish(self) -> None:
        """The server closes it after what it has written."""
        self.to_caller(self.sever, 0.0, 0.0)

    def sever(self, at_caller_s: float, at_server_s: float) -> None:
        """Nothing passes any more; each side notices in its own time."""
        if not self.is_up:
            return
        self.is_up = False
        self.network.links.pop(self, None)
        self.caller.process.later(at_caller_s, self.caller.broken, self)
        self.server.process.later(at_server_s, self.server.caller_gone, self)
