"""`dynamo check interconnect`: this machine, saved outputs, pods by kubectl, and a NIXL transfer where nixl is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.interconnect.collect import collect_nixl, run_here
from dynamo.ops.interconnect.command import check
from dynamo.ops.interconnect.node_checks import nixl_rows
from dynamo.ops.report import CheckStatus

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / ".agents" / "skills" / "dynamo-interconnect-check" / "scripts" / "check_interconnect.py"
RECIPE = str(ROOT / "tests" / "recipes" / "tiny" / "cpu" / "disagg-single-node")
KUBECTL = """#!/bin/sh
if [ "$1" = logs ]; then echo "NCCL INFO NET/Socket : Using eth0"; exit 0; fi
[ "$4" = absent ] && { echo "Error from server (NotFound): pods \\"absent\\" not found" >&2; exit 1; }
while [ "$1" != -- ]; do shift; done
shift
case "$1" in
    ibstat) printf 'Port 1:\\n\\tState: Down\\n\\tRate: 400\\n' ;;
    env) echo UCX_TLS=tcp ;;
    *) echo "OCI runtime exec failed: executable file not found" >&2; exit 126 ;;
esac
"""


def run_script(*argv: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([sys.executable, SCRIPT, *argv], check=False, capture_output=True, text=True, env=variables)


def test_saved_outputs_are_evaluated_on_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.json"
    assert check(["interconnect", "node", "--save", str(path)]) == 0
    capsys.readouterr()
    values = json.loads(path.read_text())
    values["ibstat"] = {"status": 0, "text": "Port 1:\n\tState: Down\n"}
    path.write_text(json.dumps(values))
    assert check(["interconnect", "node", "--from", str(path), "--json"]) == 1
    rows = {row["check"]: row["status"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["links"] == "FAIL"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a file of dynamo check interconnect --save"):
        check(["interconnect", "node", "--from", str(path)])


def test_pod_is_checked_by_kubectl(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    done = run_script("nixl", "--namespace", "n", "--pod", "p", "--json", path=str(tmp_path))
    rows = {row["check"]: row["result"] for row in json.loads(done.stdout)}
    assert rows == {"nixl": "skipped", "nccl": "warn"}
    done = run_script("node", "--namespace", "n", "--pod", "p", path=str(tmp_path))
    assert done.returncode == 1
    assert "links                fail" in done.stdout
    assert "verdict: FAIL" in done.stdout
    absent = run_script("node", "--namespace", "n", "--pod", "absent", path=str(tmp_path))
    assert absent.returncode == 2
    assert 'pods "absent" not found' in absent.stderr


def test_recipe_without_variables_is_warned_about() -> None:
    done = run_script("env", RECIPE)
    assert done.returncode == 0
    assert "not set: UCX_TLS, UCX_NET_DEVICES, NCCL_IB_HCA" in done.stdout
    assert run_script("env", "absent").returncode == 2


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_transfer_between_two_processes_is_measured() -> None:
    rows = nixl_rows(collect_nixl(run_here, sys.executable, megabytes=16))
    (transfer,) = [row for row in rows if row.check == "transfer"]
    assert transfer.status in {CheckStatus.PASS, CheckStatus.WARN}
    assert "GB/s: 20 reads of 16 MiB between two processes, UCX" in transfer.evidence
