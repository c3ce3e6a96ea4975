"""A light client of gRPC streams for load: HTTP/2 frames written once, so that the client costs less than what it measures."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from hpack import Encoder

from dynamo.http2 import frames

STREAM_WINDOW = 1 << 20


@dataclass(slots=True)
class Load:
    """What one client measured: seconds from the start of a stream to its last answer, and streams without it."""

    latencies_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """Seconds by which each stream started after its time in the schedule."""
    refused: int = 0


class LoadClient(asyncio.Protocol):
    """One connection, on which streams of the same shape are sent at a rate."""

    def __init__(self, path: str, bodies: Sequence[Sequence[bytes]], answers: int) -> None:
        """Each stream sends the messages of one body and ends after `answers` DATA frames."""
        headers = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"server"),
            (b"content-type", b"application/grpc"), (b"te", b"trailers"),
        ]  # fmt: skip
        self.load = Load()
        encoder = Encoder()
        self._blocks = [encoder.encode(headers), encoder.encode(headers)]
        """Headers of the first stream and of all others, which name entries of the table, as of gateways."""
        self._bodies = [b"".join(b"\0" + len(one).to_bytes(4, "big") + one for one in body) for body in bodies]
        self._answers = answers
        self._open: dict[int, tuple[float, int]] = {}
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._window = frames.WINDOW_DEFAULT
        self._number = 1
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._idle = asyncio.Event()

    async def run(self, port: int, rate: float, seconds: float) -> Load:
        """Send streams at a rate, and wait for the last one to end."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", port)
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            ahead = began + number / rate - time.perf_counter()
            if ahead > 0:
                await asyncio.sleep(ahead)
            self.load.late_s.append(time.perf_counter() - began - number / rate)
            self._waiting.append((time.perf_counter(), self._bodies[number % len(self._bodies)]))
            self._start()
        while self._open or self._waiting:
            self._idle.clear()
            await self._idle.wait()
        transport.close()
        return self.load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(
            frames.PREFACE
            + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW})
            + frames.window_update(0, frames.WINDOW_MAX - frames.WINDOW_DEFAULT)
        )

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data
        at = 0
        while len(data) - at >= frames.HEADER_BYTES:
            high, low, kind, flags, number = frames.HEADER.unpack_from(data, at)
            end = at + frames.HEADER_BYTES + (high << 16 | low)
            if end > len(data):
                break
            self._frame(kind, flags, number, data[at + frames.HEADER_BYTES : end])
            at = end
        self._buffer = data[at:]
        self._start()
        if not self._open and not self._waiting:
            self._idle.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.load.refused += len(self._open) + len(self._waiting)
        self._open.clear()
        self._waiting.clear()
        self._idle.set()

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.DATA and number in self._open:
            began, seen = self._open[number]
            self._open[number] = began, seen + 1
            if seen + 1 == self._answers:
                self.load.latencies_s.append(time.perf_counter() - began)
                self._write(frames.frame(frames.DATA, frames.END_STREAM, number))
        if (kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM) or kind == frames.RST_STREAM:
            _, seen = self._open.pop(number, (0.0, self._answers))
            self.load.refused += seen < self._answers
        elif kind == frames.WINDOW_UPDATE and number == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        elif kind == frames.PING and not flags & frames.ACK:
            self._write(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _start(self) -> None:
        """Start the streams that wait, as far as the connection's window allows."""
        while self._waiting and len(self._waiting[0][1]) <= self._window:
            began, body = self._waiting.popleft()
            number, self._number = self._number, self._number + 2
            self._window -= len(body)
            self._open[number] = began, 0
            head = frames.frame(frames.HEADERS, frames.END_HEADERS, number, self._blocks[number > 1])
            self._write(head + frames.frame(frames.DATA, 0, number, body))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
