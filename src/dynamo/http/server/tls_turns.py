"""TLS turns: handshakes and records of a listener's connections, for a few milliseconds per iteration of the loop.

A handshake takes up to a millisecond, a record some microseconds even if it has one byte. The loop's own TLS server handles all
that has arrived at once. `TlsConnection` is the protocol of a connection, before the TLS protocol: it passes data on in slices
while the iteration has time left; otherwise the connection is not read until its turn, in a later iteration. Data is written
by the TLS protocol directly.
"""

import asyncio
import asyncio.sslproto
import ssl
import time
from collections.abc import Callable
from typing import Any

from dynamo.http.server.paced_input import InputTurns

SLICE_BYTES = 32 << 10
"""Bytes read at a time: two large records, or 1,400 of one byte, which take 7 ms."""
HANDSHAKE_S = 10.0
"""Maximum time from a connection to the end of its handshake."""


class TlsTurns(InputTurns):
    """Turns of the connections of one listener."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self.buffer = memoryview(bytearray(SLICE_BYTES))
        """Where all connections read to: each passes its data on before the next one reads."""


class TlsConnection(asyncio.BufferedProtocol):
    """One connection, from its accept on. The TLS protocol is made when its first data has its turn."""

    __slots__ = ("_is_lost", "_kept", "_make", "_timer", "_tls", "_transport", "_turns")

    def __init__(self, make: Callable[[], Any], turns: TlsTurns, loop: asyncio.AbstractEventLoop) -> None:
        """`make` returns the TLS protocol."""
        self._make = make
        self._turns = turns
        self._tls: Any = None
        self._transport: Any = None
        self._kept = b""
        """Data that waits for its turn; nothing more is read until then."""
        self._is_lost = False
        self._timer = loop.call_later(HANDSHAKE_S, self._give_up)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first data."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to read to."""
        return self._turns.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass data on, or keep it until the connection's turn."""
        data = self._turns.buffer[:nbytes]
        if not self._kept and self._turns.has_time():
            self._feed(data)
            return
        if not self._kept:
            self._turns.add(self._turn)
        self._transport.pause_reading()
        self._kept += data  # One read may follow `pause_reading`.

    def _turn(self) -> None:
        data, self._kept = self._kept, b""
        if self._is_lost or self._transport.is_closing():
            return
        self._transport.resume_reading()  # First: the TLS protocol may pause it again.
        for start in range(0, len(data), SLICE_BYTES):
            self._feed(memoryview(data)[start : start + SLICE_BYTES])

    def _feed(self, data: memoryview) -> None:
        tls = self._tls
        if tls is None:
            self._timer.cancel()
            tls = self._tls = self._make()
            tls.connection_made(self._transport)
        size = len(data)
        tls.get_buffer(size)[:size] = data
        tls.buffer_updated(size)

    def eof_received(self) -> bool | None:
        """Close, or let the TLS protocol do it."""
        return None if self._tls is None else self._tls.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads more slowly than the server writes."""
        if self._tls is not None:
            self._tls.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has caught up."""
        if self._tls is not None:
            self._tls.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, in its turn: thousands may be lost at once."""
        self._is_lost = True
        self._timer.cancel()
        tls, self._tls = self._tls, None
        if tls is not None:
            self._turns.run(lambda: tls.connection_lost(exc))

    def _give_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def tls_connections(
    loop: asyncio.AbstractEventLoop, make_protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext
) -> Callable[[], TlsConnection] | None:
    """Return a factory of a listener's connections; None if the loop has no TLS protocol that can be used."""
    kind = tls_protocol(loop)
    if kind is None:
        return None
    turns = TlsTurns()

    def make() -> Any:
        return kind(loop, make_protocol(), context, None, server_side=True, ssl_handshake_timeout=HANDSHAKE_S)

    return lambda: TlsConnection(make, turns, loop)


def tls_protocol(loop: asyncio.AbstractEventLoop) -> Any:
    """Return the class of the loop's TLS protocol: uvloop's, or that of asyncio; None for one without buffers."""
    kind: Any = asyncio.sslproto.SSLProtocol
    if type(loop).__module__.startswith("uvloop"):
        import uvloop.loop

        kind = getattr(uvloop.loop, "SSLProtocol", None)
    return kind if hasattr(kind, "get_buffer") and hasattr(kind, "buffer_updated") else None
