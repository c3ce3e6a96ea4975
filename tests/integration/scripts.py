"""Example programs as processes of one deployment, under our Python or a released peer's."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 60.0  # For operations that take a second on an idle machine.


class Scripts:
    """Processes over one discovery directory."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.started: list[subprocess.Popen[str]] = []
        self.variables = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "kv"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_LOG": "error",
            "HOME": str(folder),
        }

    def start(self, script: str, *arguments: str, python: str | None = None) -> "subprocess.Popen[str]":
        """Start a process that keeps running; return when it reports that it serves."""
        process = subprocess.Popen(
            [python or self.python, str(EXAMPLES / script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.variables,
        )  # fmt: skip
        self.started.append(process)
        assert self.line(process).startswith("serving")
        return process

    def line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{process.args} ended with status {process.wait(DEADLINE_S)}"
        return line.rstrip("\n")

    def send_line(self, process: "subprocess.Popen[str]") -> None:
        """Send an empty line to its standard input."""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    def run(self, script: str, *arguments: str, python: str | None = None) -> list[str]:
        """Return the output of a process that ends by itself."""
        done = subprocess.run(
            [python or self.python, str(EXAMPLES / script), *arguments],
            stdout=subprocess.PIPE, text=True, env=self.variables, timeout=DEADLINE_S, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    def records(self) -> list[str]:
        """Return the keys of all current registrations."""
        return [re.sub("%[0-9A-F]{2}", "/", path.name) for path in (self.folder / "kv").rglob("*") if path.is_file()]

    def stop(self) -> list[int]:
        """Stop the running processes; return their exit statuses."""
        for process in self.started:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
        statuses = []
        for process in self.started:
            try:
                statuses.append(process.wait(DEADLINE_S))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses.append(process.wait())
            assert process.stdout is not None
            process.stdout.close()
        self.started = []
        return statuses


@contextmanager
def running(folder: Path, python: str = sys.executable) -> Iterator[Scripts]:
    """Run scripts, which stop with the block."""
    scripts = Scripts(folder, python)
    try:
        yield scripts
    finally:
        scripts.stop()
