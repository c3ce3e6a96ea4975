"""Child processes of a test: each writes to a log file of its own and is terminated by pid when the group is closed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DEADLINE_S = 60.0  # For operations that take a second on an idle machine.
POLL_S = 0.05
STOP_TIMEOUT_S = 15.0
LOG_TAIL_BYTES = 2000
LOOPBACK = {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"}
"""Environment that makes the request plane and the event plane listen on loopback only."""


def wait_until(condition: Callable[[], object], message: str, timeout_s: float = DEADLINE_S) -> None:
    """Poll until the condition is true. Raises AssertionError with the message after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(POLL_S)


def stop_process(process: "subprocess.Popen[bytes]", timeout_s: float = STOP_TIMEOUT_S) -> int:
    """Wait for a terminated process, kill it after `timeout_s`, and return its exit status."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class ProcessGroup:
    """Processes that share a folder: logs, and the file-based discovery in its `kv` directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        """Return the environment variables of every process of the group."""
        return {**os.environ, **LOOPBACK, "DYN_FILE_KV": str(self.folder / "kv")}

    def start(
        self, name: str, command: list[str], variables: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command whose output is appended to `NAME.log`."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd,
                env={**self.environment(), **(variables or {})},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def wait_until(self, condition: Callable[[], object], message: str, timeout_s: float = DEADLINE_S) -> None:
        """Poll until the condition is true. Raises AssertionError with the message and the ends of all logs."""
        try:
            wait_until(condition, message, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{message}\n{self.logs()}") from error

    def logs(self) -> str:
        """Return the end of each log."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-LOG_TAIL_BYTES:]}" for path in paths)

    def stop(self) -> None:
        """Terminate every process, kill those that do not end in time; paused ones are continued first."""
        for process in self.processes:
            process.terminate()
            process.send_signal(signal.SIGCONT)
        for process in self.processes:
            stop_process(process)
