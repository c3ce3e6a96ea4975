"""Scripts: example programs as processes that talk to each other, under our Python or a released peer's."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 60.0  # For what takes a second on an idle machine.


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
        """A process that keeps running; returns when it reports that it serves."""
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

    def tell(self, process: "subprocess.Popen[str]") -> None:
        """Gives it an empty line, for which it waits."""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    def run(self, script: str, *arguments: str, python: str | None = None) -> list[str]:
        """What a process that ends by itself prints."""
        done = subprocess.run(
            [python or self.python, str(EXAMPLES / script), *arguments],
            stdout=subprocess.PIPE, text=True, env=self.variables, timeout=DEADLINE_S, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    def records(self) -> list[str]:
        """The keys of everything that is registered now."""
        return [re.sub("%[0-9A-F]{2}", "/", path.name) for path in (self.folder / "kv").rglob("*") if path.is_file()]

    def stop(self) -> list[int]:
        """Ends what goes on; returns the exit statuses."""
        for process in self.started:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
        statuses = []
        for process in self.started:
            try:
                statuses.append(process.wait(15))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses.append(process.wait())
            assert process.stdout is not None
            process.stdout.close()
        self.started = []
        return statuses


@contextmanager
def running(folder: Path, python: str = sys.executable) -> Iterator[Scripts]:
    """Scripts that are stopped at the end."""
    scripts = Scripts(folder, python)
    try:
        yield scripts
    finally:
        scripts.stop()
