"""`dynamo recipe` end to end: offline checks, and a run on an API server with the operator."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.kubernetes.operated import Case, OperatedCluster, run_on
from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.cli.recipe import recipe
from dynamo.k8s.kinds import JOBS, VOLUME_CLAIMS

pytestmark = pytest.mark.integration

TESTS = Path(__file__).resolve().parents[2]
ROOT = str(TESTS / "recipes")
TOOL = TESTS.parent / ".agents" / "skills" / "dynamo-recipe-runner" / "scripts" / "recipe_tool.py"


@pytest.fixture
def run(own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    return run_on(own_kubernetes, monkeypatch)


def test_recipe_is_deployed_in_order_and_its_results_are_collected(
    run: Callable[[Case], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results"
    argv = ["run", "tiny/cpu/agg", "--root", ROOT, "--replicas", "Worker=1", "--output", str(output)]

    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            assert await asyncio.to_thread(recipe, argv) == 0, capsys.readouterr().out
            assert await cluster.names(JOBS) == ["model-download", "tiny-agg-perf"]
            assert await cluster.names(VOLUME_CLAIMS) == ["model-cache"]
            status = await cluster.status("tiny-agg")
            assert status["components"]["Worker"]["readyReplicas"] == 1

    run(case)
    ledger = json.loads((output / "deployment_ledger.json").read_text())
    assert [one["status"] for one in ledger["steps"]] == ["PASS", "PASS", "PASS", "SKIP", "PASS"]
    assert list(output.glob("logs-tiny-agg-perf*.txt"))


def test_graph_that_does_not_become_ready_ends_the_run(
    run: Callable[[Case], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "tiny/cpu/agg", "--root", ROOT, "--ready-timeout-s", "0.5", "--output", str(tmp_path)]

    async def case(cluster: OperatedCluster) -> None:
        assert await asyncio.to_thread(recipe, argv) == 1

    run(case)
    text = capsys.readouterr().out
    assert "FAIL  graph tiny-agg  state unknown after 0.5 s" in text
    assert "dynamo troubleshoot tiny-agg --namespace default" in text
    ledger = json.loads((tmp_path / "deployment_ledger.json").read_text())
    assert [one["status"] for one in ledger["steps"]] == ["PASS", "PASS", "FAIL", "SKIP", "SKIP"]


def test_recipe_with_blockers_is_not_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe(["run", "tiny disagg-single-node", "--root", ROOT, "--dry-run"]) == 1
    assert recipe(["run", "tiny/cpu/agg", "--root", ROOT, "--dry-run"]) == 0
    assert "3. apply DynamoGraphDeployment/tiny-agg and wait until it is ready" in capsys.readouterr().out


def test_patched_recipe_is_valid_and_the_original_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["patch", "tiny/cpu/agg", "--root", ROOT, "--namespace", "n", "--image-tag", "9", "--output", str(tmp_path)]
    assert recipe(argv) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml")) == [
        "cpu/agg/deploy.yaml",
        "cpu/agg/perf.yaml",
        "model-cache/model-cache.yaml",
        "model-cache/model-download.yaml",
    ]
    assert "registry.example/dynamo:9" in (tmp_path / "cpu/agg/deploy.yaml").read_text()
    assert recipe(["list", "--root", ROOT, "--json"]) == 0
    assert '"gpu_count_hint": 8' in capsys.readouterr().out


def test_script_of_the_skill_lists_and_validates() -> None:
    def tool(*argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, TOOL, *argv], check=False, capture_output=True, text=True)

    listed = tool("list", "--root", ROOT, "--mode", "agg", "--format", "json")
    assert [one["mode"] for one in json.loads(listed.stdout)] == ["agg"]
    healthy = tool("validate", f"{ROOT}/tiny/cpu/agg")
    assert (healthy.returncode, json.loads(healthy.stdout)["blockers"]) == (0, [])
    broken = tool("validate", f"{ROOT}/tiny/cpu/disagg-single-node")
    assert (broken.returncode, len(json.loads(broken.stdout)["blockers"])) == (1, 2)
    assert tool().returncode == 2
    assert "no such recipe" in tool("validate", "nothing", "--root", ROOT).stderr
