"""Supervisor: the processes of a graph, started, watched and ended; the thin shell around `life`."""

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

FRONTEND_DRAIN_S = 7.0  # The frontend gives requests in flight 5 s of its own; the rest is its closing.
WORKER_DRAIN_S = 5.0  # No frontend is left by then, so nothing runs that anybody waits for.
KILL_S = 5.0  # A killed process is gone at once, unless the kernel holds it in a disk or driver call.
STOP_SIGNALS = tuple(
    number for number in signal.Signals if number.name in {"SIGINT", "SIGTERM", "SIGHUP"}
)  # Windows has no SIGHUP.
LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended; a negative status is the signal that killed it."""

    name: str
    status: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The user, or the system, asks the graph to end."""

    number: int


Event = Exited | Signalled


class Supervisor:
    """Owns processes: none outlives it, whichever way it ends.

    Each is in a process group of its own, so that Ctrl-C reaches only the supervisor, which ends them in order;
    should the supervisor be killed outright, each of them ends too (`core.parent`).
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
        """Takes the signals of this process; on the way out every child is gone and the signals are as before."""
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        before = {number: signal.signal(number, _heard) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
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
        """Runs a process; its output goes to its log, which a restart continues."""
        variables = {**self._inherited, **process.variables, parent.VARIABLE: str(os.getpid())}
        with open(self.log_path(process.name), "ab") as log:
            self._running[process.name] = subprocess.Popen(  # noqa: S603  A list of words, no shell.
                process.command,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=None if self._log_to_terminal else log,
                stderr=None if self._log_to_terminal else log,
                process_group=0,
            )

    def wait(self, timeout_s: float | None) -> list[Event]:
        """What happened, as soon as anything does; nothing when the time is over."""
        events: list[Event] = list(self._ended())
        if not events:
            self._selector.select(timeout_s)
            heard = b""
            with contextlib.suppress(BlockingIOError):
                heard = self._wake.recv(4096)
            events += [Signalled(number) for number in heard if number in STOP_SIGNALS]
            events += self._ended()
        return events

    def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Asks the named processes to end, kills what does not within the time, or at once when asked again."""
        for name in names:
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self._left(names) and (remaining := deadline - time.monotonic()) > 0:
            if any(isinstance(event, Signalled) for event in self.wait(remaining)):
                break
        self._kill(names)

    def log_path(self, name: str) -> Path:
        """Where a process writes."""
        return self._logs / f"{name}.log"

    def log_tail(self, name: str, lines: int) -> list[str]:
        """The last lines a process wrote; none if it wrote nothing."""
        with contextlib.suppress(OSError), open(self.log_path(name), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").rstrip().splitlines()[-lines:]
        return []

    def pid(self, name: str) -> int | None:
        """The process id of a running process."""
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


def _heard(number: int, frame: object) -> None:
    """The wake-up descriptor carries the news; the handler only has to exist."""
