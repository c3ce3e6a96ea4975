"""The launch script of one worker: it starts its processes, forwards unknown arguments, and leaves no process."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import wait_until
from tests.engines.conftest import PLAIN, START_S, EngineCluster
from tests.engines.tiny_model import ROOT

pytestmark = pytest.mark.engines


def test_script_starts_one_worker_and_a_frontend(serve: Callable[[str], EngineCluster], engines_python: str) -> None:
    servers = serve("launch")
    servers.port, metrics = free_port(), free_port()
    servers.system.append(metrics)
    script = str(Path(ROOT) / "examples" / "backends" / "vllm" / "launch" / "agg.sh")
    process = servers.run(
        "agg", [script, "--model", servers.model, "--served-model-name", "tiny", *PLAIN],
        PYTHON=engines_python, DYN_HTTP_PORT=str(servers.port), DYN_SYSTEM_PORT1=str(metrics),
    )  # fmt: skip
    servers.until_ready()
    assert servers.complete("a page", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert servers.metric("vllm:generation_tokens_total") == 4
    process.terminate()
    assert process.wait(120) == 143
    servers.processes.remove(process)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"--http-port {servers.port}" not in listed
    assert servers.model not in listed


class Served:
    """`dynamo serve --engine vllm` with a temporary directory of its own, and the commands that a user types next."""

    def __init__(self, servers: EngineCluster, python: str, *options: str) -> None:
        self.servers = servers
        servers.port = free_port()
        self._cli = [python, "-m", "dynamo.cli"]
        self._variables = {"TMPDIR": str(servers.folder), "DYN_FILE_KV": ""}
        command = ["serve", servers.model, "--engine", "vllm", *options, "--http-port", str(servers.port)]
        command += ["--", "--served-model-name", "tiny", *PLAIN]
        self.process = servers.run("serve", [*self._cli, *command], **self._variables)
        self.wait_output("Press Ctrl-C", START_S)

    def wait_output(self, words: str, timeout_s: float, count: int = 1) -> None:
        log = self.servers.folder / "serve.log"

        def is_written() -> bool:
            assert self.process.poll() is None, self.servers.logs()
            return log.read_text().count(words) >= count

        wait_until(is_written, f"no {words!r}: {self.servers.logs()}", timeout_s)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = self.servers.environment() | self._variables
        command = [*self._cli, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json")
        (graph,) = json.loads(done.stdout)["graphs"]
        return {**graph, "exit": done.returncode}

    def workers(self) -> dict[str, int]:
        return {
            one["name"]: one["pid"]
            for one in self.status()["processes"]
            if "worker" in one["name"] or "prefill" in one["name"]
        }

    def interrupt(self) -> None:
        """Press Ctrl-C; the graph ends with 0 and leaves no process."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(120) == 0
        self.servers.processes.remove(self.process)
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert self.servers.model not in listed


@pytest.mark.usefixtures("needs_nixl")
def test_dynamo_serve_separates_prefill_restarts_a_worker_that_dies_and_ends_on_ctrl_c(
    serve: Callable[[str], EngineCluster], engines_python: str
) -> None:
    servers = serve("serve-roles")
    served = Served(servers, engines_python, "--prefill-workers", "1", "--router-mode", "kv")
    graph = served.status()
    assert (graph["exit"], graph["state"], graph["models"]) == (0, "serving", ["tiny"]), graph
    pids = served.workers()
    assert sorted(pids) == ["prefill-1", "worker-1"]
    prompt = "a page says of the workers of a cluster " * 12
    first = servers.complete(prompt, max_tokens=8)["choices"][0]["text"]
    log = served.run("logs", "--process", "prefill-1", "--tail", "200").stdout
    assert log.startswith("prefill-1: ")

    before = servers.instances()
    os.kill(pids["worker-1"], signal.SIGKILL)
    served.wait_output("worker-1 was killed by SIGKILL; restarting it", 60)
    servers.wait_until(
        lambda: served.workers().get("worker-1") not in {None, pids["worker-1"]}, "it has no new process"
    )
    assert served.status()["status"] == "WARN", "the worker is not ready at once"
    servers.wait_until(lambda: servers.instances() - before, "the new worker did not register", START_S)
    servers.wait_until(lambda: served.status()["status"] == "PASS", "the graph is not ready")
    assert servers.complete(prompt, max_tokens=8)["choices"][0]["text"] == first
    found = served.run("troubleshoot", "--json")
    assert "host-memory" in {one["signature"] for one in json.loads(found.stdout)["signatures"]}
    served.interrupt()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size", "many"], "--tensor-parallel-size many: must be a whole number"),
        (["--no-such-argument", "1"], "--no-such-argument"),
        (["--max-model-len", "999999"], "max_model_len"),
    ],
)
def test_dynamo_serve_reports_arguments_that_vllm_refuses(
    serve: Callable[[str], EngineCluster], engines_python: str, arguments: list[str], message: str
) -> None:
    servers = serve(f"refused{arguments[0]}")
    command = [engines_python, "-m", "dynamo.cli", "serve", servers.model, "--engine", "vllm", "--http-port", "0"]
    environment = servers.environment() | {"TMPDIR": str(servers.folder), "DYN_FILE_KV": ""}
    done = subprocess.run(
        [*command, "--", *PLAIN, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in {1, 2}, done.stderr
    assert message in done.stderr
    assert "error: " in done.stderr


def test_dynamo_serve_starts_two_workers_with_their_own_ports(
    serve: Callable[[str], EngineCluster], engines_python: str
) -> None:
    servers = serve("serve")
    servers.port = free_port()
    process = servers.run(
        "serve",
        [
            engines_python, "-m", "dynamo.cli", "serve", servers.model, "--engine", "vllm", "--workers", "2",
            "--router-mode", "kv", "--http-port", str(servers.port), "--", "--served-model-name", "tiny", *PLAIN,
        ],
    )  # fmt: skip
    servers.until_ready()
    assert servers.complete("a page", max_tokens=4)["usage"]["completion_tokens"] == 4
    process.terminate()
    assert process.wait(120) == 0
    servers.processes.remove(process)
