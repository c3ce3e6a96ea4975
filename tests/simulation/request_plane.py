"""Request plane: production's two members with the network between their ends, and someone who watches what they say.

`SimPlane` is the memory member: each process has its own, and links carry what passes between two of them. `SocketPlane`
is the TCP member, over the sockets of `tests.simulation.sockets`.
"""

import asyncio
from typing import Protocol

from tests.simulation.loop import Process
from tests.simulation.network import Link, Network
from tests.simulation.registry import SimDiscovery

from dynamo.core.errors import CannotConnect, ConnectionTimeout, Disconnected
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import TransportAddress
from dynamo.runtime.request_plane.base import Call, Item, OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.runtime.request_plane.tcp.batched_caller import BatchedLink, leaves_silent_worker
from dynamo.runtime.request_plane.tcp.batched_worker import BatchedSession
from dynamo.runtime.request_plane.tcp.common import TcpOptions
from dynamo.runtime.request_plane.tcp.plane import TcpPlane
from dynamo.runtime.request_plane.tcp.upstream_caller import UpstreamLink
from dynamo.runtime.server import Dispatcher

ACK_TIMEOUT_S = 10.0  # DYN_TCP_REQUEST_TIMEOUT.
CONNECT_TIMEOUT_S = 3.0  # DYN_TCP_CONNECT_TIMEOUT.


class Hooks(Protocol):
    """The observers of the messages that callers send and receive."""

    def was_sent(self, heard: "Watched") -> None:
        """A request was sent."""

    def was_heard(self, heard: "Watched") -> None:
        """A piece of its answer came."""

    def was_whole(self, heard: "Watched") -> None:
        """Its answer is complete."""

    def broke(self, heard: "Watched", error: Exception) -> None:
        """Its answer ends in an error."""

    def violation(self, what: str) -> None:
        """The plane did not keep its contract."""


class Watched:
    """A receiver, and whether the plane treats it as it must."""

    def __init__(self, hooks: Hooks, process: Process, target: Target, request: Request, receiver: Receiver) -> None:
        self.process = process
        self.instance_id = target.instance_id
        self.request_id = request.id
        self.receiver = receiver
        self.is_over = False
        self._hooks = hooks

    def on_token(self, token_id: int) -> None:
        self._hears("a token")
        self._hooks.was_heard(self)
        self.receiver.on_token(token_id)

    def on_item(self, item: Item) -> None:
        self._hears("an item")
        self._hooks.was_heard(self)
        self.receiver.on_item(item)

    def on_end(self) -> None:
        self._hears("an end")
        self.is_over = True
        self._hooks.was_whole(self)
        self.receiver.on_end()

    def on_error(self, error: Exception) -> None:
        self._hears("an error")
        self.is_over = True
        self._hooks.broke(self, error)
        self.receiver.on_error(error)

    def leaves_silent_worker(self) -> bool:
        return leaves_silent_worker(self.receiver)

    def _hears(self, what: str) -> None:
        if self.is_over:
            self._hooks.violation(f"{self.process}: request {self.request_id} heard {what} after its end")


class WatchedCall:
    """A call whose receiver must get nothing after it was killed."""

    def __init__(self, call: Call, heard: Watched) -> None:
        self.instance_id = call.instance_id
        self._call = call
        self._heard = heard

    def stop(self) -> None:
        self._call.stop()

    def kill(self) -> None:
        self._heard.is_over = True
        self._call.kill()


class Witness:
    """Looks over a plane's shoulder."""

    def __init__(self, process: Process, discovery: SimDiscovery, hooks: Hooks) -> None:
        self.process = process
        self._discovery = discovery
        self._hooks = hooks

    def watch(self, target: Target, request: Request, receiver: Receiver) -> Watched:
        return Watched(self._hooks, self.process, target, request, receiver)

    def sent(self, call: Call, heard: Watched) -> WatchedCall:
        self._hooks.was_sent(heard)
        return WatchedCall(call, heard)

    def connects(self, target: Target) -> None:
        """No caller connects to a worker that it has seen leave."""
        instance, _, endpoint = target.path.partition("/")
        key = f"{endpoint}/{instance}"
        gone_s = self._discovery.gone_s.get(key)
        if "worker_kv_query_source_" in endpoint:
            return  # Found by the record of the source that it answers for.
        if gone_s is not None and gone_s < self.process.loop.time():
            self._hooks.violation(
                f"{self.process}: a request was sent to {target.instance_id:x}, which left at {gone_s:.3f}"
            )


class SocketPlane(TcpPlane):
    """Production's TCP member."""

    def __init__(self, dispatcher: Dispatcher, witness: Witness, registry: MetricsRegistry, *, batched: bool) -> None:
        self.process = witness.process
        self._witness = witness
        super().__init__(dispatcher, TcpOptions(host=self.process.name, speaks_batched=batched), registry)

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> Call | None:
        heard = self._witness.watch(target, request, receiver)
        call = super().send(target, request, heard, on_done)
        return None if call is None else self._witness.sent(call, heard)

    async def connect(self, target: Target) -> None:
        self._witness.connects(target)
        await super().connect(target)

    def open_things(self) -> dict[str, int]:
        """What must be nothing when nothing is under way."""
        links = list(self._links.values())
        return {
            "calls": sum(len(link._calls) + len(link._on_token) for link in links if isinstance(link, BatchedLink)),
            "unacknowledged": sum(len(link._order) for link in links if isinstance(link, UpstreamLink)),
            "awaited answers": len(self._response_listener.waiting) + len(self._response_listener.connections),
            "replies": sum(len(one._replies) for one in self._sessions if isinstance(one, BatchedSession)),
            "dialled back": len(self._responses.open),
            "connecting": len(self._connecting),
        }


class SimPlane:
    """One process's request plane: production's memory member, reached over links."""

    speaks_batched = True

    def __init__(self, dispatcher: Dispatcher, network: Network, witness: Witness) -> None:
        self.process = witness.process
        self.network = network
        hub = MemoryHub()
        hub.serial = network.loop.serial
        self.inner = MemoryPlane(dispatcher, hub)
        self.far: dict[FarCall, None] = {}
        """Calls of ours that are under way."""
        self.near: dict[FarCall, Call] = {}
        """Calls of others that we answer."""
        self.links: dict[str, Link] = {}
        self._witness = witness
        self._is_closed = False

    # As a caller.

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> Call | None:
        link = self.links.get(target.address)
        if link is None:
            return None
        heard = self._witness.watch(target, request, receiver)
        call = FarCall(self, link, target, heard, on_done)
        self.far[call] = None
        link.to_server(link.server.accept, call, target, request)
        return self._witness.sent(call, heard)

    async def connect(self, target: Target) -> None:
        self._witness.connects(target)
        network = self.network
        await asyncio.sleep(network.latency())
        server = network.planes.get(target.address)
        if server is not None and not network.answers(self.process, server.process):
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            server = None
        if server is None or server.process.is_dead or self._is_closed:
            raise CannotConnect(f"nobody listens at {target.address}")
        if target.address not in self.links:
            self.links[target.address] = Link(network, self, server, target.address)

    def broken(self, link: Link) -> None:
        if self.links.get(link.address) is link:
            del self.links[link.address]
        for call in [call for call in self.far if call.link is link]:
            call.end(Disconnected("the connection to the worker broke"))

    # As a worker.

    async def listen(self) -> None:
        await self.inner.listen()
        self.network.planes[self.inner.address("").tcp.rstrip("/")] = self  # type: ignore[union-attr]

    async def open(self, path: str) -> None:
        await self.inner.open(path)

    def address(self, path: str) -> TransportAddress:
        return self.inner.address(path)

    def accept(self, call: "FarCall", target: Target, request: Request) -> None:
        """A request arrives over a link."""
        near = NearReceiver(self, call)
        inner = self.inner.send(target, request, near, lambda _instance, _error: None)
        if inner is None:
            call.link.to_caller(call.end, Disconnected("the worker is closed"))
            return
        self.near[call] = inner
        call.link.to_caller(call.acknowledged)

    def kill_near(self, call: "FarCall") -> None:
        inner = self.near.pop(call, None)
        if inner is not None:
            inner.kill()

    def stop_near(self, call: "FarCall") -> None:
        inner = self.near.get(call)
        if inner is not None:
            inner.stop()

    def caller_gone(self, link: Link) -> None:
        for call in [call for call in self.near if call.link is link]:
            self.kill_near(call)

    async def close(self) -> None:
        self._is_closed = True
        for call in list(self.far):
            call.link.to_server(call.link.server.kill_near, call)
            call.end(Disconnected("the request plane was closed"))
        await self.inner.close()
        network = self.network
        for address in [address for address, plane in network.planes.items() if plane is self]:
            del network.planes[address]
        for link in list(network.links):
            if link.server is self:
                link.finish()
            elif link.caller is self:
                link.to_server(link.sever, 0.0, 0.0)
        self.links.clear()

    def open_things(self) -> dict[str, int]:
        """What must be nothing when nothing is under way."""
        return {
            "calls": len(self.far) + len(self.inner._calls),
            "replies": len(self.near) + len(self.inner._replies),
        }


class FarCall:
    """A call as its caller's process holds it."""

    def __init__(self, plane: SimPlane, link: Link, target: Target, receiver: Receiver, on_done: OnDone) -> None:
        self.instance_id = target.instance_id
        self.link = link
        self.receiver = receiver
        self.is_over = False
        self._plane = plane
        self._on_done = on_done
        self._timer = plane.network.loop.call_later(ACK_TIMEOUT_S, self._unacknowledged)

    def stop(self) -> None:
        if not self.is_over:
            self.link.to_server(self.link.server.stop_near, self)

    def kill(self) -> None:
        if not self.is_over:
            self.link.to_server(self.link.server.kill_near, self)
            self._close(None)

    def acknowledged(self) -> None:
        self._timer.cancel()

    def _unacknowledged(self) -> None:
        self.link.to_server(self.link.server.kill_near, self)
        self.end(ConnectionTimeout("the worker did not acknowledge the request"))

    def token(self, token_id: int) -> None:
        if not self.is_over:
            self.receiver.on_token(token_id)

    def item(self, item: Item) -> None:
        if not self.is_over:
            self.receiver.on_item(item)

    def end(self, error: Exception | None) -> None:
        if self.is_over:
            return
        self._close(error)
        if error is None:
            self.receiver.on_end()
        else:
            self.receiver.on_error(error)

    def _close(self, error: Exception | None) -> None:
        self.is_over = True
        self._timer.cancel()
        self._plane.far.pop(self, None)
        self._on_done(self.instance_id, error)


class NearReceiver:
    """Receives from the worker's own memory plane, and forwards to the caller's process."""

    def __init__(self, plane: SimPlane, call: FarCall) -> None:
        self._plane = plane
        self._call = call

    def on_token(self, token_id: int) -> None:
        self._call.link.to_caller(self._call.token, token_id)

    def on_item(self, item: Item) -> None:
        self._call.link.to_caller(self._call.item, item)

    def on_end(self) -> None:
        self._over(None)

    def on_error(self, error: Exception) -> None:
        self._over(error)

    def _over(self, error: Exception | None) -> None:
        self._plane.near.pop(self._call, None)
        self._call.link.to_caller(self._call.end, error)
