"""Records of `floods`: what the stream's client, the engine and the frontend's probe have written since the last look.

The stream is read by a process of its own, so that the attacks, which are made by threads of the benchmark, do not delay it.

    python -m benchmarks.floods.records FILE PORT [CA FILE] < REQUEST
"""

import os
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from benchmarks.corpus import ROOT
from benchmarks.floods.frontend import RECORD as LAG
from benchmarks.floods.frontend import LoopLag
from benchmarks.loadgen import MARKERS, read_head
from benchmarks.metronome import BEAT
from benchmarks.stacks import HOST

ARRIVAL = struct.Struct("=dI")
"""Time of a read, and the number of tokens in it."""
RECEIVE_BYTES = 65536
TIMEOUT_S = 60.0


class RecordFile:
    """Records that another process appends to a file."""

    def __init__(self, path: str, record: struct.Struct) -> None:
        self._path = path
        self._record = record
        self._offset = 0

    def new(self) -> Iterator[tuple[float, ...]]:
        """Yield the records since the last call."""
        if not os.path.exists(self._path):
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: len(data) - len(data) % self._record.size]
        self._offset += len(data)
        yield from self._record.iter_unpack(data)


class TokenDelays:
    """Delay of each token of one stream, from the engine's write to the client's read.

    The engine writes a token at every tick. The first one read belongs to the last tick before it.
    """

    def __init__(self, beats: RecordFile, arrivals: RecordFile) -> None:
        self._beats = beats
        self._arrivals = arrivals
        self._written: deque[float] = deque()
        self._has_begun = False

    def new(self) -> Iterator[tuple[float, float]]:
        """Yield the write time and the delay of the tokens read since the last call."""
        reads = [at_s for at_s, tokens in self._arrivals.new() for _ in range(int(tokens))]
        self._written.extend(written_s for _, written_s, _, streams in self._beats.new() if streams)
        if reads and not self._has_begun:
            self._has_begun = True
            while len(self._written) > 1 and self._written[1] <= reads[0]:
                self._written.popleft()
        for at_s in reads:
            if not self._written:
                return
            written_s = self._written.popleft()
            yield written_s, at_s - written_s


def read_lags(file: RecordFile) -> list[LoopLag]:
    """Return the new records of a probe; times are of `time.perf_counter`."""
    return [LoopLag(*record) for record in file.new()]


def lag_file(path: str) -> RecordFile:
    """Return the file of a probe."""
    return RecordFile(path, LAG)


def delays_of(beats: str, arrivals: str) -> TokenDelays:
    """Return the delays from the engine's file and the client's."""
    return TokenDelays(RecordFile(beats, BEAT), RecordFile(arrivals, ARRIVAL))


class StreamClient:
    """Process that reads one stream and records when its tokens arrive."""

    def __init__(self, module: str, arguments: Sequence[str], request: bytes) -> None:
        """`module` is a program that reads the stream of the request on its standard input."""
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None, "it is started with a pipe"
        self._process.stdin.write(request)
        self._process.stdin.close()

    @property
    def is_alive(self) -> bool:
        """Whether the stream continues."""
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)


def main() -> int:
    """Read one stream until it ends; return 1 if it was refused."""
    path, port, authority = sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:])
    marker = MARKERS["/v1/chat/completions"]
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sock = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
    if authority:
        sock = ssl.create_default_context(cafile=authority).wrap_socket(sock, server_hostname="localhost")
    with sock:
        sock.sendall(sys.stdin.buffer.read())
        data, status = b"", 0
        while got := sock.recv(RECEIVE_BYTES):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            now_s = time.perf_counter()
            status = status or read_head(got)[0]
            data = data[-(len(marker) + 1) :] + got
            tokens = data.count(marker) - data.count(marker + b'"')
            data = data[data.rfind(b"\n") + 1 :]
            if tokens:
                os.write(out, ARRIVAL.pack(now_s, tokens))
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
