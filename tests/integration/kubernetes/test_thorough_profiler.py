"""The thorough strategy in a cluster whose pods are processes: candidates are deployed, measured and removed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kubernetes.installed import GRAPHS, Installed, adapted, installed
from tests.cluster.kubernetes.kubeconfig import write_kubeconfig

from dynamo.cpu.config import DEMO_MODEL
from dynamo.mocker.profile import fixed
from dynamo.operator.reconcile.requests.job import ACCOUNT, profiling_access

pytestmark = [pytest.mark.integration, pytest.mark.install]

PREFILL_MS, DECODE_MS = 60.0, 80.0
PLACES = {
    "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
}
SPEC: dict[str, Any] = {
    "model": str(DEMO_MODEL), "backend": "vllm", "image": "r/dynamo-planner:1", "searchStrategy": "thorough",
    "hardware": {"gpuSku": "h100_sxm", "totalGpus": 2, "numGpusPerNode": 8},
    "workload": {"isl": 256, "osl": 60}, "sla": {"ttft": 800, "itl": 100},
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Installed]:
    """A cluster in which vLLM is a mocker of known step times; with two GPUs it cannot start."""
    truth = tmp_path / "truth.json"
    truth.write_text(fixed(PREFILL_MS, DECODE_MS))

    def adapt(words: list[str], ip: str) -> list[str]:
        if "dynamo.vllm" not in words:
            return adapted(words, ip)
        flags = ["--num-gpu-blocks-override", "56", "--block-size", "64", "--max-num-seqs", "64"]
        if words[words.index("--tensor-parallel-size") + 1] != "1":
            flags.append("--out-of-memory")
        model = ["--model-path", str(DEMO_MODEL), "--model-name", str(DEMO_MODEL)]
        return [words[0], "-m", "dynamo.mocker", *model, "--planner-profile-data", str(truth), *flags]

    with installed(tmp_path, adapt=adapt) as made:
        yield made


def profiled(cluster: Installed, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the profiler with the rights of a profiling job."""
    for value in profiling_access("default"):
        cluster.http.post(PLACES[value["kind"]], json=value)
    server = cluster.server
    token = server.server.account_token("default", ACCOUNT)
    config = write_kubeconfig(folder / "profiler.kubeconfig", server.url, token, server.ca, "default")
    command = [
        sys.executable, "-m", "dynamo.profiler", "--config", json.dumps(SPEC), "--output-dir", str(folder / "out"),
        "--decode-interpolation-granularity", "2", "--deployment-timeout", "90",
    ]  # fmt: skip
    environment = {**os.environ, "KUBECONFIG": str(config), "DGDR_NAMESPACE": "default", "DGDR_NAME": "chat"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)


def test_candidates_are_deployed_measured_and_removed(cluster: Installed, tmp_path: Path) -> None:
    leftover = {"name": "chat-old", "labels": {"app": "dynamo-profiler"}}
    graph = {
        "apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": leftover,
        "spec": {"components": [{"name": "Frontend", "type": "frontend", "replicas": 0}]},
    }  # fmt: skip
    cluster.wait_until(lambda: cluster.http.post(GRAPHS, json=graph).is_success, "a graph cannot be created")
    done = profiled(cluster, tmp_path)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{cluster.kubelet.logs()}"
    measured = [json.loads(line) for line in (tmp_path / "out" / "measurements.jsonl").read_text().splitlines()]
    full = measured[-1]
    assert (full["engine"], full["kind"], full["concurrency"]) == ("tp1", "decode", 11)
    assert full["tok_s"] == pytest.approx(1000 * full["concurrency"] / DECODE_MS, rel=0.05)
    assert "candidate tp2 dropped: not ready within 90 s" in done.stderr
    assert cluster.http.get(GRAPHS).json()["items"] == []
    refused = [one for one in cluster.server.server.authorizer.refused if one[0].endswith(f":{ACCOUNT}")]
    assert refused == []  # Pods of a deleted candidate may lose their rights before they end.
    graph = yaml.safe_load((tmp_path / "out" / "final_config.yaml").read_text())
    assert graph["metadata"]["name"] == "chat-dgd"
    assert {one["type"] for one in graph["spec"]["components"]} == {"frontend", "prefill", "decode"}
    status = yaml.safe_load((tmp_path / "out" / "profiler_status.yaml").read_text())
    assert status["status"] == "success"
