"""Simulated TCP connections between processes, for protocols written against asyncio's transports.

Bytes arrive in order, in pieces of any size, after the network's delays. A partition delays them; when it lasts, or
when a machine fails, each side detects the break after its own delay. A killed process resets its connections.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tests.simulation.loop import Process, current_process
from tests.simulation.network import Link, Network

FIRST_PORT = 20_000
SPLIT_ODDS = 0.3

Factory = Callable[[], asyncio.BaseProtocol]


class Sockets:
    """Listeners of a network by host and port; a process's host is its name."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.listeners: dict[tuple[str, int], SimServer] = {}
        self._ports = itertools.count(FIRST_PORT)

    async def listen(self, factory: Factory, host: str, port: int) -> "SimServer":
        server = SimServer(self, factory, current_process(), (host, port or next(self._ports)))
        self.listeners[server.address] = server
        return server

    async def connect(self, factory: Factory, host: str, port: int) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        network, process = self.network, current_process()
        await asyncio.sleep(network.latency())
        server = self.listeners.get((host, port))
        if server is not None and not network.answers(process, server.process):
            await network.loop.create_future()  # No response: the caller's timeout ends the attempt.
        if server is None or server.process.is_dead:
            raise ConnectionRefusedError(f"no process listens at {host}:{port}")
        incoming, outgoing = SimTransport(self, process), SimTransport(self, server.process)
        link = Link(network, incoming, outgoing, f"{host}:{port}")
        incoming.tie(outgoing, link, link.to_server)
        outgoing.tie(incoming, link, link.to_caller)
        link.to_server(outgoing.accepted, server.factory)
        protocol = factory()
        incoming.made(protocol)
        return incoming, protocol


class SimServer:
    """Listener as `loop.create_server` returns it."""

    def __init__(self, sockets: Sockets, factory: Factory, process: Process, address: tuple[str, int]) -> None:
        self.factory = factory
        self.process = process
        self.address = address
        self.sockets = [self]
        self._all = sockets

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        self._all.listeners.pop(self.address, None)

    async def wait_closed(self) -> None:
        """Do nothing: a closed listener has no pending work."""


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, sockets: Sockets, process: Process) -> None:
        super().__init__()
        self.process = process
        self._sockets = sockets
        self._protocol: Any = None
        self._peer: SimTransport
        self._link: Link
        self._post: Callable[..., None]
        self._is_closing = False
        self._is_lost = False

    def tie(self, peer: "SimTransport", link: Link, post: Callable[..., None]) -> None:
        """Connect the two ends of a connection."""
        self._peer, self._link, self._post = peer, link, post

    # Events of the network.

    def accepted(self, factory: Factory) -> None:
        self.made(factory())

    def made(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        if not self._is_closing:
            try:
                self._protocol.data_received(data)
            except Exception as error:
                self.process.loop.call_exception_handler({"message": "data_received failed", "exception": error})
                self.abort()

    def receive_end(self) -> None:
        if not self._is_closing and not self._protocol.eof_received():
            self.close()

    def receive_reset(self) -> None:
        self._lose(ConnectionResetError("reset by the peer"))

    def broken(self, link: Link) -> None:
        self._lose(ConnectionResetError("the connection is gone"))

    caller_gone = broken

    # Interface of asyncio's transports.

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        data = bytes(data)
        rng = self._sockets.network.rng
        if len(data) > 1 and rng.random() < SPLIT_ODDS:
            cut = rng.randrange(1, len(data))
            self._post(self._peer.receive, data[:cut])
            data = data[cut:]
        self._post(self._peer.receive, data)

    def close(self) -> None:
        if not self._is_closing:
            self._post(self._peer.receive_end)
            self._is_closing = True
            self.process.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._is_lost:
            self._post(self._peer.receive_reset)
            self._is_closing = True
            self.process.loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self._is_lost:
            self._is_lost = True
            if self._peer._is_lost:
                self._sockets.network.links.pop(self._link, None)
            if self._protocol is not None:
                self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the requests of simulated clients never fill a buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._peer.process.name, 0) if name == "peername" else default
