"""Simulated request plane: production's two members over the simulated network, with observers of their messages.

`SimPlane` is the memory member: each process has its own, and links connect them. `SocketPlane` is the TCP member, over
the sockets of `tests.simulation.sockets`.
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
from dynamo.serving.migration import FirstOutput

ACK_TIMEOUT_S = 10.0  # DYN_TCP_REQUEST_TIMEOUT.
CONNECT_TIMEOUT_S = 3.0  # DYN_TCP_CONNECT_TIMEOUT.


class PlaneHooks(Protocol):
    """The observers of the messages that callers send and receive."""

    def on_request_sent(self, observed: "ObservedReceiver") -> None:
        """Handle a request that was sent."""

    def on_response_message(self, observed: "ObservedReceiver") -> None:
        """Handle a message of its response."""

    def on_response_complete(self, observed: "ObservedReceiver") -> None:
        """Handle the end of its response."""

    def on_response_error(self, observed: "ObservedReceiver", error: Exception) -> None:
        """Handle the error of its response."""

    def violation(self, what: str) -> None:
        """Record a violation of the plane's contract."""


class ObservedReceiver:
    """Receiver that checks the order of the plane's callbacks."""

    def __init__(
        self, hooks: PlaneHooks, process: Process, target: Target, request: Request, receiver: Receiver
    ) -> None:
        self.process = process
        self.instance_id = target.instance_id
        self.request_id = request.id
        self.receiver = receiver
        self.request = receiver.receiver if isinstance(receiver, FirstOutput) else receiver
        """The frontend's receiver, also of a request that was sent again."""
        self.is_over = False
        self._hooks = hooks

    def on_token(self, token_id: int) -> None:
        self._check_open("a token")
        self._hooks.on_response_message(self)
        self.receiver.on_token(token_id)

    def on_item(self, item: Item) -> None:
        self._check_open("an item")
        self._hooks.on_response_message(self)
        self.receiver.on_item(item)

    def on_end(self) -> None:
        self._check_open("an end")
        self.is_over = True
        self._hooks.on_response_complete(self)
        self.receiver.on_end()

    def on_error(self, error: Exception) -> None:
        self._check_open("an error")
        self.is_over = True
        self._hooks.on_response_error(self, error)
        self.receiver.on_error(error)

    def leaves_silent_worker(self) -> bool:
        return leaves_silent_worker(self.receiver)

    def _check_open(self, what: str) -> None:
        if self.is_over:
            self._hooks.violation(f"{self.process}: request {self.request_id} received {what} after its end")


class ObservedCall:
    """Call whose receiver must get nothing after it was killed."""

    def __init__(self, call: Call, observed: ObservedReceiver) -> None:
        self.instance_id = call.instance_id
        self._call = call
        self._observed = observed

    def stop(self) -> None:
        self._call.stop()

    def kill(self) -> None:
        self._observed.is_over = True
        self._call.kill()


class PlaneObserver:
    """Observer of the requests of one plane."""

    def __init__(self, process: Process, discovery: SimDiscovery, hooks: PlaneHooks) -> None:
        self.process = process
        self._discovery = discovery
        self._hooks = hooks

    def watch(self, target: Target, request: Request, receiver: Receiver) -> ObservedReceiver:
        return ObservedReceiver(self._hooks, self.process, target, request, receiver)

    def sent(self, call: Call, observed: ObservedReceiver) -> ObservedCall:
        self._hooks.on_request_sent(observed)
        return ObservedCall(call, observed)

    def check_connect(self, target: Target) -> None:
        """Check that no caller connects to a worker that it has seen leave."""
        instance, _, endpoint = target.path.partition("/")
        key = f"{endpoint}/{instance}"
        gone_s = self._discovery.gone_s.get(key)
        if "worker_kv_query_source_" in endpoint:
            return  # Found by the record of the source whose events it serves.
        if gone_s is not None and gone_s < self.process.loop.time():
            self._hooks.violation(
                f"{self.process}: a request was sent to {target.instance_id:x}, which left at {gone_s:.3f}"
            )


class SocketPlane(TcpPlane):
    """Production's TCP member."""

    def __init__(
        self, dispatcher: Dispatcher, observer: PlaneObserver, registry: MetricsRegistry, *, batched: bool
    ) -> None:
        self.process = observer.process
        self._observer = observer
        super().__init__(dispatcher, TcpOptions(host=self.process.name, speaks_batched=batched), registry)

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> Call | None:
        observed = self._observer.watch(target, request, receiver)
        call = super().send(target, request, observed, on_done)
        return None if call is None else self._observer.sent(call, observed)

    async def connect(self, target: Target) -> None:
        self._observer.check_connect(target)
        await super().connect(target)

    def open_counts(self) -> dict[str, int]:
        """Return counters that must be zero when no request is in flight."""
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
    """Request plane of one process: production's memory member, connected by links."""

    speaks_batched = True

    def __init__(self, dispatcher: Dispatcher, network: Network, observer: PlaneObserver) -> None:
        self.process = observer.process
        self.network = network
        hub = MemoryHub()
        hub.serial = network.loop.serial
        self.inner = MemoryPlane(dispatcher, hub)
        self.outgoing: dict[OutgoingCall, None] = {}
        """Outgoing calls in flight."""
        self.incoming: dict[OutgoingCall, Call] = {}
        """Incoming calls that this process answers."""
        self.links: dict[str, Link] = {}
        self._observer = observer
        self._is_closed = False

    # Caller side.

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> Call | None:
        link = self.links.get(target.address)
        if link is None:
            return None
        observed = self._observer.watch(target, request, receiver)
        call = OutgoingCall(self, link, target, observed, on_done)
        self.outgoing[call] = None
        link.to_server(link.server.accept, call, target, request)
        return self._observer.sent(call, observed)

    async def connect(self, target: Target) -> None:
        self._observer.check_connect(target)
        network = self.network
        await asyncio.sleep(network.latency())
        server = network.planes.get(target.address)
        if server is not None and not network.answers(self.process, server.process):
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            server = None
        if server is None or server.process.is_dead or self._is_closed:
            raise CannotConnect(f"no process listens at {target.address}")
        if target.address not in self.links:
            self.links[target.address] = Link(network, self, server, target.address)

    def broken(self, link: Link) -> None:
        if self.links.get(link.address) is link:
            del self.links[link.address]
        for call in [call for call in self.outgoing if call.link is link]:
            call.end(Disconnected("the connection to the worker broke"))

    # Worker side.

    async def listen(self) -> None:
        await self.inner.listen()
        self.network.planes[self.inner.address("").tcp.rstrip("/")] = self  # type: ignore[union-attr]

    async def open(self, path: str) -> None:
        await self.inner.open(path)

    def address(self, path: str) -> TransportAddress:
        return self.inner.address(path)

    def accept(self, call: "OutgoingCall", target: Target, request: Request) -> None:
        """Handle a request that arrives over a link."""
        incoming = ForwardingReceiver(self, call)
        inner = self.inner.send(target, request, incoming, lambda _instance, _error: None)
        if inner is None:
            call.link.to_caller(call.end, Disconnected("the worker is closed"))
            return
        self.incoming[call] = inner
        call.link.to_caller(call.acknowledged)

    def kill_incoming(self, call: "OutgoingCall") -> None:
        inner = self.incoming.pop(call, None)
        if inner is not None:
            inner.kill()

    def stop_incoming(self, call: "OutgoingCall") -> None:
        inner = self.incoming.get(call)
        if inner is not None:
            inner.stop()

    def caller_gone(self, link: Link) -> None:
        for call in [call for call in self.incoming if call.link is link]:
            self.kill_incoming(call)

    async def close(self) -> None:
        self._is_closed = True
        for call in list(self.outgoing):
            call.link.to_server(call.link.server.kill_incoming, call)
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

    def open_counts(self) -> dict[str, int]:
        """Return counters that must be zero when no request is in flight."""
        return {
            "calls": len(self.outgoing) + len(self.inner._calls),
            "replies": len(self.incoming) + len(self.inner._replies),
        }


class OutgoingCall:
    """Call in the caller's process."""

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
            self.link.to_server(self.link.server.stop_incoming, self)

    def kill(self) -> None:
        if not self.is_over:
            self.link.to_server(self.link.server.kill_incoming, self)
            self._close(None)

    def acknowledged(self) -> None:
        self._timer.cancel()

    def _unacknowledged(self) -> None:
        self.link.to_server(self.link.server.kill_incoming, self)
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
        self._plane.outgoing.pop(self, None)
        self._on_done(self.instance_id, error)


class ForwardingReceiver:
    """Receiver in the worker's process that forwards the response to the caller's process."""

    def __init__(self, plane: SimPlane, call: OutgoingCall) -> None:
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
        self._plane.incoming.pop(self._call, None)
        self._call.link.to_caller(self._call.end, error)
