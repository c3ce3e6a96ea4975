"""The launch scripts of the embedded engine start their processes, forward unknown arguments, and leave no process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import DEADLINE_S, wait_until

pytestmark = pytest.mark.integration

SCRIPTS = Path(__file__).parents[2] / "examples" / "backends" / "cpu" / "launch"
COMPONENTS = {
    "agg.sh": ["backend"],
    "agg_router.sh": ["backend", "backend"],
    "disagg.sh": ["backend", "prefill"],
    "disagg_router.sh": ["backend", "backend", "prefill", "prefill"],
}


class Launched:
    """Running launch script."""

    def __init__(self, name: str, folder: Path, *flags: str, scripts: Path = SCRIPTS, **more: str) -> None:
        self.port = free_port()
        self.metrics = [free_port() for _ in COMPONENTS[name]]
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        variables = {
            **os.environ,
            "PYTHON": sys.executable,
            "TMPDIR": str(self.temporary),
            "DYN_HTTP_PORT": str(self.port),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            **{f"DYN_SYSTEM_PORT{number}": str(port) for number, port in enumerate(self.metrics, start=1)},
        }
        variables.pop("DYN_FILE_KV", None)
        variables |= more
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(scripts / name), *flags], env=variables, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip

    def get(self, url: str) -> Any:
        try:
            return httpx.get(url, timeout=DEADLINE_S)
        except httpx.TransportError:
            return httpx.Response(0)

    @property
    def instances(self) -> list[str]:
        answer = self.get(f"http://127.0.0.1:{self.port}/health")
        return sorted(one["component"] for one in answer.json()["instances"]) if answer.status_code == 200 else []

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    @property
    def left(self) -> list[str]:
        """Return the processes of its session."""
        command = ["ps", "-s", str(self.process.pid), "-o", "pid="]
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        return found.stdout.split()


@pytest.fixture(params=COMPONENTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def launched(name: str, tmp_path: Path) -> Iterator[Launched]:
    started = Launched(name, tmp_path, "--model-name", "m", "--max-model-len", "256")
    yield started
    if started.process.poll() is None:
        started.end()


def test_script_starts_its_graph_and_ends_all_processes(launched: Launched, name: str) -> None:
    wait_until(lambda: launched.instances == COMPONENTS[name], f"its workers never came: {launched.log.read_text()}")
    body = {"model": "m", "messages": [{"role": "user", "content": "What is Dynamo?"}], "max_tokens": 8}
    url = f"http://127.0.0.1:{launched.port}/v1/chat/completions"

    def is_answered() -> bool:
        return httpx.post(url, json=body, timeout=DEADLINE_S).status_code == 200

    wait_until(is_answered, "the model was never served")
    for port in launched.metrics:
        wait_until(lambda port=port: launched.get(f"http://127.0.0.1:{port}/metrics").status_code == 200, "no metrics")  # type: ignore[misc]
    (model,) = httpx.get(f"http://127.0.0.1:{launched.port}/v1/models", timeout=DEADLINE_S).json()["data"]
    assert model["id"] == "m"
    assert model.get("context_window", 256) == 256
    assert launched.end() == 143
    wait_until(lambda: not launched.left, "processes are left")
    assert list(launched.temporary.iterdir()) == []


def test_unknown_flag_ends_the_graph(tmp_path: Path) -> None:
    launched = Launched("agg.sh", tmp_path, "--no-such-flag")
    assert launched.process.wait(DEADLINE_S) == 2
    wait_until(lambda: not launched.left, "processes are left")
    assert "--no-such-flag" in launched.log.read_text()
