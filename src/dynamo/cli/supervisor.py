"""Supervisor: starts, watches and stops the processes of a graph; executes the decisions of `life`."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.cli.graph import Process
from dynamo.core import parent

FRONTEND_DRAIN_S = 7.0  # The frontend's own drain timeout for active requests is 5 s; the rest is for closing.
WORKER_DRAIN_S = 5.0  # The frontend has ended by then, so no request needs to be completed.
KILL_S = 5.0  # A killed process ends at once, unless it is blocked in the kernel by a disk or driver call.
STOP_SIGNALS = tuple(
    number for number in signal.Signals if number.name in {"SIGINT", "SIGTERM", "SIGHUP"}
)  # Windows has no SIGHUP.
LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Exited:
    """The end of a process; a negative status is the signal that killed it."""

    name: str
    status: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """A request of the user or the system to stop the graph."""

    number: int


Event = Exited | Signalled


class Supervisor:
    """Owner of the processes: all of them end with it.

    Each process is in its own process group, so that Ctrl-C reaches only the supervisor, which stops them in order.
    If the supervisor is killed, each of them ends too (`core.parent`).
    """

    def __init__(self, logs: Path, inherited: Mapping[str, str], *, log_to_terminal: bool = False) -> None:
        self._logs = logs
        self._inherited = inherited
        self._log_to_terminal = log_to_terminal
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle this process's signals; on exit, kill all children and restore the previous handlers."""
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        before = {number: signal.signal(number, _on_signal) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        previous = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._kill(list(self._running))
            signal.set_wakeup_fd(previous)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self._wake.close()
            self._waker.close()

    def start(self, process: Process) -> None:
        """Start a process; its output is appended to its log, also after a restart."""
        variables = {**self._inherited, **process.variables, parent.VARIABLE: str(os.getpid())}
        with open(self.log_path(process.name), "ab") as log:
            self._running[process.name] = subprocess.Popen(  # noqa: S603  A list of arguments, no shell.
                process.command,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=None if self._log_to_terminal else log,
                stderr=None if self._log_to_terminal else log,
                process_group=0,
            )

    def wait(self, timeout_s: float | None) -> list[Event]:
        """Return the next events; an empty list after `timeout_s`."""
        events: list[Event] = list(self._ended())
        if not events:
            self._selector.select(timeout_s)
            received = b""
            with contextlib.suppress(BlockingIOError):
                received = self._wake.recv(4096)
            events += [Signalled(number) for number in received if number in STOP_SIGNALS]
            events += self._ended()
        return events

    def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Send SIGTERM to the processes; kill the rest after `timeout_s`, or at once on a further stop signal."""
        for name in names:
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self._left(names) and (remaining := deadline - time.monotonic()) > 0:
            if any(isinstance(event, Signalled) for event in self.wait(remaining)):
                break
        self._kill(names)

    def log_path(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self._logs / f"{name}.log"

    def log_tail(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a process's log."""
        with contextlib.suppress(OSError), open(self.log_path(name), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").rstrip().splitlines()[-lines:]
        return []

    def pid(self, name: str) -> int | None:
        """Return the process id of a running process."""
        running = self._running.get(name)
        return None if running is None else running.pid

    def _ended(self) -> list[Exited]:
        ended = [Exited(name, popen.returncode) for name, popen in self._running.items() if popen.poll() is not None]
        for event in ended:
            del self._running[event.name]
        return ended

    def _left(self, names: Sequence[str]) -> bool:
        return any(name in self._running for name in names)

    def _signal(self, name: str, number: int) -> None:
        running = self._running.get(name)
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, number)

    def _kill(self, names: Sequence[str]) -> None:
        for name in names:
            self._signal(name, signal.SIGKILL)
        for name in names:
            running = self._running.pop(name, None)
            if running is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(KILL_S)


def _on_signal(number: int, frame: object) -> None:
    """Do nothing: the wake-up descriptor carries the signal, but a handler must be installed."""
