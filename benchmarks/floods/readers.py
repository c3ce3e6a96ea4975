"""Attacks of `floods` by clients that read slowly, or not at all, what they have requested."""

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.floods.attacks import CHAT, MEGA, chat
from benchmarks.floods.endpoints import RESPONSES, input_body
from benchmarks.floods.send import STATUS_NONE, Shot, request_bytes
from benchmarks.stacks import HOST

RECEIVE_BUFFER_BYTES = 2048
"""The smallest the kernel allows, so that data waits in the server and not in the client's kernel."""
STREAMED_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class SlowReaders:
    """Many clients that each send one request and read a byte of the response now and then."""

    name: str
    count: int
    data: bytes
    hold_s: float = 2.0
    pause_s: float = 0.2
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that sends the requests, reads slowly for `hold_s`, and disconnects."""
        return self._read_slowly

    def _read_slowly(self, port: int) -> tuple[int, str]:
        with contextlib.ExitStack() as stack:
            socks = []
            for _ in range(self.count):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                sock.settimeout(10.0)
                sock.connect((HOST, port))
                sock.sendall(self.data)
                sock.setblocking(False)
                socks.append(sock)
            until_s = time.monotonic() + self.hold_s
            while time.monotonic() < until_s:
                for sock in socks:
                    with contextlib.suppress(OSError):
                        sock.recv(1)
                time.sleep(self.pause_s)
        return STATUS_NONE, ""


def reader_attacks() -> Iterator[SlowReaders]:
    """Yield the attacks."""
    streamed = request_bytes("POST", CHAT, chat('"stream":true', tokens=STREAMED_TOKENS))
    yield SlowReaders("500 streams read a byte at a time", 500, streamed)
    choices = request_bytes("POST", CHAT, chat('"n":128,"stream":true,"logprobs":true,"top_logprobs":20', tokens=2000))
    yield SlowReaders("8 streams of 128 choices, read a byte at a time", 8, choices)
    echo = request_bytes("POST", RESPONSES, input_body(f'"hi","stream":true,"instructions":"{"a" * (MEGA // 4)}"'))
    yield SlowReaders("64 responses with instructions of 256 KB, not read", 64, echo, pause_s=1.0)
    page = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    yield SlowReaders("500 scrapes that are not read", 500, page, hold_s=1.0, pause_s=1.0)
    document = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 16
    yield SlowReaders("200 pipelines of documents, not read", 200, document, hold_s=1.0, pause_s=1.0)
