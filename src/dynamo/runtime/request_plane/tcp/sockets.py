"""Sockets: connections and listeners of the TCP plane, with optional TLS."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from dynamo.core.tasks import TaskOwner
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.Protocol)

SHUTDOWN_TIMEOUT_S = 1.0  # A peer that does not answer the TLS close message is gone.
SLACK_S = 0.5  # Lets the handshake's own timeout expire first: its error is more precise.
HANDSHAKES_MAX = 1024  # Concurrent handshakes per listener; further connections wait in the kernel's queue.
ACCEPT_AGAIN_S = 1.0  # Retry delay of accept() without free file descriptors.


class TcpListener(Protocol):
    """Listening socket."""

    @property
    def sockets(self) -> Any:
        """Return the listening sockets."""

    def close(self) -> None:
        """Stop accepting connections."""


class Sockets:
    """Factory of outgoing and accepted connections."""

    def __init__(self, tls: TcpTls, limits: TcpLimits, metrics: TcpMetrics) -> None:
        self.tls = tls
        self._limits = limits
        self._metrics = metrics
        self._tasks = TaskOwner("request_plane.tls")

    async def connect(self, factory: Callable[[], P], address: str) -> P:
        """Connect to `host:port`. Raise `OSError`, `ValueError` or `TimeoutError`."""
        host, _, port = address.rpartition(":")
        host, tls = host.strip("[]"), self.tls
        timeout_s = self._limits.connect_timeout_s
        options: dict[str, Any] = {}
        if tls.client is not None:
            tls.refresh()
            timeout_s += tls.handshake_timeout_s + SLACK_S
            options = {"ssl": tls.client, "server_hostname": tls.server_name or host, **self._times()}
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await asyncio.get_running_loop().create_connection(factory, host, int(port), **options)
        except TimeoutError:
            raise TimeoutError(f"no connection within {timeout_s:g} s") from None
        return protocol

    async def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int) -> TcpListener:
        """Accept connections; with TLS, the protocol is created after a successful handshake."""
        loop = asyncio.get_running_loop()
        if self.tls.server is None:
            return await loop.create_server(factory, host, port, backlog=backlog)
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setblocking(False)
            listening.bind(address)
            listening.listen(backlog)
        except OSError:
            listening.close()
            raise
        return TlsListener(listening, self._tasks.start(self._accept(listening, factory), "accept"))

    async def close(self) -> None:
        """Stop accepting connections and abort running handshakes."""
        await self._tasks.cancel_and_wait()

    async def _accept(self, listening: socket.socket, factory: Callable[[], asyncio.Protocol]) -> None:
        # asyncio's own server does not report failed handshakes.
        loop = asyncio.get_running_loop()
        places = asyncio.Semaphore(HANDSHAKES_MAX)
        while True:
            await places.acquire()
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:
                logger.warning("failed to accept connections: %s", error)
                places.release()
                await asyncio.sleep(ACCEPT_AGAIN_S)
            else:
                work = self._shake_hands(accepted, f"{peer[0]}:{peer[1]}", factory)
                self._tasks.start(work, "handshake").add_done_callback(lambda _: places.release())

    async def _shake_hands(self, accepted: socket.socket, peer: str, factory: Callable[[], asyncio.Protocol]) -> None:
        self.tls.refresh()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                factory, accepted, ssl=self.tls.server, **self._times()
            )
        except (OSError, TimeoutError) as error:  # Includes ssl.SSLError.
            self._metrics.errors.inc()
            logger.warning(
                "closed connection from %s: TLS handshake failed: %s", peer, str(error) or type(error).__name__
            )

    def _times(self) -> dict[str, float]:
        return {
            "ssl_handshake_timeout": self.tls.handshake_timeout_s,
            "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        }


class TlsListener:
    """Listening socket whose connections start with a TLS handshake."""

    def __init__(self, listening: socket.socket, accepting: "asyncio.Task[None]") -> None:
        self._listening = listening
        self._accepting = accepting

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (self._listening,)

    def close(self) -> None:
        self._accepting.cancel()
        self._accepting.add_done_callback(lambda _: self._listening.close())
