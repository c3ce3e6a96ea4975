"""`dynamo router` on real processes: each mode is proved where it is in force, and refuted where another one is."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import ProcessGroup
from tests.integration.test_serve_graphs import Machine

from dynamo.core.errors import DynamoException
from dynamo.cpu.config import DEMO_MODEL
from dynamo.http.client import ChatClient

PYTHON = [sys.executable, "-m"]
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / ".agents" / "skills" / "dynamo-router-starter" / "scripts" / "check_router_health.py"

pytestmark = pytest.mark.integration


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def started(machine: Machine, mode: str) -> str:
    machine.serve("--router-mode", mode, "--engine", "mocker", "--workers", "2", "--http-port", "0")
    machine.until_ready()
    _, (graph,) = machine.status()
    return str(graph["url"])


@pytest.mark.parametrize(
    ("mode", "refuted"),
    [
        ("kv", "direct"),
        ("least-loaded", "round-robin"),
        ("direct", "round-robin"),
        ("random", "power-of-two"),
        ("power-of-two", "random"),
    ],
)
def test_mode_in_force_is_proved_and_another_is_refuted(machine: Machine, mode: str, refuted: str) -> None:
    url = started(machine, mode)
    done = machine.run("router", "check", "--base-url", url, "--mode", mode, "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["verdict"] == "PASS"
    wrong = machine.run("router", "check", "--base-url", url, "--mode", refuted)
    assert wrong.returncode == 1, wrong.stdout


@pytest.mark.parametrize(("mode", "status"), [("device-aware-weighted", 0), ("least-loaded", 1)])
def test_device_aware_mode_is_proved_by_a_cpu_worker_that_idle_requests_avoid(
    tmp_path: Path, mode: str, status: int
) -> None:
    group = ProcessGroup(tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        address = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        group.start("frontend", [*PYTHON, "dynamo.frontend", "--router-mode", mode, *address])
        for number, visible in enumerate(("", "0")):
            variables = {"CUDA_VISIBLE_DEVICES": visible}
            group.start(f"worker{number}", [*PYTHON, "dynamo.mocker", "--model-path", DEMO_MODEL], variables)
        group.wait_until(lambda: sorted(devices(url)) == ["cpu", "cuda"], "two devices are not registered")
        command = [*PYTHON, "dynamo.cli", "router", "check", "--url", url, "--mode", "device-aware-weighted"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        group.stop()
    assert done.returncode == status, done.stdout
    assert "device-aware-weighted: 8 requests one after the other" in " ".join(done.stdout.split())


def devices(url: str) -> list[str]:
    """Return the device of each worker that the frontend lists."""
    try:
        client = ChatClient(url, timeout_s=5)
        return [
            str(one["device_type"]) for one in client.instances() if client.models() and one["endpoint"] == "generate"
        ]
    except DynamoException:
        return []


def test_script_of_the_skill_checks_models_and_a_request(machine: Machine) -> None:
    url = started(machine, "round-robin")

    def script(*argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, SCRIPT, *argv], check=False, capture_output=True, text=True)

    healthy = script("--base-url", url, "--retries", "2", "--timeout", "20", "--mode", "round-robin")
    assert (healthy.returncode, healthy.stdout.count("PASS  ")) == (0, 5), healthy.stdout
    assert script("--base-url", url, "--mode", "random").returncode == 1
    missing = script("--base-url", url, "no-such-model")
    assert missing.returncode == 1
    assert "serve no-such-model" in missing.stdout
    absent = script("--base-url", "http://127.0.0.1:9")
    assert absent.returncode == 1
    assert "FAIL" in absent.stdout
