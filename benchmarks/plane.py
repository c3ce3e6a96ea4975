"""Request plane processes: a caller and a worker of one package or of both, controlled by commands."""

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peer import PeerMissing, ensure_peer
from dynamo.core.config import environ

PROGRAM = str(Path(__file__).parent / "plane_program.py")
TIMEOUT_S = 180.0


class Party:
    """One of the two processes."""

    def __init__(self, python: str, role: str, variables: dict[str, str]) -> None:
        """Start the process with a log file in its home: the released caller writes a line per call for any `DYN_LOG`."""
        self._log = Path(variables["HOME"]) / f"{role}.log"
        with self._log.open("wb") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                [python, PROGRAM, role], stdin=pipe, stdout=pipe, stderr=log, env=variables, text=True
            )
        self._line("ready")

    def do(self, order: str, **details: Any) -> dict[str, Any]:
        """Execute a command and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": order, **details}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line("answer "))
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._process.stdout], [], [], left)[0]:
                break
            line = self._process.stdout.readline()
            if not line:
                outputs = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SystemExit(f"a process of the benchmark ended with {self._process.wait()}: {outputs}")
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise SystemExit(f"a process of the benchmark did not say {start!r} within {TIMEOUT_S:g} s")


@contextlib.contextmanager
def pair(caller_python: str, worker_python: str) -> Iterator[tuple[Party, Party]]:
    """Start a caller and a worker that have discovered each other over a directory of their own."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            **{name: value for name, value in environ().items() if name not in {"PYTHONPATH", "PYTHONHOME"}},
            "DYN_FILE_KV": os.path.join(folder, "kv"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_LOG": "error",
            "HOME": folder,
        }
        with Party(worker_python, "worker", variables) as worker, Party(caller_python, "caller", variables) as caller:
            yield caller, worker


def pythons() -> dict[str, str]:
    """Return the interpreters of our package and, if installed, of the released one."""
    found = {"ours": sys.executable}
    try:
        found["theirs"] = ensure_peer()
    except PeerMissing as error:
        print(f"ours alone: {error}", file=sys.stderr)
    return found


def allow_many_files(count: int) -> None:
    """Raise the limit of open files of this process and its children as far as the machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count)), hard))
