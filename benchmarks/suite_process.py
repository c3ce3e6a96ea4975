"""Processes of the suite: run one program, and end and count what it leaves behind.

The suite is the subreaper of its descendants (`prctl`, Linux): a process whose parents have ended becomes its child, so that none
is lost, whatever session it began. Files of a program are in a directory of its own, which is removed.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.corpus import ROOT
from benchmarks.loadgen import read_parents
from dynamo.core.config import environ

PR_SET_CHILD_SUBREAPER = 36
STOP_S = 30.0
"""Time in which a stopped program closes what it has started."""
GRACE_S = 3.0
"""Time in which processes end by themselves after their program."""
POLL_S = 0.05
ALIVE_S = 30.0
"""Time between two signs of life of a program that prints nothing itself."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program."""

    reason: str
    """Why it failed; empty if it did not."""
    seconds: float
    left: int
    """Processes that it left, which were ended."""


def adopt_descendants() -> None:
    """Become the parent of descendants whose parents end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(command: Sequence[str], limit_s: float, alive: Callable[[float], None]) -> Ended:
    """Run a program. `alive` is called every half minute with its seconds so far."""
    folder = tempfile.mkdtemp(prefix="dynb-")  # Short: paths of Unix sockets have at most 107 bytes.
    began, earlier = time.monotonic(), frozenset(_children())
    try:
        process = subprocess.Popen(command, cwd=ROOT, env={**environ(), "TMPDIR": folder})
        try:
            reason = _wait(process, began, limit_s, alive)
        except KeyboardInterrupt:
            _wait_for_end(process)  # The terminal has interrupted it as well.
            raise
        except SystemExit:
            process.terminate()
            _wait_for_end(process)
            raise
        finally:
            left = _end_left(process, earlier)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Ended(reason, time.monotonic() - began, left)


def _wait(process: "subprocess.Popen[bytes]", began: float, limit_s: float, alive: Callable[[float], None]) -> str:
    """Wait for the end, and stop the program at its limit; return why it failed."""
    while (left_s := began + limit_s - time.monotonic()) > 0:
        try:
            status = process.wait(min(left_s, ALIVE_S))
        except subprocess.TimeoutExpired:
            alive(time.monotonic() - began)
            continue
        return f"exit status {status}" if status else ""
    process.terminate()
    _wait_for_end(process)
    return f"not done after {limit_s:.0f} s"


def _wait_for_end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a stopped program, which closes what it has started, and kill it if it takes too long."""
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_left(process: "subprocess.Popen[bytes]", earlier: frozenset[int]) -> int:
    """End the program and what it left, but no child of this process from before; return the number of processes left."""
    if process.poll() is None:
        process.kill()
        process.wait()
    deadline, found = time.monotonic() + GRACE_S, set[int]()
    while (children := _reaped(earlier)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    while children:
        found |= set(children)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        children = _reaped(earlier)  # Their children are ours now.
    return len(found)


def _children() -> list[int]:
    """Return the children of this process, also those that have ended and were not waited for."""
    return [pid for pid, parent in read_parents().items() if parent == os.getpid()]


def _reaped(earlier: frozenset[int]) -> list[int]:
    """Return the children that began later and have not ended; those that have are waited for."""
    found = []
    for pid in _children():
        with contextlib.suppress(ChildProcessError):
            if pid not in earlier and os.waitpid(pid, os.WNOHANG) == (0, 0):
                found.append(pid)
    return found
