"""Reservation of free TCP ports for processes started by tests and benchmarks.

Binding port 0 and closing the socket returns a port of the kernel's ephemeral range, which any outgoing connection or a
parallel test may take before the child process binds it. Ports are therefore taken from below that range, and each
process that uses this module holds a slice of them for itself by an advisory file lock until it ends.
"""

import fcntl
import os
import socket
import tempfile
from functools import cache

FIRST_PORT = 10_100
"""Above 10080, the last of the ports to which browsers and Node's `fetch` refuse to connect."""
SLICE_SIZE = 200
SLICES = 109
"""The last slice ends at 31,900, below Linux's default ephemeral range (32768-60999)."""


class NoFreePort(Exception):
    """Every slice is locked or every port of the slice is bound."""


class PortSlice:
    """Range of ports that no other process using this module returns."""

    def __init__(self) -> None:
        folder = os.path.join(tempfile.gettempdir(), f"dynamo-test-ports-{os.getuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for number in range(SLICES):
            lock = os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            self._first = FIRST_PORT + number * SLICE_SIZE
            self._next = os.getpid() % SLICE_SIZE
            return
        raise NoFreePort(f"all {SLICES} port slices are locked; see {folder}")

    def take(self) -> int:
        """Return the next port of the slice that can be bound on all IPv4 addresses."""
        for _ in range(SLICE_SIZE):
            port = self._first + self._next
            self._next = (self._next + 1) % SLICE_SIZE
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
            return port
        raise NoFreePort(f"no free port between {self._first} and {self._first + SLICE_SIZE - 1}")


@cache
def _slice(pid: int) -> PortSlice:
    """Return this process's slice; a forked child gets one of its own."""
    return PortSlice()


def free_port() -> int:
    """Return a TCP port that is free now and that no other test process will be given."""
    return _slice(os.getpid()).take()


def free_ports(count: int) -> list[int]:
    """Return `count` distinct free TCP ports."""
    return [free_port() for _ in range(count)]
