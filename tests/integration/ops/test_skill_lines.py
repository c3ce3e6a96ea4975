"""Skills for operators: every command line of their shell blocks, as written except for the names in capitals, on healthy subjects."""

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.cluster.kubernetes.operated import Case, OperatedCluster, run_on
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.processes import ProcessGroup

from dynamo.k8s.kinds import VOLUME_CLAIMS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
SKILLS = ROOT / ".agents" / "skills"
BIN = Path(sys.executable).parent
RECIPE = "qwen3-0.6b/vllm/agg"
KUBECTL = """#!/bin/sh
if [ "$1" = logs ]; then echo "NCCL INFO NET/IB : Using mlx5_0"; exit 0; fi
while [ "$1" != -- ]; do shift; done
shift
case "$1" in
    ibstat) printf 'Port 1:\\n\\tState: Active\\n\\tRate: 400\\n' ;;
    env) printf 'UCX_TLS=rc_x,cuda_copy,cuda_ipc\\nUCX_NET_DEVICES=mlx5_0:1\\nNCCL_IB_HCA=mlx5_0\\n' ;;
    *) echo "OCI runtime exec failed: executable file not found" >&2; exit 126 ;;
esac
"""
GRAPH = """\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: g}
spec: {components: [{name: Frontend, type: frontend, replicas: 1}]}
"""
BOUND = {"metadata": {"name": "model-cache"}, "status": {"phase": "Bound"}}
"""What a provisioner writes, which the API server of the tests has not."""


class Reader:
    """Reader of a skill, who runs its lines in a folder that has the skill's scripts and the recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"PATH": f"{folder}:{BIN}:/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}

    def lines(self, skill: str, **names: str) -> list[str]:
        """Return the lines of the shell blocks, with names in place of capitals; the scripts of the skill are in the folder."""
        shutil.copytree(SKILLS / skill / "scripts", self.folder / "scripts", dirs_exist_ok=True)
        blocks = re.findall(r"(?s)```sh\n(.*?)```", (SKILLS / skill / "SKILL.md").read_text())
        lines = [line for block in blocks for line in block.splitlines() if line]
        return [re.sub(r"\b[A-Z]{3,}\b", lambda word: names.get(word[0], word[0]), line) for line in lines]

    def run(self, line: str) -> str:
        """Run a line and return its output; it has to succeed."""
        done = subprocess.run(
            ["bash", "-euc", line],
            check=False, capture_output=True, text=True, cwd=self.folder, timeout=90, env=self.variables,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}{done.stdout}"
        return " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    return Reader(tmp_path)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    (tmp_path / "logs").mkdir()
    made = ProcessGroup(tmp_path / "logs")
    yield made
    made.stop()


@pytest.fixture
def own_kubernetes(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path / "kubernetes") as server:
        yield server


@pytest.fixture
def run(own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    return run_on(own_kubernetes, monkeypatch)


def test_recipe_is_selected_checked_adapted_and_run_and_its_graph_has_no_failure(
    reader: Reader, own_kubernetes: KubernetesServer, run: Callable[[Case], None]
) -> None:
    names = {"PATH": f"recipes/{RECIPE}", "NAME": RECIPE, "NAMESPACE": "default", "CLASS": "fast", "TAG": "1.6.1"}
    recipe_lines = reader.lines("dynamo-recipe-runner", **names)
    graph = {"NAME": RECIPE.replace("/", "-").replace(".", "-"), "NAMESPACE": "default"}
    graph_lines = reader.lines("dynamo-troubleshoot", **graph)[2:]
    reader.variables["KUBECONFIG"] = str(own_kubernetes.kubeconfig)
    texts: list[str] = []

    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            texts.extend([await asyncio.to_thread(reader.run, line) for line in recipe_lines])
            bound = {**BOUND, "apiVersion": VOLUME_CLAIMS.api_version, "kind": VOLUME_CLAIMS.kind}
            await cluster.client.apply(VOLUME_CLAIMS, bound, "default", manager="provisioner", subresource="status")
            texts.extend([await asyncio.to_thread(reader.run, line) for line in graph_lines])

    run(case)
    found, selected, checked, _, planned, ran, triage, collected, inspected = texts
    assert RECIPE in found.replace(" ", "/")
    assert "llama-3-70b" in selected
    assert '"blockers": []' in checked
    assert "apply Job/model-download" in planned
    assert "PASS" in ran
    assert (reader.folder / "results" / "deployment_ledger.json").exists()
    assert ("FAIL" in triage, "PASS|resource|" in collected, "FAIL" in inspected) == (False, True, False)


def test_router_mode_is_started_and_proved_and_its_graph_has_no_failure(reader: Reader, group: ProcessGroup) -> None:
    port = str(free_port())
    start, patch, *checks = reader.lines("dynamo-router-starter")
    (reader.folder / "graph.yaml").write_text(GRAPH)
    group.start(
        "graph", ["bash", "-euc", f"exec {start}"], reader.variables | {"DYN_HTTP_PORT": port, "DYN_FILE_KV": ""}
    )
    reader.run(patch)
    assert "DYN_ROUTER_MODE" in (reader.folder / "graph-kv.yaml").read_text()
    group.wait_until(lambda: "Press Ctrl-C" in group.logs(), "the graph did not start")
    smoke, proof = (reader.run(line.replace("localhost:8000", f"localhost:{port}")) for line in checks)
    assert "PASS" in smoke
    assert "kv:" in proof
    for line in reader.lines("dynamo-troubleshoot")[:2]:
        assert "FAIL" not in reader.run(line)


def test_interconnect_of_a_recipe_and_of_a_pod_is_checked(reader: Reader) -> None:
    (reader.folder / "kubectl").write_text(KUBECTL)
    (reader.folder / "kubectl").chmod(0o755)
    lines = reader.lines("dynamo-interconnect-check", MODEL="llama-3-70b", NAMESPACE="default", POD="decode-0")
    recipe, node, transport = (reader.run(line) for line in lines)
    assert "verdict:" in recipe
    assert "links ok" in node
    assert "nccl ok" in transport
