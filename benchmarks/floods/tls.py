"""Attacks of `floods` on TLS: many, slow and broken handshakes, chopped records."""

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.floods.attacks import CHAT, MEGA, AnyAttack, chat, message
from benchmarks.floods.connections import LAST, LIVE, HeldConnections
from benchmarks.floods.send import STATUS_NONE, TIMEOUT_S, Shot, request_bytes
from benchmarks.stacks import HOST


@dataclass(frozen=True, slots=True)
class Hellos:
    """First messages of so many handshakes, sent at the same moment. The server signs a response to each."""

    name: str
    count: int
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that sends them and reads the responses, which it does not continue."""
        hellos = [self._hello() for _ in range(self.count)]
        return partial(self._send, hellos)

    def _hello(self) -> bytes:
        out, context = ssl.MemoryBIO(), _context(self.version)
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
        return out.read()

    def _send(self, hellos: list[bytes], port: int) -> tuple[int, str]:
        answered = 0
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            socks = [stack.enter_context(socket.create_connection((HOST, port), timeout=TIMEOUT_S)) for _ in hellos]
            for sock, hello in zip(socks, hellos, strict=True):
                sock.sendall(hello)
                selector.register(sock, selectors.EVENT_READ)
            until_s = time.monotonic() + TIMEOUT_S
            while answered < len(socks) and time.monotonic() < until_s:
                for key, _ in selector.select(1.0):
                    selector.unregister(key.fileobj)
                    answered += 1
        return STATUS_NONE, f"{answered} answered"


@dataclass(frozen=True, slots=True)
class Handshakes:
    """Complete handshakes in sequence, each with a request."""

    name: str
    count: int
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that makes the connections."""
        return self._connect

    def _connect(self, port: int) -> tuple[int, str]:
        context, last = _context(), b""
        for _ in range(self.count):
            with _connected(port, context) as sock:
                sock.sendall(LAST)
                last = sock.recv(1000)
        return (200 if b" 200 " in last else STATUS_NONE), ""


@dataclass(frozen=True, slots=True)
class ChoppedRecords:
    """One request in records of so many bytes."""

    name: str
    data: bytes
    size: int
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that sends the request and reads its response."""
        return self._send

    def _send(self, port: int) -> tuple[int, str]:
        with _connected(port, _context()) as sock:
            for start in range(0, len(self.data), self.size):
                sock.sendall(self.data[start : start + self.size])
            answer = sock.recv(1000)
        return int(answer[9:12] or b"0"), answer.partition(b"\r\n\r\n")[2].decode(errors="replace")


def tls_attacks() -> Iterator[AnyAttack]:
    """Yield the attacks."""
    yield Hellos("1,000 first messages of TLS 1.3 at once", 1000)
    yield Hellos("1,000 first messages of TLS 1.2 at once", 1000, ssl.TLSVersion.TLSv1_2)
    yield Handshakes("16 clients with 20 handshakes each", 20, clients=16)
    yield HeldConnections("5,000 connections without a handshake", 5000, b"")
    yield HeldConnections("2,000 connections with half a handshake", 2000, Hellos("", 1)._hello()[:100])
    yield HeldConnections("2,000 plain requests to TLS", 2000, LIVE, hold_s=0.2)
    yield HeldConnections("1,000 handshakes that are reset", 1000, Hellos("", 1)._hello(), hold_s=0.0)
    small = request_bytes("POST", CHAT, chat(f'"user":"{"a" * 50_000}"'))
    yield ChoppedRecords("50,000 records of a byte", small, 1)
    large = request_bytes("POST", CHAT, chat(messages=message("a" * (100 * MEGA))))
    yield ChoppedRecords("a message of 100 MB over TLS", large, MEGA)
    yield ChoppedRecords("10,000 pipelined requests over TLS", LIVE * 10_000 + LAST, 1 << 14)


def _context(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    return context


def _connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
    return context.wrap_socket(plain, server_hostname="localhost")
