"""TcpPlane: one listener for a process's handlers, and one connection to each called worker.

The first two bytes of an accepted connection select the framing: a path length (Dynamo framing) or zero (batched
frames). A worker's discovery record contains the framing that it supports.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from dynamo.core.errors import CannotConnect, Disconnected
from dynamo.core.listening import listen_error
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import TransportAddress
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Call, OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.tcp.batched_caller import BatchedLink
from dynamo.runtime.request_plane.tcp.batched_worker import BatchedSession
from dynamo.runtime.request_plane.tcp.common import TcpMetrics, TcpOptions, advertised, local_address, peer_of
from dynamo.runtime.request_plane.tcp.sockets import Sockets, TcpListener
from dynamo.runtime.request_plane.tcp.unfinished import FRAMES_HELD_MAX, UnfinishedFrames
from dynamo.runtime.request_plane.tcp.upstream_caller import ResponseListener, UpstreamLink
from dynamo.runtime.request_plane.tcp.upstream_worker import ResponseConnections, UpstreamSession
from dynamo.runtime.server import Dispatcher

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0  # Time to send pending data.

Session = BatchedSession | UpstreamSession
Link = BatchedLink | UpstreamLink
LinkKey = tuple[str, bool]
"""Worker address, and whether batched frames are used."""


class TcpPlane:
    """Request plane of one process over TCP."""

    carries_frames = True

    def __init__(
        self, dispatcher: Dispatcher, options: TcpOptions | None = None, registry: MetricsRegistry | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._options = options or TcpOptions()
        self._limits = self._options.limits
        self._metrics = TcpMetrics(registry or MetricsRegistry())
        self._links: dict[LinkKey, Link] = {}
        self._connecting: dict[LinkKey, asyncio.Task[None]] = {}
        self._sessions: set[Session | _Arrival] = set()
        self._sockets = Sockets(self._options.tls, self._limits, self._metrics)
        bytes_max = FRAMES_HELD_MAX * self._limits.message_bytes_max
        self._unfinished = UnfinishedFrames(bytes_max, self._metrics)
        self._response_listener = ResponseListener(self._limits, self._metrics, self._check_gone)
        self._responses = ResponseConnections(self._sockets, self._check_gone)
        self._server: TcpListener | None = None
        self._answer_server: TcpListener | None = None
        self._opening_answers = asyncio.Lock()
        self._is_closed = False
        self._gone = asyncio.Event()

    # Caller --------------------------------------------------------------------------------------------------------

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> Call | None:
        link = self._links.get(self._key(target))
        if link is None or not link.is_open:
            return None
        return link.send(target, request, receiver, on_done)

    def is_silent(self, target: Target) -> bool:
        """Return True while an acknowledgement is overdue; False for released workers, which may acknowledge late."""
        link = self._links.get(self._key(target))
        return isinstance(link, BatchedLink) and link.is_open and link.is_silent

    def suspect(self, target: Target) -> None:
        """Probe a worker that supports batched frames; a released worker might treat the probe as a request."""
        link = self._links.get(self._key(target))
        if isinstance(link, BatchedLink) and link.is_open:
            link.suspect(target.instance_id)

    async def connect(self, target: Target) -> None:
        key = self._key(target)
        link = self._links.get(key)
        if link is not None and link.is_open:
            return
        if self._is_closed:
            raise Disconnected("request plane closed")
        task = self._connecting.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(target), name=f"connect {target.address}")
            self._connecting[key] = task

            def made(done: "asyncio.Task[None]") -> None:
                self._connecting.pop(key, None)
                if not done.cancelled():
                    done.exception()  # Mark the exception as retrieved: all waiting callers may be gone.

            task.add_done_callback(made)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Disconnected("request plane closed") from None
            raise

    def _key(self, target: Target) -> LinkKey:
        """Return the key of the connection: one worker may have two, because request streams need Dynamo framing."""
        return target.address, target.is_batched and self._options.speaks_batched

    async def _connect(self, target: Target) -> None:
        try:
            make = await self._link_maker(target)
            link = await self._sockets.connect(make, target.address)
        except (OSError, ValueError, TimeoutError) as error:
            self._metrics.errors.inc()
            raise CannotConnect(f"cannot connect to worker {target.address}: {error}") from None
        self._links[self._key(target)] = link

    async def _link_maker(self, target: Target) -> Callable[[], Link]:
        if self._key(target)[1]:
            return lambda: BatchedLink(
                target.address, self._limits, self._metrics, self._link_closed, has_pulse=target.has_pulse
            )
        tls = self._options.tls
        if tls.is_half:
            missing = "--tcp-tls-cert-path" if tls.server is None else "--tcp-tls-ca-cert-path"
            raise CannotConnect(f"worker {target.address} responds on a connection of its own: TLS requires {missing}")
        answer_address = await self._listen_for_answers()
        return lambda: UpstreamLink(target.address, self._response_listener, answer_address, self._link_closed)

    def _link_closed(self, link: Link) -> None:
        key = link.address, isinstance(link, BatchedLink)
        if self._links.get(key) is link:
            del self._links[key]
        self._check_gone()

    async def _listen_for_answers(self) -> str:
        host = self._options.answer_host or self._options.host
        async with self._opening_answers:  # Concurrent first connections share one listener.
            if self._answer_server is None:
                self._answer_server = await self._sockets.listen(
                    self._response_listener.connection,
                    host or local_address(),
                    self._options.answer_port,
                    self._options.backlog,
                )
        return _join(advertised(host), _port(self._answer_server))

    # Worker --------------------------------------------------------------------------------------------------------

    @property
    def speaks_batched(self) -> bool:
        return self._options.speaks_batched

    async def listen(self) -> None:
        if self._server is None:
            host = self._options.host or local_address()
            port = self._options.port
            try:
                self._server = await self._sockets.listen(lambda: _Arrival(self), host, port, self._options.backlog)
            except OSError as error:
                setting = f"DYN_TCP_RPC_PORT={port}" if port else f"DYN_TCP_RPC_HOST={host}"
                raise listen_error(setting, host, error) from None

    async def open(self, path: str) -> None:
        """Do nothing: the listener serves every path."""

    def address(self, path: str) -> TransportAddress:
        assert self._server is not None, "address before listen()"
        return TransportAddress(tcp=f"{_join(advertised(self._options.host), _port(self._server))}/{path}")

    def session(self, first: bytes) -> Session:
        """Return the protocol that the first bytes of a connection select."""
        session: Session
        if first == frame.HELLO_PREFIX:
            session = BatchedSession(self._dispatcher, self._limits, self._metrics, self._unfinished, self.left)
        else:
            session = UpstreamSession(
                self._dispatcher, self._limits, self._metrics, self._responses, self._unfinished, self.left
            )
        self._sessions.add(session)
        return session

    def arrived(self, arrival: "_Arrival") -> None:
        self._sessions.add(arrival)
        self._unfinished.note(arrival, 1, is_new=True)  # Until its first bytes arrive.

    def left(self, session: "Session | _Arrival") -> None:
        self._unfinished.forget(session)
        self._sessions.discard(session)
        self._check_gone()

    async def close(self) -> None:
        self._is_closed = True
        for server in (self._server, self._answer_server):
            if server is not None:
                server.close()
        connecting = set(self._connecting.values())
        for task in connecting:
            task.cancel()
        for connection in (*self._links.values(), *self._sessions):
            connection.close()
        self._response_listener.close()
        self._unfinished.close()
        if connecting:
            await asyncio.wait(connecting, timeout=CLOSE_TIMEOUT_S)
        await self._sockets.close()
        await self._responses.tasks.cancel_and_wait()
        await self._response_listener.tasks.cancel_and_wait()
        self._responses.close()
        self._check_gone()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # Before 3.12 `wait_for` may swallow a cancellation.
                await self._gone.wait()
        except TimeoutError:
            logger.warning("closing connections with unsent data: timeout")
            for stuck in (*self._links.values(), *self._sessions, *self._responses.open):
                stuck.abort()

    def garbled(self, transport: asyncio.BaseTransport) -> None:
        """Close a connection with an unknown protocol."""
        self._metrics.errors.inc()
        logger.warning(
            "closing connection from %s: starts with neither a request nor a batched greeting", peer_of(transport)
        )

    def _open(self) -> bool:
        return bool(self._links or self._sessions or self._response_listener.connections or self._responses.open)

    def _check_gone(self) -> None:
        if self._is_closed and not self._open():
            self._gone.set()


class _Arrival(asyncio.Protocol):
    """Accepted connection whose framing is not known yet."""

    def __init__(self, plane: TcpPlane) -> None:
        self._plane = plane
        self._transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        self._plane.arrived(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._data += data
        if len(self._data) < len(frame.HELLO_PREFIX):
            return
        data = self._data
        if data.startswith(frame.HELLO_PREFIX):
            if not frame.HELLO.startswith(data[: len(frame.HELLO)]):
                self._plane.garbled(self._transport)
                self._transport.abort()
                return
            if len(data) < len(frame.HELLO):
                return
            data = data[len(frame.HELLO) :]
        session = self._plane.session(self._data[: len(frame.HELLO_PREFIX)])
        self._plane.left(self)
        self._transport.set_protocol(session)
        session.connection_made(self._transport)
        if data:
            session.data_received(data)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def connection_lost(self, error: Exception | None) -> None:
        self._plane.left(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    abort = close


def _port(server: TcpListener) -> int:
    return int(server.sockets[0].getsockname()[1])


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
