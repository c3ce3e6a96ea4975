"""Faults injected into real processes and sockets. Each has a `verify` that checks that it took effect."""

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until

OWN_REGISTRY = "kv-behind-proxy"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Kill:
    """SIGKILL."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.at = time.monotonic()
        process.send_signal(signal.SIGKILL)
        self.verify()

    def verify(self) -> None:
        assert self._process.wait(DEADLINE_S) == -signal.SIGKILL, "it did not die by the signal"


class Freeze:
    """SIGSTOP, until `thaw`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.at = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        self.verify()

    def verify(self) -> None:
        wait_until(lambda: states(self._process.pid) == {"T"}, "it was not stopped")

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        wait_until(lambda: "T" not in states(self._process.pid), "it was not continued")


class Reset:
    """Connection closed by an RST."""

    def __init__(self, client: socket.socket) -> None:
        self._before = resets()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        self.verify()

    def verify(self) -> None:
        wait_until(lambda: resets() > self._before, "no reset was sent")


class Proxy:
    """Proxy between a frontend and one worker; it can cut and stall connections.

    The worker registers in a directory of its own. The proxy copies its records into the cluster's directory, in which
    the worker's address is the proxy's: the frontend never sees the other one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._own, self._public = (cluster.folder / name for name in (OWN_REGISTRY, "kv"))
        self._worker = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._copied: dict[Path, int] = {}
        self._is_closed = threading.Event()
        self.stalled_bytes = 0
        self._copier = threading.Thread(target=self._copy_records, daemon=True)
        for thread in (self._copier, threading.Thread(target=self._accept, daemon=True)):
            thread.start()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of the worker."""
        return {"DYN_FILE_KV": str(self._own)}

    def _copy_records(self) -> None:
        while not self._is_closed.wait(0.05):
            found: dict[Path, int] = {}
            for source in self._own.glob("v1/*/*"):
                with contextlib.suppress(FileNotFoundError):
                    found[source] = source.stat().st_mtime_ns
                    if self._copied.get(source) != found[source]:
                        self._copy(source)
            for gone in self._copied.keys() - found.keys():
                (self._public / gone.relative_to(self._own)).unlink(missing_ok=True)
            self._copied = found

    def _copy(self, source: Path) -> None:
        value, target = source.read_bytes(), self._public / source.relative_to(self._own)
        head, key, rest = value.partition(b'"tcp":"')
        address, _, path = rest.partition(b"/")
        if key:
            self._worker = int(address.rpartition(b":")[2])
            value = b'%b"tcp":"127.0.0.1:%d/%b' % (head, self._port, path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self._public / ".new-proxy"
        unfinished.write_bytes(value)
        unfinished.chmod(0o600)
        unfinished.rename(target)

    @property
    def connections(self) -> int:
        return len(self._pairs)

    def reset(self) -> None:
        """Send RST to both ends of every connection."""
        before, pairs = resets(), self._pairs
        self._pairs = []
        for pair in pairs:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RD)  # Wakes the reading thread.
                end.close()
        wait_until(lambda: resets() > before, "no reset was sent")

    def stall(self) -> None:
        """Stall half-open connections: they stay established, and no data passes."""
        self._flows.clear()

    def verify_stall(self) -> None:
        wait_until(lambda: self.stalled_bytes > 0, "nothing was held back")

    def heal(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._is_closed.set()
        self._copier.join()
        self._flows.set()
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._worker))
            except OSError:  # The worker has ended.
                near.close()
                continue
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._flows.is_set():
                    self.stalled_bytes += len(data)
                    self._flows.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class SmallDisk:
    """File system of a few pages; `fill` uses all of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "tmpfs", str(root)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("only root may make a small disk")
        self._filler = root / "filler"

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self._filler, "ab", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        self.verify()

    def verify(self) -> None:
        with pytest.raises(OSError, match="No space") as raised:
            (self.root / "probe").write_bytes(b"x")
        assert raised.value.errno == errno.ENOSPC
        (self.root / "probe").unlink(missing_ok=True)

    def free(self) -> None:
        self._filler.unlink()

    def remove(self) -> None:
        subprocess.run(["umount", "-l", str(self.root)], check=True)


def states(pid: int) -> set[str]:
    """Return the states of a process's threads."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def resets() -> int:
    """Return the number of RSTs that this machine's TCP has sent."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return int(dict(zip(names, values, strict=True))["OutRsts"])


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextlib.contextmanager
def serving(folder: Path, *frontend: str) -> Iterator[Cluster]:
    """Start a frontend; the test starts the workers."""
    with Cluster(folder, *frontend) as cluster:
        cluster.wait_until(
            lambda: cluster.frontend.poll() is not None or cluster.is_live(), "the frontend never came up"
        )
        assert cluster.frontend.poll() is None, cluster.logs()
        yield cluster


class RequestThread:
    """Streamed request in a thread, with its outcome and its longest gap."""

    def __init__(self, cluster: Cluster, **fields: Any) -> None:
        self._url = f"http://127.0.0.1:{cluster.port}/v1/chat/completions"
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        self._body = {**CHAT, **options, **fields}
        # Without certificates, which take as long to load as many requests; the clock starts once the client is made.
        self._client = httpx.Client(timeout=DEADLINE_S, verify=False)
        self.begun_at = time.monotonic()
        self.received_at_s: list[float] = []
        self.status = 0
        self.text = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._client as client, client.stream("POST", self._url, json=self._body) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.received_at_s.append(time.monotonic())
                    self.text += piece
        except httpx.TransportError as error:  # Also when a failed test stops the frontend.
            self.text += f" {error!r}"

    @property
    def has_begun(self) -> bool:
        return bool(self.received_at_s)

    def wait(self) -> "RequestThread":
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the stream hangs"
        return self

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Return the failure of the request; empty when it completed with all its tokens."""
        tokens = f'"completion_tokens":{self._body["max_tokens"]}'
        if self.status == 200 and tokens in self.text and self.text.endswith("data: [DONE]\n\n"):
            return ""
        return f"{self.status} {self.text[-500:]}"

    @property
    def silence_s(self) -> float:
        """Return the longest wait for its next chunk."""
        times = [self.begun_at, *self.received_at_s]
        return max(after - before for before, after in pairwise(times))

    def silence_after_s(self, at: float) -> float:
        """Return the wait for the next chunk at a time, which a fault has."""
        return next((one for one in self.received_at_s if one > at), at) - at


class RunningStream:
    """Streamed requests one after the other, of which one is running whenever `begin` returns."""

    def __init__(self, cluster: Cluster, **fields: Any) -> None:
        self._cluster, self._fields = cluster, fields
        self.requested: list[RequestThread] = []
        self.begin()

    def begin(self) -> None:
        """Start another stream if the last one has ended, and wait for its first piece."""
        if not self.requested or self.requested[-1].is_over:
            self.requested.append(RequestThread(self._cluster, **self._fields))
        wait_until(lambda: self.requested[-1].has_begun, "the stream never began")

    @property
    def silence_s(self) -> float:
        """Return the longest wait for a chunk."""
        return max(one.silence_s for one in self.requested)


def failures(requested: Iterable[RequestThread]) -> list[str]:
    """Return the failures of requests, after all of them have ended."""
    return [one.failure for one in requested if one.wait().failure]
