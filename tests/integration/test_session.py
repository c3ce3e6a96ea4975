"""A session of real placeholder processes for a frontend and workers: start, failure and end of a graph."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port

from dynamo.cli.life import RESTARTS_MAX
from dynamo.cli.machine import cores, reserve_port
from dynamo.cli.session import WORKER_DRAIN_S
from dynamo.core.errors import ConfigError
from dynamo.core.listening import bind

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0  # For operations that take a second on an idle machine.

RUN = """
import json, os, sys
from pathlib import Path
from dynamo.cli.announcement import Announcement
from dynamo.cli.graph import Graph
from dynamo.core.progress import ProgressLine

from dynamo.cli import session
from dynamo.cli.session import LOGS_KEPT, PREFIX, ServeSession
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.supervisor import Process

spec = json.loads(sys.argv[1])
session.WORKER_DRAIN_S = spec["drain_s"]
home = LockedDirectory(PREFIX, spec["folder"], logs_kept=LOGS_KEPT)
(home.path / "discovery").mkdir()
process = lambda name, code: Process(name=name, command=(sys.executable, "-c", code, name, str(home.path)))

class Programs:  # A template of workers that each run a program of their own.
    def worker(self, role, number, devices=()):
        return process(f"worker-{number}", spec["workers"][number - 1])

graph = Graph(
    frontend=process("frontend", spec["frontend"]), roles={"worker": len(spec["workers"])}, template=Programs()
)
announcement = Announcement(
    engine="cpu", workers=len(graph.workers), is_demo=True, host="127.0.0.1", port=spec["port"], command="dynamo"
)
sys.exit(ServeSession(graph, announcement, home, os.environ, ProgressLine()).run())
"""

# Answers /health with as many instances as workers have left a file, and notes its pid.
FRONTEND = """
import http.server, json, os, pathlib, sys, signal
from dynamo.core.parent import die_with_parent
home = pathlib.Path(sys.argv[2])
(home.parent / "frontend.new").write_text(str(os.getpid()))
(home.parent / "frontend.new").rename(home.parent / "frontend.pid")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        names = [path.name for path in (home / "discovery").iterdir()]
        health = {"instances": [{"endpoint": "generate"} for _ in names]}
        body = json.dumps(health if self.path == "/health" else {"data": [{"id": "demo"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
die_with_parent()
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""

WORKER = """
import os, pathlib, sys, time
from dynamo.core.parent import die_with_parent
die_with_parent()
home = pathlib.Path(sys.argv[2])
(home.parent / f"{sys.argv[1]}.new").write_text(str(os.getpid()))
(home.parent / f"{sys.argv[1]}.new").rename(home.parent / f"{sys.argv[1]}.pid")
(home / "discovery" / sys.argv[1]).touch()
time.sleep(60)
"""

# Starts a process that keeps a port, as engines do; it ends with an error if the port is in use.
ENGINE = """
import pathlib, socket, subprocess, sys, time
if sys.argv[-1] == "engine":
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(sys.argv[1])))
        server.listen()
        print("bound", flush=True)
        time.sleep(60)
    sys.exit()
code = pathlib.Path("/proc/self/cmdline").read_text().split(chr(0))[2]
child = subprocess.Popen([sys.executable, "-c", code, "PORT", "engine"], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"bound\\n", "the port is in use"
(pathlib.Path(sys.argv[2]).parent / "engine.pid").write_text(str(child.pid))
"""

# Records that it is terminated, and does not end.
STUBBORN = (
    """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[2]).parent / "terminated").touch())
"""
    + WORKER
)


class Run:
    """Session in a process of its own."""

    def __init__(
        self, tmp_path: Path, workers: list[str], frontend: str = FRONTEND, drain_s: float = WORKER_DRAIN_S
    ) -> None:
        self.tmp_path = tmp_path
        self.folder = tmp_path
        self.reserved = reserve_port("127.0.0.1", 0)
        self.port = self.reserved.getsockname()[1]
        spec = {
            "folder": str(self.folder),
            "frontend": frontend.replace("PORT", str(self.port)),
            "workers": workers,
            "port": self.port,
            "drain_s": drain_s,
        }
        self.output = tmp_path / "output"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, json.dumps(spec)], stdout=output, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        return self.output.read_text()

    def until(self, words: str) -> None:
        wait_for(lambda: words in self.text(), lambda: f"{words!r} never appeared in:\n{self.text()}")

    @property
    def home(self) -> Path:
        """Return the run's directory, or a path that does not exist once it is removed."""
        return next(self.folder.glob("dynamo-serve-*"), self.folder / "removed")

    def pid(self, name: str) -> int:
        path = self.tmp_path / f"{name}.pid"
        wait_for(path.exists, lambda: f"{name} never started:\n{self.text()}")
        return int(path.read_text())

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)


def wait_for(is_so: Any, complaint: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        with contextlib.suppress(ProcessLookupError):
            run.process.kill()
        run.process.wait()
        run.reserved.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_every_process_and_removes_its_files(tmp_path: Path, runs: list[Run], number: int) -> None:
    run = Run(tmp_path, [WORKER, WORKER])
    runs.append(run)
    run.until("Ready in")
    pids = [run.pid(name) for name in ("frontend", "worker-1", "worker-2")]
    assert all(map(is_alive, pids))
    run.process.send_signal(number)
    assert run.ends() == 0
    assert not any(map(is_alive, pids))
    assert not run.home.exists()
    assert run.text().rstrip().endswith("stopping")


def test_signal_during_loading_ends_every_process(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, ["import time; time.sleep(60)"])
    runs.append(run)
    run.pid("frontend")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 0
    assert "Ready" not in run.text()


def test_a_worker_that_fails_to_start_ends_the_graph_with_its_log(tmp_path: Path, runs: list[Run]) -> None:
    failing = (
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'worker-1.pid')!r}).exists(): time.sleep(0.02)\n"
    )
    run = Run(tmp_path, [WORKER, failing + "raise SystemError('no memory for this')"])
    runs.append(run)
    assert run.ends() == 1
    text = run.text()
    assert "error: worker-2 ended with status 1 before it was ready" in text
    assert "no memory for this" in text
    log = Path(text.split("Complete log: ")[1].strip())
    assert "no memory for this" in log.read_text()
    assert not (run.home / "discovery").exists()
    assert not is_alive(run.pid("worker-1"))


def test_invalid_option_of_a_worker_is_one_line(tmp_path: Path, runs: list[Run]) -> None:
    complaint = "error: --model-path x: no such directory"
    run = Run(tmp_path, [f"import sys; sys.stderr.write({complaint!r} + chr(10)); sys.exit(2)"])
    runs.append(run)
    assert run.ends() == 2
    assert run.text().splitlines()[-1] == "error: worker-1: --model-path x: no such directory"
    assert not (run.home / "discovery").exists()  # Logs are kept for `dynamo troubleshoot`.


def test_a_worker_killed_while_serving_is_started_again(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, [WORKER, WORKER])
    runs.append(run)
    run.until("Ready in")
    victim = run.pid("worker-1")
    os.kill(victim, signal.SIGKILL)
    run.until("worker-1 was killed by SIGKILL; restarting it")
    assert "worker-1 was killed by SIGKILL; restarting it" in (run.home / "logs" / "serve.log").read_text()
    wait_for(lambda: run.pid("worker-1") != victim, lambda: "worker-1 was never started again")
    assert is_alive(run.pid("worker-2"))
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 0
    assert not is_alive(run.pid("worker-1"))


def test_worker_that_was_killed_leaves_no_process_of_its_engine(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, [ENGINE.replace("PORT", str(free_port())) + WORKER])
    runs.append(run)
    run.until("Ready in")
    victim, engine = run.pid("worker-1"), run.pid("engine")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: run.pid("worker-1") != victim, lambda: f"worker-1 was never started again:\n{run.text()}")
    assert run.text().count("restarting it") == 1, "the new engine found its port free"
    assert not is_alive(engine)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 0
    assert not is_alive(run.pid("engine"))


def test_worker_that_fails_repeatedly_ends_the_graph(tmp_path: Path, runs: list[Run]) -> None:
    until_ready = "while 'Ready in' not in (home.parent / 'output').read_text(): time.sleep(0.02)"
    run = Run(tmp_path, [WORKER.replace("time.sleep(60)", f"{until_ready}\nsys.exit('out of luck')")])
    runs.append(run)
    assert run.ends() == 1
    assert run.text().count("worker-1 ended with status 1; restarting it") == RESTARTS_MAX
    assert "error: worker-1 ended with status 1, the 4th time within 60 s\n  out of luck" in run.text()
    assert not is_alive(run.pid("frontend"))


def test_a_frontend_killed_while_serving_is_started_again(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, [WORKER])
    runs.append(run)
    run.until("Ready in")
    victim = run.pid("frontend")
    os.kill(victim, signal.SIGKILL)
    run.until("frontend was killed by SIGKILL; restarting it")
    wait_for(
        lambda: (tmp_path / "frontend.pid").read_text() not in ("", str(victim)),
        lambda: "the frontend was never started again",
    )
    assert is_alive(run.pid("worker-1"))
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 0
    assert not is_alive(run.pid("worker-1"))
    assert not (run.home / "discovery").exists()


def test_second_signal_kills_unresponsive_processes(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, [STUBBORN], drain_s=10 * DEADLINE_S)
    runs.append(run)
    run.until("Ready in")
    run.process.send_signal(signal.SIGINT)
    wait_for((tmp_path / "terminated").exists, lambda: "the worker is not terminated")
    assert not is_alive(run.pid("frontend"))
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 0, "the worker is not killed before its drain timeout"
    assert not is_alive(run.pid("worker-1"))


def test_no_process_survives_a_killed_session(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, [WORKER])
    runs.append(run)
    run.until("Ready in")
    pids = [run.pid("frontend"), run.pid("worker-1")]
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not any(map(is_alive, pids)), lambda: f"still alive: {[pid for pid in pids if is_alive(pid)]}")


def test_serve_reserves_only_a_free_port() -> None:
    with socket.socket() as taken:
        port = free_port()  # No other process of the tests takes it between the two parts.
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"--http-port {port} is in use"):
            reserve_port("127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"--http-port {port} is in use"):
            reserve_port("0.0.0.0", port)
    with reserve_port("127.0.0.1", port) as reserved, bind("127.0.0.1", port, "--http-port") as frontend:
        assert reserved.getsockname()[1] == port
        frontend.listen()
    with reserve_port("0.0.0.0", 0) as reserved:
        assert reserved.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 65536, "must be from 0 to 65535"),
        ("127.0.0.1", -1, "must be from 0 to 65535"),
        ("no such host", 0, "--http-host 'no such host'"),
        ("203.0.113.1", 0, "cannot listen on 203.0.113.1:0"),
    ],
)
def test_address_that_cannot_be_bound_is_named(host: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reserve_port(host, port)


def test_process_affinity_has_at_least_one_core() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
