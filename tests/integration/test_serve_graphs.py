"""`dynamo serve` with engines of other packages and from a graph file; `dynamo status`, `logs`, `stop`; shell completion."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.test_engine_adapters import MODEL, ROOT

pytestmark = pytest.mark.integration

CHAT = {"messages": [{"role": "user", "content": "What is Dynamo?"}], "max_tokens": 4}


class Machine:
    """Commands of `dynamo` with a temporary directory of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        scripted = folder / "scripted"
        scripted.mkdir()
        self.variables = {
            **os.environ,
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "tests" / "scripted_packages"), str(ROOT))),
            "SCRIPTED_FOLDER": str(scripted),
            "DYN_PREFILL_DRAIN_TIMEOUT_S": "0",
        }
        self.variables.pop("DYN_FILE_KV", None)
        self.served: list[subprocess.Popen[bytes]] = []

    def run(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "dynamo.cli", *argv]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=self.variables, timeout=DEADLINE_S
        )

    def serve(self, *argv: str) -> None:
        log = open(self.folder / f"serve-{len(self.served)}", "wb")  # noqa: SIM115 - closed below
        with log:
            command = [sys.executable, "-m", "dynamo.cli", "serve", *argv]
            self.served.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.variables))

    def text(self, index: int = 0) -> str:
        return (self.folder / f"serve-{index}").read_text()

    def until_ready(self, index: int = 0) -> None:
        def is_ready() -> bool:
            assert self.served[index].poll() is None, self.text(index)
            return "Press Ctrl-C" in self.text(index)

        wait_until(is_ready, "it was never ready")

    def status(self, *argv: str) -> tuple[int, list[dict[str, Any]]]:
        done = self.run("status", "--json", *argv)
        return done.returncode, json.loads(done.stdout)["graphs"]

    def close(self) -> None:
        for process in self.served:
            if process.poll() is None:
                process.terminate()
                process.wait(DEADLINE_S)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as folder:
        made = Machine(Path(folder))
        yield made
        made.close()


def answer(graph: dict[str, Any]) -> str:
    response = httpx.post(
        f"{graph['url']}/v1/chat/completions", json={"model": graph["models"][0], **CHAT}, timeout=DEADLINE_S
    )
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(("engine", "arguments"), [("sglang", ("--page-size", "16")), ("trtllm", ())])
def test_engine_of_another_package_is_served_in_two_phases_with_its_own_arguments(
    machine: Machine, engine: str, arguments: tuple[str, ...]
) -> None:
    machine.serve(
        MODEL, "--engine", engine, "--prefill-workers", "1", "--router-mode", "kv", "--http-port", "0", "--name", "g",
        "--", "--served-model-name", "m", *arguments,
    )  # fmt: skip
    machine.until_ready()
    code, (graph,) = machine.status()
    assert (code, graph["status"], graph["models"]) == (0, "PASS", ["m"])
    assert [one["name"] for one in graph["processes"]] == ["worker-1", "prefill-1", "frontend"]
    wait_until(lambda: bool(answer(graph)), "no answer")


def test_argument_of_an_engine_before_the_dashes_and_a_wrong_one_behind_them_are_named(machine: Machine) -> None:
    done = machine.run("serve", MODEL, "--engine", "sglang", "--mem-fraction-static", "0.5")
    assert done.returncode == 2
    assert "arguments of sglang follow --" in done.stderr
    done = machine.run("serve", MODEL, "--engine", "sglang", "--http-port", "0", "--", "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


def graph_file(folder: Path) -> str:
    worker = {"name": "main", "image": "x", "command": ["python3", "-m", "dynamo.cpu"], "args": ["--model-name", "m"]}
    front = {"name": "main", "image": "x", "args": ["python3", "-m", "dynamo.frontend", "--router-mode", "kv"]}
    components = [
        {"name": "Frontend", "type": "frontend", "podTemplate": {"spec": {"containers": [front]}}},
        {"name": "Worker", "type": "worker", "replicas": 2, "podTemplate": {"spec": {"containers": [worker]}}},
    ]
    path = folder / "graph.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "nvidia.com/v1beta1",
                "kind": "DynamoGraphDeployment",
                "metadata": {"name": "two-workers"},
                "spec": {"components": components},
            }
        )
    )
    return str(path)


def test_graph_file_is_served_watched_and_stopped(machine: Machine) -> None:
    path = graph_file(machine.folder)
    assert machine.run("deploy", "validate", path).returncode == 0
    machine.serve("-f", path, "--http-port", "0")
    machine.until_ready()
    code, (graph,) = machine.status("two-workers")
    assert (code, graph["status"], graph["workers_ready"]) == (0, "PASS", 2)
    assert answer(graph)
    names = {one["name"]: one["pid"] for one in graph["processes"]}
    assert set(names) == {"worker-1", "worker-2", "frontend"}
    assert "two-workers" in machine.run("status").stdout

    os.kill(names["worker-2"], signal.SIGKILL)
    wait_until(lambda: machine.status()[1][0]["processes"][1]["pid"] != names["worker-2"], "it was never started again")
    wait_until(lambda: machine.status()[1][0]["workers_ready"] == 2, "it never became ready")

    stopped = machine.run("stop", "two-workers")
    assert (stopped.returncode, stopped.stdout) == (0, "two-workers: stopped\n")
    assert machine.served[0].wait(DEADLINE_S) == 0
    assert machine.status() == (0, [])
    assert "there is no graph" in machine.run("stop").stderr


def test_frontend_that_is_stuck_fails_the_status_and_logs_name_each_process(machine: Machine) -> None:
    machine.variables["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
    machine.serve("--http-port", "0", "--name", "demo")
    machine.until_ready()
    _, (graph,) = machine.status()
    frontend = next(one["pid"] for one in graph["processes"] if one["name"] == "frontend")
    os.kill(frontend, signal.SIGSTOP)
    try:
        code, (graph,) = machine.status()
    finally:
        os.kill(frontend, signal.SIGCONT)
    assert (code, graph["status"]) == (1, "FAIL")
    assert "stopped by a signal or a debugger: frontend" in graph["state"]

    (Path(graph["logs"]) / "worker-1.log").write_text("first\nsecond\n")
    assert machine.run("logs", "demo", "--process", "worker-1", "--tail", "1").stdout == "worker-1: second\n"
    assert json.loads(machine.run("logs", "--json", "--tail", "1").stdout.splitlines()[-1])["process"] == "worker-1"
    assert "--process x: no log of this process; known:" in machine.run("logs", "demo", "--process", "x").stderr
    assert json.loads(machine.run("stop", "--all", "--json").stdout) == {
        "graphs": [{"name": "demo", "is_stopped": True}]
    }


def test_graphs_of_one_name_are_selected_by_their_ports(machine: Machine) -> None:
    machine.variables["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
    for index in range(2):
        machine.serve("--engine", "mocker", "--http-port", "0", "--name", "twin")
        machine.until_ready(index)
    code, (second, first) = machine.status()
    assert (code, first["status"], second["status"]) == (0, "PASS", "PASS")
    ports = [graph["url"].rpartition(":")[2] for graph in (second, first)]

    logs = machine.run("logs")
    assert (logs.returncode, logs.stdout) == (0, "")
    assert logs.stderr.splitlines() == [
        f"twin (port {ports[0]}), the newest; also known: twin (port {ports[1]})",
        "twin: the processes logged no warning; dynamo serve --verbose shows all messages",
    ]
    assert machine.run("completion", "graphs").stdout == "twin\n"
    missing, ambiguous = machine.run("stop"), machine.run("stop", "twin")
    assert (missing.returncode, ambiguous.returncode) == (2, 2)
    assert f"NAME is missing: expected one of twin (port {ports[0]}), twin (port {ports[1]})" in missing.stderr
    assert f"twin: 2 graphs run with this name; give the port instead: {', '.join(ports)}" in ambiguous.stderr

    assert machine.run("stop", ports[0]).stdout == "twin: stopped\n"
    assert machine.served[1].wait(DEADLINE_S) == 0
    assert machine.served[0].poll() is None
    _, (left,) = machine.status("twin")
    assert (left["status"], left["processes"]) == ("PASS", first["processes"])
    assert answer(left)


REPLAY = ["--request-count", "2", "--input-tokens", "8", "--output-tokens", "2", "--request-rate", "9"]


@pytest.mark.parametrize(
    "argv", [["dynamo.cli", "recipe", "list"], ["dynamo.cli", "completion", "zsh"], ["dynamo.replay", *REPLAY]]
)
def test_command_whose_reader_has_ended_prints_no_traceback(machine: Machine, argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", *argv]
        done = subprocess.run(
            command, check=False, stdout=writer, stderr=subprocess.PIPE, env=machine.variables, timeout=DEADLINE_S
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


WORDS = {
    "dynamo st": {"status", "stop"},
    "dynamo serve --prefill-w": {"--prefill-workers"},
    "dynamo serve --engine v": {"vllm"},
    "dynamo deploy val": {"validate"},
    "dynamo deploy logs --comp": {"--component"},
    "dynamo router check --mode k": {"kv"},
}
"""Words that follow the beginning of a command line."""
DRIVERS = {
    "bash": """
        COMP_WORDS=($2); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        source "$1"; _dynamo; printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { }; _files() { }; compadd() { print -l -- ${(M)found:#${words[-1]}*} }
        source "$1"; words=(${=2}); CURRENT=$#words; _dynamo
    """,
    "fish": "source $argv[1]; complete -C $argv[2]",
}
"""Programs that print the completions of the script and the line that are their arguments."""


@pytest.mark.parametrize("shell", DRIVERS)
def test_shell_completes_commands_flags_and_values(machine: Machine, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = machine.folder / "script"
    script.write_text(machine.run("completion", shell).stdout)
    name = () if shell == "fish" else (shell,)
    for line, expected in WORDS.items():
        done = subprocess.run(
            [shell, "-c", DRIVERS[shell], *name, str(script), line],
            check=True, capture_output=True, text=True, cwd=machine.folder, timeout=DEADLINE_S,
            env=machine.variables,
        )  # fmt: skip
        assert (done.stderr, set(done.stdout.split())) == ("", expected), line
