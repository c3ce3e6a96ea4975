"""`dynamo router` on real processes: each mode is proved where it is in force, and refuted where another one is."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.test_serve_graphs import Machine

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


@pytest.mark.parametrize(("mode", "refuted"), [("kv", "direct"), ("least-loaded", "kv"), ("direct", "round-robin")])
def test_mode_in_force_is_proved_and_another_is_refuted(machine: Machine, mode: str, refuted: str) -> None:
    url = started(machine, mode)
    done = machine.run("router", "check", "--base-url", url, "--mode", mode, "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["verdict"] == "PASS"
    wrong = machine.run("router", "check", "--base-url", url, "--mode", refuted)
    assert wrong.returncode == 1, wrong.stdout


def test_script_of_the_skill_checks_models_and_a_request(machine: Machine) -> None:
    url = started(machine, "round-robin")

    def script(*argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, SCRIPT, *argv], check=False, capture_output=True, text=True)

    healthy = script("--base-url", url, "--retries", "2", "--timeout", "20", "--mode", "round-robin")
    assert (healthy.returncode, healthy.stdout.count("PASS  ")) == (0, 4), healthy.stdout
    missing = script("--base-url", url, "no-such-model")
    assert missing.returncode == 1
    assert "serve no-such-model" in missing.stdout
    absent = script("--base-url", "http://127.0.0.1:9")
    assert absent.returncode == 1
    assert "FAIL" in absent.stdout
