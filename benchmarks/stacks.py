"""Stacks: a frontend and a mocker of either implementation as child processes, with file discovery, on loopback only.

    with Stack(Recipe(name="ours", frontend=OURS, engine=OURS), model) as stack:
        ... stack.port, stack.pids ...

Leaving the block ends every process that the stack started, also after an error.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from benchmarks.ports import free_port
from dynamo.core.config import environ

MODEL_NAME = "bench"
HOST = "127.0.0.1"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05
LOG_LINES_SHOWN = 12

FRONTEND, ENGINE = "frontend", "engine"


class StackFailed(Exception):
    """A process of a stack failed to start; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """Implementation of a process: an interpreter, and its mocker's value for an infinite speed."""

    name: str
    python: str
    speedup_infinite: str


def ours() -> Implementation:
    """Return this working tree, in the environment that runs this program."""
    return Implementation("ours", sys.executable, "0")


def theirs(python: str) -> Implementation:
    """Return the released system. Its help calls 0 infinite, but 0 behaves as 1."""
    return Implementation("theirs", python, "1000000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Frontend and mocker of a stack, and the mocker's simulated speed."""

    name: str
    frontend: Implementation
    engine: Implementation
    speedup: float | None = None
    """1 is the speed of a real engine; None is without delay."""
    workers: int = 1
    frontend_flags: Sequence[str] = ()
    engine_flags: Sequence[str] = ()
    router_mode: str = "round-robin"
    program: str = ""
    """File to run as engine in place of the mocker; it takes the mocker's `--model-path` and `--model-name`."""
    frontend_program: str = ""
    """File to run as frontend in place of the module; it takes the module's flags."""
    cores: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Cores of the processes of a role; unlisted roles may use all."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of its processes."""

    def commands(self, port: int, model: str) -> Iterator[tuple[str, list[str]]]:
        """Return the role and the command line of each process."""
        listen = ["--http-host", HOST, "--http-port", str(port), "--router-mode", self.router_mode]
        frontend = [self.frontend_program] if self.frontend_program else ["-m", "dynamo.frontend"]
        yield FRONTEND, [self.frontend.python, *frontend, *listen, *self.frontend_flags]
        speedup = self.engine.speedup_infinite if self.speedup is None else f"{self.speedup:g}"
        what = ["--model-path", model, "--model-name", MODEL_NAME]
        engine = [self.program, *what] if self.program else ["-m", "dynamo.mocker", *what, "--speedup-ratio", speedup]
        for _ in range(self.workers):
            yield ENGINE, [self.engine.python, *engine, *self.engine_flags]


def stack_environment(home: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment without variables that refer to other stacks."""
    kept = {
        name: value
        for name, value in variables.items()
        if not name.startswith(("DYN_", "PYTHON", "ETCD_", "NATS_", "OTEL_")) and name != "VIRTUAL_ENV"
    }
    return kept | {
        "HOME": home,
        "HF_HUB_OFFLINE": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": os.path.join(home, "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_EVENT_PLANE_HOST": HOST,
    }


@dataclass(slots=True)
class Stack:
    """Running processes of one recipe."""

    recipe: Recipe
    model: str
    port: int = field(default_factory=free_port)
    ready_s: float = 0.0
    _home: str = ""
    _processes: list[tuple[str, "subprocess.Popen[bytes]"]] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def home(self) -> str:
        """Return the directory of this stack; `discovery` in it holds the records of its processes."""
        return self._home

    @property
    def pids(self) -> dict[str, list[int]]:
        """Return the process ids of each role."""
        roles: dict[str, list[int]] = {}
        for role, process in self._processes:
            roles.setdefault(role, []).append(process.pid)
        return roles

    def _start(self) -> None:
        self._home = tempfile.mkdtemp(prefix=f"dynamo-bench-{self.recipe.name}-")
        os.mkdir(os.path.join(self._home, "discovery"))
        env = {**stack_environment(self._home, environ()), **self.recipe.variables}
        began = time.monotonic()
        for role, command in self.recipe.commands(self.port, self.model):
            path = self._log_path(len(self._processes))
            with open(path, "wb") as log:
                # A session of its own: Ctrl-C reaches this program alone, which then ends them in order.
                process = subprocess.Popen(
                    command, env=env, cwd=self._home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            self._processes.append((role, process))
            if role in self.recipe.cores:
                os.sched_setaffinity(process.pid, set(self.recipe.cores[role]))  # Its threads do not exist yet.
        self._wait_until_ready(began + READY_TIMEOUT_S)
        self.ready_s = time.monotonic() - began

    def _wait_until_ready(self, deadline: float) -> None:
        """Wait until the model is listed and a first chat is answered, which may load more files."""
        chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        output = "nothing yet"
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                status, listed = self.send_request("GET", "/v1/models")
                output = f"GET /v1/models: {status} {listed!r}"
                if status == 200 and any(model["id"] == MODEL_NAME for model in listed["data"]):
                    status, answer = self.send_request("POST", "/v1/chat/completions", chat)
                    output = f"POST /v1/chat/completions: {status} {answer!r}"
                    if status == 200:
                        return
            except (OSError, http.client.HTTPException, ValueError) as error:
                output = f"{type(error).__name__}: {error}"
            time.sleep(POLL_S)
        raise StackFailed(f"{self.recipe.name} was not ready in {READY_TIMEOUT_S:.0f} s; {output}\n{self.logs()}")

    def send_request(self, method: str, path: str, body: Any = None, *, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Send one request and return its status and JSON response."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def scrape(self) -> dict[str, float]:
        """Return the frontend's metrics: each series and its value."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10.0)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return read_series(connection.getresponse().read().decode())

    def _check_alive(self) -> None:
        for role, process in self._processes:
            if process.poll() is not None:
                raise StackFailed(f"{self.recipe.name}: the {role} ended with {process.returncode}\n{self.logs()}")

    def _log_path(self, index: int) -> str:
        return os.path.join(self._home, f"process-{index}.log")

    def logs(self) -> str:
        """Return the last lines of each process's log."""
        parts = []
        for index, (role, _) in enumerate(self._processes):
            with open(self._log_path(index), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()[-LOG_LINES_SHOWN:]
            parts.append("\n".join([f"--- {role}", *lines]))
        return "\n".join(parts)

    def end_engines(self) -> None:
        """Stop the engines with SIGTERM and keep the frontend."""
        engines = [process for role, process in self._processes if role == ENGINE]
        for process in engines:
            _signal(process, signal.SIGTERM)
        for process in engines:
            process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Stop the processes, engines before the frontend, and remove their files."""
        for _, process in reversed(self._processes):
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for _, process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait(KILL_TIMEOUT_S)
            _signal_group(process.pid, signal.SIGKILL)  # Remaining child processes.
        self._processes.clear()
        if self._home:
            shutil.rmtree(self._home, ignore_errors=True)


def read_series(text: str) -> dict[str, float]:
    """Return the series of a metrics page, labels included, and their values."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
