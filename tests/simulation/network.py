"""Simulated network between processes: delays, losses, duplicates, partitions and broken connections.

It carries two kinds of traffic. *Datagrams* (events, registry updates) may be lost, duplicated and reordered. A *link*
(a connection of the request plane) keeps order and loses nothing while it is up, as TCP does: a lost packet is a delay,
and a lasting partition is a break, which each side detects after its own delay.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.loop import Process, SimLoop

Listener = Callable[..., None]


@dataclass
class NetworkFaults:
    """Fault rates and delays of the network during the fault phase."""

    loss: float = 0.0
    doubling: float = 0.0
    latency_s: float = 0.002
    spike: float = 0.0
    """Share of messages that take up to `spike_s`."""
    spike_s: float = 0.3
    notice_s: float = 2.0
    """Seconds until an end of a dead connection detects it, without a reset."""


@dataclass
class Network:
    """Network between the processes of one simulation."""

    loop: SimLoop
    rng: random.Random
    network_faults: NetworkFaults
    simulation: Process
    cuts: dict[frozenset[str], float] = field(default_factory=dict)
    """Pairs of processes that cannot reach each other, and the time at which the partition began."""
    links: "dict[Link, None]" = field(default_factory=dict)
    planes: dict[str, Any] = field(default_factory=dict)
    """Request plane that listens at each address."""
    lost_machines: set[str] = field(default_factory=set)
    is_calm: bool = False
    lost: int = 0
    doubled: int = 0
    held: int = 0

    def latency(self) -> float:
        network_faults = self.network_faults
        if not self.is_calm and network_faults.spike and self.rng.random() < network_faults.spike:
            return self.rng.uniform(0.0, network_faults.spike_s)
        return network_faults.latency_s * (0.2 + self.rng.random())

    def is_cut(self, one: Process, other: Process) -> bool:
        return frozenset((one.name, other.name)) in self.cuts

    def answers(self, source: Process, target: Process) -> bool:
        """Return whether a connection attempt gets a response, including a refusal."""
        return not self.is_cut(source, target) and target.name not in self.lost_machines

    def datagram(self, source: Process, target: Process, deliver: Listener, *args: Any) -> None:
        """Deliver a message once, several times or never."""
        if source.is_dead or target.is_dead:
            return
        network_faults, rng = self.network_faults, self.rng
        if self.is_cut(source, target) or (not self.is_calm and rng.random() < network_faults.loss):
            self.lost += 1
            return
        target.later(self.latency(), deliver, *args)
        if not self.is_calm and rng.random() < network_faults.doubling:
            self.doubled += 1
            target.later(self.latency() * 3, deliver, *args)

    def cut(self, one: Process, other: Process) -> None:
        """Partition two processes; each end of a link that times out reports a broken connection."""
        pair = frozenset((one.name, other.name))
        if pair in self.cuts:
            return
        since = self.cuts[pair] = self.loop.time()
        for link in [link for link in self.links if link.pair == pair]:
            self._give_up_later(link, since)

    def _give_up_later(self, link: "Link", since: float) -> None:
        def give_up() -> None:
            if self.cuts.get(link.pair) == since:
                link.sever(at_caller_s=0.0, at_server_s=self.rng.uniform(0.0, self.network_faults.notice_s))

        self.simulation.later(self.network_faults.notice_s, give_up)

    def reconnect(self, one: Process, other: Process) -> None:
        """End the partition of two processes; delayed messages arrive in order."""
        pair = frozenset((one.name, other.name))
        if self.cuts.pop(pair, None) is not None:
            for link in [link for link in self.links if link.pair == pair]:
                link.resume()

    def reconnect_all(self) -> None:
        for pair in list(self.cuts):
            del self.cuts[pair]
        for link in list(self.links):
            link.resume()

    def remove_process(self, process: Process, *, response: bool) -> None:
        """Remove an exited process: its kernel resets its connections, or, if the machine failed too, its peers time
        out.
        """
        for link in [link for link in self.links if process in (link.caller.process, link.server.process)]:
            after_s = self.latency() if response and not self.is_cut(*link.ends) else self.network_faults.notice_s
            link.sever(at_caller_s=after_s, at_server_s=after_s)
        if response:
            for address in [address for address, plane in self.planes.items() if plane.process is process]:
                del self.planes[address]
        else:
            self.lost_machines.add(process.name)


class LinkDirection:
    """One direction of a link."""

    def __init__(self, target: Process) -> None:
        self.target = target
        self.clear_s = 0.0
        self.queue: deque[tuple[Listener, tuple[Any, ...]]] = deque()
        """Messages sent and not received yet. Each arrival takes the first, which preserves the order."""
        self.held = 0
        """Arrivals that a partition delays."""


class Link:
    """Connection from one process's plane to another's."""

    def __init__(self, network: Network, caller: Any, server: Any, address: str) -> None:
        self.network = network
        self.caller = caller
        self.server = server
        self.address = address
        self.ends = (caller.process, server.process)
        self.pair = frozenset((caller.process.name, server.process.name))
        self.is_up = True
        self._to_caller = LinkDirection(caller.process)
        self._to_server = LinkDirection(server.process)
        network.links[self] = None
        since = network.cuts.get(self.pair)
        if since is not None:
            network._give_up_later(self, since)

    def to_server(self, deliver: Listener, *args: Any) -> None:
        self._post(self._to_server, deliver, args)

    def to_caller(self, deliver: Listener, *args: Any) -> None:
        self._post(self._to_caller, deliver, args)

    def _post(self, direction: LinkDirection, deliver: Listener, args: tuple[Any, ...]) -> None:
        if self.is_up:
            direction.queue.append((deliver, args))
            self._send(direction)

    def _send(self, direction: LinkDirection) -> None:
        network = self.network
        if network.is_cut(*self.ends):
            network.held += 1
            direction.held += 1
        else:
            direction.clear_s = max(direction.clear_s, network.loop.time() + network.latency())
            network.loop.call_at(direction.clear_s, self._arrive, direction, context=direction.target.context.copy())

    def _arrive(self, direction: LinkDirection) -> None:
        if not self.is_up:
            return
        if self.network.is_cut(*self.ends):
            direction.held += 1
        else:
            deliver, args = direction.queue.popleft()
            deliver(*args)

    def resume(self) -> None:
        """Send the delayed messages."""
        for direction in (self._to_caller, self._to_server):
            held, direction.held = direction.held, 0
            for _ in range(held):
                self._send(direction)

    def finish(self) -> None:
        """Close the link from the server's side after its pending messages."""
        self.to_caller(self.sever, 0.0, 0.0)

    def sever(self, at_caller_s: float, at_server_s: float) -> None:
        """Break the link; each side detects it after its own delay."""
        if not self.is_up:
            return
        self.is_up = False
        self.network.links.pop(self, None)
        self.caller.process.later(at_caller_s, self.caller.broken, self)
        self.server.process.later(at_server_s, self.server.caller_gone, self)
