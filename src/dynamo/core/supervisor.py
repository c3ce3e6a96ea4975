"""Supervisor: starts, watches, restarts and stops child processes.

Its caller decides what follows an exit: `dynamo serve` by `cli.life`, the HTTP workers of a frontend by `core.backoff`.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo.core import parent

KILL_S = 5.0  # A killed process ends at once, unless it is blocked in the kernel by a disk or driver call.
STOP_SIGNALS = tuple(
    number for number in signal.Signals if number.name in {"SIGINT", "SIGTERM", "SIGHUP"}
)  # Windows has no SIGHUP.
LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process: its name in messages, its command, and its environment variables."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set; None removes a variable that would be inherited."""
    pass_fds: tuple[int, ...] = ()
    """File descriptors that the process inherits."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The end of a process; a negative status is the signal that killed it."""

    name: str
    status: int
    ran_s: float


@dataclass(frozen=True, slots=True)
class Signalled:
    """A request of the user or the system to stop."""

    number: int


Event = Exited | Signalled


class Supervisor:
    """Owner of the processes: all of them end with it.

    Each process is in its own process group, so that Ctrl-C reaches only the supervisor, which stops them in order. When it
    ends, also when it was killed, the rest of its group is killed: an engine's own processes would keep its ports and devices.
    If the supervisor is killed, each of them ends too (`core.parent`).
    """

    def __init__(
        self,
        inherited: Mapping[str, str],
        logs: Path | None = None,
        *,
        stop_signals: Sequence[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        """`inherited` is the environment of all processes; without `logs` they write to this process's outputs."""
        self._inherited = inherited
        self._logs = logs
        self._stop_signals = stop_signals
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started_s: dict[str, float] = {}
        self._due: dict[str, tuple[float, Process]] = {}
        """Processes to restart, and when (monotonic seconds)."""
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle this process's signals; on exit, kill all children and restore the previous handlers."""
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        before = {number: signal.signal(number, _on_signal) for number in (*self._stop_signals, signal.SIGCHLD)}
        previous = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            self.kill(list(self._running))
            signal.set_wakeup_fd(previous)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self._wake.close()
            self._waker.close()

    def start(self, process: Process) -> None:
        """Start a process; its output is appended to its log, also after a restart."""
        variables = {**self._inherited, **process.variables, parent.VARIABLE: str(os.getpid())}
        log_path = self.log_path(process.name)
        with contextlib.nullcontext() if log_path is None else open(log_path, "ab") as log:
            self._running[process.name] = subprocess.Popen(  # noqa: S603  A list of arguments, no shell.
                process.command,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                pass_fds=process.pass_fds,
            )
        self._started_s[process.name] = time.monotonic()

    def restart(self, process: Process, delay_s: float) -> None:
        """Start a process again after `delay_s`, during `wait`."""
        self._due[process.name] = (time.monotonic() + delay_s, process)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return the next events; an empty list after `timeout_s` or a restart."""
        events: list[Event] = list(self._ended())
        if not events:
            self._selector.select(self._until_restart(timeout_s))
            received = b""
            with contextlib.suppress(BlockingIOError):
                received = self._wake.recv(4096)
            events += [Signalled(number) for number in received if number in self._stop_signals]
            events += self._ended()
        if not any(isinstance(event, Signalled) for event in events):
            self._start_due()
        return events

    def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Send SIGTERM to the processes; kill the rest after `timeout_s`, or at once on a further stop signal."""
        self.kill(self.terminate(names, timeout_s))

    def terminate(self, names: Sequence[str], timeout_s: float, *, until_signal: bool = True) -> list[str]:
        """Send SIGTERM to the processes and cancel all restarts; return the names of those that run after `timeout_s`.

        A further stop signal ends the wait, unless `until_signal` is false.
        """
        self._due.clear()
        for name in names:
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self._left(names) and (remaining := deadline - time.monotonic()) > 0:
            events = self.wait(remaining)
            if until_signal and any(isinstance(event, Signalled) for event in events):
                break
        return self._left(names)

    def request_stop(self, name: str) -> bool:
        """Send SIGTERM to a process, whose end is an event of `wait`; cancel its restart and return False if it has ended."""
        self._due.pop(name, None)
        self._signal(name, signal.SIGTERM)
        return name in self._running

    def kill(self, names: Sequence[str]) -> None:
        """Kill the processes and wait for their ends."""
        for name in names:
            self._signal(name, signal.SIGKILL)
        for name in names:
            running = self._running.pop(name, None)
            if running is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(KILL_S)

    def log_path(self, name: str) -> Path | None:
        """Return the path of a process's log; None without a directory of logs."""
        return None if self._logs is None else self._logs / f"{name}.log"

    def log_tail(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a process's log; none if it cannot be read."""
        path = self.log_path(name)
        if path is None:
            return []
        with contextlib.suppress(OSError), open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").rstrip().splitlines()[-lines:]
        return []

    def pid(self, name: str) -> int | None:
        """Return the process id of a running process."""
        running = self._running.get(name)
        return None if running is None else running.pid

    def _until_restart(self, timeout_s: float | None) -> float | None:
        """Return the seconds until the next restart, `timeout_s` at most; None to wait for an event only."""
        ends_s = [max(0.0, due_s - time.monotonic()) for due_s, _ in self._due.values()]
        return min([*ends_s, *([] if timeout_s is None else [timeout_s])], default=None)

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for due_s, process in [*self._due.values()]:
            if due_s <= now_s:
                del self._due[process.name]
                self.start(process)

    def _ended(self) -> list[Exited]:
        now_s = time.monotonic()
        ended = [
            Exited(name, popen.returncode, now_s - self._started_s[name])
            for name, popen in self._running.items()
            if _has_ended(popen)
        ]
        for event in ended:
            del self._running[event.name]
        return ended

    def _left(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._running]

    def _signal(self, name: str, number: int) -> None:
        running = self._running.get(name)
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, number)


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a process has ended; kill what it left of its group before its id can be that of another group."""
    if hasattr(os, "waitid"):  # Python 3.11 and 3.12 lack it on macOS.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
    elif process.poll() is None:
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies.
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() is not None


def _on_signal(number: int, frame: object) -> None:
    """Do nothing: the wake-up descriptor carries the signal, but a handler must be installed."""
