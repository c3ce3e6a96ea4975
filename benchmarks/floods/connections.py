"""Attacks of `floods` below requests: many, broken, slow or chopped requests of one connection, many connections, WebSockets."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.floods.attacks import CHAT, MEGA, chat
from benchmarks.floods.send import STATUS_NONE, Shot, request_bytes, send
from benchmarks.stacks import HOST

LIVE = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
UPGRADE = (
    b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
NO_SOCKET = b"GET /v1/responses HTTP/1.1\r\nHost: a\r\n\r\n"
LISTS = b'{"type":"response.create","a":[%b[]]}'
WORDS = b'{"type":"response.create","model":"bench","input":"%b"}'
FINAL, TEXT, CONTINUED, CLOSE, PING = 0x80, 1, 0, 8, 9
RESET = struct.pack("ii", 1, 0)  # SO_LINGER with which `close` resets the connection.


@dataclass(frozen=True, slots=True)
class ConnectionAttack:
    """An attack that consists of the bytes it sends, and not of one request."""

    name: str
    data: Callable[[], bytes]
    """Writer of the bytes, which may take a second."""
    after: Callable[[], bytes] = bytes
    """Writer of those that follow the first bytes of the answer."""
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that sends the bytes over a connection of its own."""
        data, after = self.data(), self.after()
        return lambda port: send(port, data, after=after)


@dataclass(frozen=True, slots=True)
class HeldConnections:
    """Many connections that send the same bytes, are held, and are then reset at the same time."""

    name: str
    count: int
    data: bytes
    hold_s: float = 1.0
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that opens, holds and resets the connections."""
        return self._hold

    def _hold(self, port: int) -> tuple[int, str]:
        with contextlib.ExitStack() as stack:
            for _ in range(self.count):
                sock = stack.enter_context(socket.create_connection((HOST, port), timeout=10.0))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                with contextlib.suppress(OSError):
                    sock.sendall(self.data)
            time.sleep(self.hold_s)
        return STATUS_NONE, ""


@dataclass(frozen=True, slots=True)
class DrippingRequest:
    """A chat of which each byte is written alone."""

    name: str
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that sends the chat."""
        return drip


ConnectionAttacks = ConnectionAttack | HeldConnections | DrippingRequest


def connection_attacks() -> Iterator[ConnectionAttacks]:
    """Yield the attacks, the writers not yet called."""
    yield from _pipelines()
    yield from _framing()
    yield from _websockets()
    yield HeldConnections("5,000 idle connections", 5000, b"")
    yield HeldConnections("5,000 connections with half a head", 5000, LIVE[:20])
    yield HeldConnections("2,000 connections with half a body", 2000, CHAT_HEAD % MEGA + b"a" * 1000)
    yield HeldConnections("1,000 connections that are reset", 1000, LIVE, hold_s=0.0)
    yield HeldConnections("500 chats that are abandoned", 500, _stream(100_000))
    yield HeldConnections("500 viewers of the console", 500, b"GET /console/api/live HTTP/1.1\r\nHost: a\r\n\r\n", 2.5)


def _pipelines() -> Iterator[ConnectionAttack]:
    """Yield many requests that are sent at once."""
    yield ConnectionAttack("10,000 pipelined requests", lambda: LIVE * 10_000 + LAST)
    yield ConnectionAttack("10,000 pipelined requests of 8 clients", lambda: LIVE * 10_000 + LAST, clients=8)
    yield ConnectionAttack("10,000 pipelined chats without fields", lambda: (CHAT_HEAD % 2 + b"{}") * 10_000 + LAST)
    yield ConnectionAttack("10,000 requests behind a stream", lambda: _stream(50) + LIVE * 10_000 + LAST)
    yield ConnectionAttack("10,000 refusals behind a stream", lambda: _stream(50) + NO_SOCKET * 10_000 + LAST)


def _framing() -> Iterator[ConnectionAttacks]:
    """Yield requests with large or chopped heads and bodies."""
    extended = b"1;" + b"a" * 4000 + b"\r\na\r\n"
    end = b"0\r\n\r\n"
    trailers = b"0\r\n" + b"a: b\r\n" * MEGA + b"\r\n"
    yield ConnectionAttack("1,000,000 chunks of a byte", lambda: CHUNKED + b"\r\n" + b"1\r\na\r\n" * MEGA + end)
    yield ConnectionAttack("chunks with extensions of 4 KB", lambda: CHUNKED + b"\r\n" + extended * 10_000 + end)
    yield ConnectionAttack("1,000,000 trailers", lambda: CHUNKED + b"\r\n" + trailers)
    yield ConnectionAttack("1,000,000 headers", lambda: CHUNKED + b"a: b\r\n" * MEGA + b"\r\n")
    yield ConnectionAttack("a header of 100 MB", lambda: CHUNKED + b"a: " + b"b" * (100 * MEGA))
    yield ConnectionAttack("a path of 100 MB", lambda: b"GET /" + b"a" * (100 * MEGA))
    yield ConnectionAttack("10 MB of empty lines", lambda: b"\r\n" * (5 * MEGA) + LAST)
    yield ConnectionAttack(
        "a key of 60 KB", lambda: LAST[:-2] + b"Authorization: Bearer " + b"k" * 60_000 + b"\r\n\r\n"
    )
    yield DrippingRequest("a body in writes of a byte")


def _websockets() -> Iterator[ConnectionAttack]:
    """Yield frames and messages on WebSockets."""
    fragments = b"".join([frame(TEXT, b""), frame(CONTINUED, b"a") * 200_000, frame(FINAL | CONTINUED, b"")])
    for path in (b"/v1/realtime", b"/v1/responses"):
        for name, frames in (
            ("200,000 pings", lambda: frame(FINAL | PING, b"") * 200_000),
            ("200,000 fragments", lambda: fragments),
            ("50,000 invalid events", lambda: frame(FINAL | TEXT, b"{}") * 50_000),
            ("a message of 5,000,000 lists", lambda: frame(FINAL | TEXT, LISTS % (b"[]," * (5 * MEGA)))),
            ("a message of 15 MB", lambda: frame(FINAL | TEXT, WORDS % (b"a" * (15 * MEGA)))),
            ("a message of 100 MB", lambda: frame(FINAL | TEXT, b"a" * (100 * MEGA))),
        ):
            after = partial(_closing, frames)
            yield ConnectionAttack(f"{name} to {path.decode()}", partial(bytes.__mod__, UPGRADE, path), after)


def _closing(frames: Callable[[], bytes]) -> bytes:
    return frames() + frame(FINAL | CLOSE, struct.pack("!H", 1000))


def _stream(tokens: int) -> bytes:
    body = chat('"stream":true', tokens=tokens)
    return CHAT_HEAD % len(body) + body


def frame(first: int, data: bytes) -> bytes:
    """Return a client's frame, masked with zeros."""
    size = len(data)
    if size < 126:
        return struct.pack("!BBI", first, 0x80 | size, 0) + data
    if size < 1 << 16:
        return struct.pack("!BBHI", first, 0x80 | 126, size, 0) + data
    return struct.pack("!BBQI", first, 0x80 | 127, size, 0) + data


def drip(port: int) -> tuple[int, str]:
    """Send a chat, a byte with each write."""
    with socket.create_connection((HOST, port), timeout=10.0) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request_bytes("POST", CHAT, chat('"user":"' + "a" * 20_000 + '"')):
            sock.sendall(bytes((byte,)))
        return 200, sock.recv(1000).decode(errors="replace")
