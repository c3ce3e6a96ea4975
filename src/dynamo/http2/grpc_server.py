"""GrpcServer: a listener for gRPC calls, each served by a method in a task of its own."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.listening import bind
from dynamo.core.tasks import TaskOwner
from dynamo.http2.connection import Http2Connection
from dynamo.http2.frames import ErrorCode, Http2Error
from dynamo.http2.grpc_call import GrpcCall, GrpcCode, GrpcStatus, refuse, refuse_other_protocol, timeout_of
from dynamo.http2.header_blocks import RequestHeaders
from dynamo.http2.stream import Http2Stream

logger = logging.getLogger(__name__)

GrpcMethod = Callable[[GrpcCall], Awaitable[None]]
"""Serves one call; it ends with OK when the method returns, or with the `GrpcStatus` that it raises."""

CONNECTIONS_MAX = 1024
"""Open connections; further ones are closed. A gateway has a few for each of its threads."""
PREFACE_S = 10.0
"""Maximum time for a new connection to speak HTTP/2."""
BACKLOG = 1024
DEAD_PEER_PROBES = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A peer whose host is gone is noticed after a minute, which releases its calls. Linux."""
CONTENT_TYPE = b"application/grpc"


class GrpcServer:
    """Methods of one port."""

    def __init__(self, methods: Mapping[str, GrpcMethod], *, message_bytes_max: int) -> None:
        """`methods` by path, `/SERVICE/METHOD`; `message_bytes_max` limits each received message."""
        self.methods = {path.encode(): method for path, method in methods.items()}
        self.message_bytes_max = message_bytes_max
        self.connections: set[GrpcConnection] = set()
        self.tasks = TaskOwner("gRPC calls")
        self.is_stopping = False
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, setting: str, tls: ssl.SSLContext | None = None) -> int:
        """Listen, and return the port. Raise `StartupError` naming the `setting` if the port is in use."""
        listener = bind(host, port, setting)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: GrpcConnection(self), sock=listener, ssl=tls, backlog=BACKLOG)
        return int(listener.getsockname()[1])

    async def stop(self, budget_s: float) -> None:
        """Refuse new calls, let those in progress end within the budget, and close."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.go_away()
        if not await self.tasks.wait(budget_s):
            logger.warning("%d gRPC calls did not end within %g s", len(self.tasks), budget_s)
        await self.tasks.cancel_and_wait()
        for connection in list(self.connections):
            connection.close()


class GrpcConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._http2 = Http2Connection(self._accept, self._send)
        self._unsent: list[bytes] = []
        self._is_receiving = False
        self._timer: asyncio.TimerHandle | None = None

    def go_away(self) -> None:
        """Announce that no further call is served here."""
        self._http2.go_away()

    def close(self) -> None:
        """Send what is written, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announce the settings, or close one connection too many."""
        transport = self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass.
        if len(self._server.connections) >= CONNECTIONS_MAX or self._server.is_stopping:
            transport.close()
            return
        self._server.connections.add(self)
        _probe_peer(transport)
        self._timer = self._loop.call_later(PREFACE_S, self._check_preface)
        self._http2.begin()

    def data_received(self, data: bytes) -> None:
        """Handle frames; answers to all of them are one write."""
        self._is_receiving = True
        try:
            self._http2.receive(data)
        except Http2Error as error:
            logger.info("gRPC connection closed: %s", error)
            self._http2.go_away(error.code, str(error))
            self.close()
        finally:
            self._is_receiving = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """End the connection's calls."""
        self._transport = None
        self._unsent.clear()
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._http2.lost()

    def pause_writing(self) -> None:
        """Read no more from a client that does not read."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Continue reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _send(self, data: bytes) -> None:
        if not self._unsent and not self._is_receiving:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(b"".join(unsent))

    def _check_preface(self) -> None:
        if not self._http2.has_begun:
            self.close()

    # Calls.

    def _accept(self, stream: Http2Stream, headers: RequestHeaders) -> None:
        """Start the method of a call."""
        given = dict(headers)
        if not given.get(b"content-type", b"").startswith(CONTENT_TYPE):
            refuse_other_protocol(stream)
            return
        path = given.get(b":path", b"")
        method = self._server.methods.get(path)
        if method is None:
            refuse(stream, GrpcCode.UNIMPLEMENTED, f"method {path.decode('latin-1')}: unknown")
            return
        if self._server.is_stopping:
            stream.reset(ErrorCode.REFUSED_STREAM)
            return
        call = GrpcCall(stream, headers, self._server.message_bytes_max)
        stream.user = call
        task = self._server.tasks.start(_serve(call, method), "call")
        call.on_reset = task.cancel
        timeout = timeout_of(headers)
        if timeout is not None:
            timer = self._loop.call_later(timeout, _expire, call, task)
            task.add_done_callback(lambda _: timer.cancel())


async def _serve(call: GrpcCall, method: GrpcMethod) -> None:
    """Run a method, and end its call."""
    failures: list[Exception] = []
    try:
        with ErrorBoundary(failures.append):  # Request boundary: the client gets a status.
            await method(call)
    except asyncio.CancelledError:
        call.end(GrpcCode.UNAVAILABLE, "the server stops")
        raise
    for error in failures:
        if isinstance(error, GrpcStatus):
            call.end(error.code, str(error))
        else:
            logger.error("gRPC call failed", exc_info=error)
            call.end(GrpcCode.INTERNAL, "internal error")
        return
    call.end()


def _expire(call: GrpcCall, task: asyncio.Task[None]) -> None:
    """End a call whose time is over."""
    call.end(GrpcCode.DEADLINE_EXCEEDED, "the call's deadline has passed")
    task.cancel()


def _probe_peer(transport: asyncio.Transport) -> None:
    """Let the kernel notice a peer whose host is gone."""
    found = transport.get_extra_info("socket")
    if found is None:
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in DEAD_PEER_PROBES:
        found.setsockopt(socket.IPPROTO_TCP, name, value)
