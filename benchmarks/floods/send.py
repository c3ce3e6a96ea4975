"""Sending of one request of `floods`, or of any bytes, over a connection of its own."""

import contextlib
import selectors
import socket
from collections.abc import Callable

from benchmarks.loadgen import read_head
from benchmarks.stacks import HOST

TIMEOUT_S = 90.0
RECEIVE_BYTES = 1 << 16
SEND_BYTES = 1 << 18
ANSWER_BYTES_SHOWN = 2000
STATUS_NONE = 0

Shot = Callable[[int], tuple[int, str]]
"""Makes one attack on a port; returns its status and the start of its answer. Status 0: no answer."""


def request_bytes(method: str, path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """Return one request after whose answer the connection is closed."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {content_type}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def send(port: int, data: bytes, *, after: bytes = b"") -> tuple[int, str]:
    """Send bytes, and others `after` the first bytes of an answer, and read until the server closes the connection.

    It reads while it sends, as a server may stop reading while its answers are not read.
    """
    kept = b""
    with socket.create_connection((HOST, port), timeout=TIMEOUT_S) as sock, selectors.DefaultSelector() as selector:
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        left = memoryview(data)
        with contextlib.suppress(ConnectionResetError):
            while ready := selector.select(TIMEOUT_S):
                events = ready[0][1]
                if events & selectors.EVENT_READ:
                    part = sock.recv(RECEIVE_BYTES)
                    if not part:
                        break
                    if len(kept) < ANSWER_BYTES_SHOWN:
                        kept = (kept + part)[:ANSWER_BYTES_SHOWN]
                    if after:
                        left, after = memoryview(after), b""
                        selector.modify(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if events & selectors.EVENT_WRITE:
                    try:
                        left = left[sock.send(left[:SEND_BYTES]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.modify(sock, selectors.EVENT_READ)
    status = read_head(kept)[0] if kept.startswith(b"HTTP/1") else STATUS_NONE  # HTTP/2 has frames.
    return status, kept.partition(b"\r\n\r\n")[2].decode(errors="replace")
