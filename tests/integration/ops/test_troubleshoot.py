"""`dynamo troubleshoot` as a process, on real processes that serve or fail, and on a Kubernetes API server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.nats import NatsServer, nats_server_binary
from tests.cluster.processes import ProcessGroup

from dynamo.ops.local_graph import local_processes, variables_of
from dynamo.protocols.kubernetes.crds import manifests

pytestmark = pytest.mark.integration

PYTHON = [sys.executable, "-m"]
MODEL = Path(__file__).parents[3] / "src" / "dynamo" / "cpu" / "demo_model"
WORKER = ["dynamo.mocker", "--model-path", str(MODEL)]
INHERITED = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")


class Findings:
    """Exit status and signatures of one run."""

    def __init__(self, folder: Path, *argv: str, **variables: str) -> None:
        own = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment = {
            **own,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "DYN_FILE_KV": str(folder / "kv"),
            **variables,
        }
        command = [*PYTHON, "dynamo.cli", "troubleshoot", "--json", *argv]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout, done.stderr
        value = json.loads(done.stdout)
        self.status = done.returncode
        self.rows: list[dict[str, Any]] = value["rows"]
        self.found: dict[str, dict[str, Any]] = {one["signature"]: one for one in value["signatures"]}

    def evidence(self, name: str) -> str:
        return "\n".join(f"{one['source']}: {one['text']}" for one in self.found[name]["evidence"])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    made = ProcessGroup(tmp_path)
    yield made
    made.stop()


def fails(group: ProcessGroup, *command: str, **variables: str) -> None:
    """Start a process that ends with an error; return the folder of its log."""
    process = group.start("part", [*PYTHON, *command], variables)
    assert process.wait(60) != 0


@pytest.mark.parametrize(
    ("signature", "command", "variables"),
    [
        ("model-path", ["dynamo.cpu", "--model-path", "/nonexistent/model"], {}),
        ("wrong-flag", [*WORKER, "--modle-name", "x"], {}),
        ("parser", [*WORKER, "--dyn-tool-call-parser", "hermess"], {}),
        (
            "etcd-down",
            [*WORKER, "--discovery-backend", "etcd"],
            {"ETCD_ENDPOINTS": "http://127.0.0.1:1", "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "1"},
        ),
        (
            "nats-down",
            [*WORKER, "--request-plane", "nats"],
            {"NATS_SERVER": "nats://127.0.0.1:1", "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "1"},
        ),
    ],
)
def test_log_of_a_process_that_cannot_start_names_the_cause(
    group: ProcessGroup, signature: str, command: list[str], variables: dict[str, str]
) -> None:
    fails(group, *command, **variables)
    findings = Findings(group.folder, "--logs", str(group.folder))
    assert findings.status == 1
    assert signature in findings.found, group.logs()
    assert findings.found[signature]["evidence"][0]["source"] == "logs/part.log"


def test_incomplete_model_taken_port_and_shared_directory_are_found(group: ProcessGroup) -> None:
    model = group.folder / "model"
    shutil.copytree(MODEL, model)
    (model / "config.json").unlink()
    fails(group, "dynamo.mocker", "--model-path", str(model))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        fails(group, "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(taken.getsockname()[1]))
    (group.folder / "kv").chmod(0o777)
    fails(group, *WORKER)
    findings = Findings(group.folder, "--logs", str(group.folder))
    assert {"model-incomplete", "port-clash", "discovery-directory"} <= findings.found.keys(), group.logs()


class Frontend:
    """A frontend of the group, and the models that it lists."""

    def __init__(self, group: ProcessGroup, **variables: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [*PYTHON, "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        group.start("frontend", command, variables)
        group.wait_until(self.is_up, "the frontend did not start")
        self._group = group

    def is_up(self) -> bool:
        try:
            return self.models() is not None
        except OSError:
            return False

    def models(self) -> list[Any]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as response:
            return json.load(response)["data"]

    def wait_listed(self) -> None:
        self._group.wait_until(self.models, "no model is listed")


def test_serving_graph_has_no_failure_and_its_collection_is_a_bundle(group: ProcessGroup) -> None:
    frontend = Frontend(group)
    group.start("worker", [*PYTHON, *WORKER])
    frontend.wait_listed()
    saved = group.folder / "saved.tar.gz"
    findings = Findings(group.folder, "--url", frontend.url, "--logs", str(group.folder), "--save", str(saved))
    assert (findings.status, findings.found) == (0, {})
    assert "/health" in findings.rows[0]["evidence"]
    again = Findings(group.folder, "--bundle", str(saved))
    assert (again.status, again.rows) == (0, findings.rows)


def test_frontend_without_workers_lists_no_model(group: ProcessGroup) -> None:
    frontend = Frontend(group)
    findings = Findings(group.folder, "--url", frontend.url, "--logs", str(group.folder))
    assert findings.status == 1
    assert "/v1/models is empty" in findings.evidence("no-models")


def test_worker_in_another_registry_is_a_mismatch(group: ProcessGroup) -> None:
    frontend = Frontend(group)
    other = group.folder / "other"
    worker = group.start("worker", [*PYTHON, *WORKER], {"DYN_FILE_KV": str(other)})
    group.wait_until(lambda: list(other.glob("v1/mdc/*")), "the worker did not register")
    findings = Findings(group.folder, "--url", frontend.url, "--logs", str(group.folder))
    assert findings.status == 1
    assert list(findings.found)[-1] == "no-models", "the symptom follows its cause"
    assert f"DYN_FILE_KV={group.folder / 'kv'}" in findings.evidence("discovery-mismatch")
    assert worker.poll() is None


def test_prefill_worker_alone_lacks_decode_workers(group: ProcessGroup) -> None:
    group.start("worker", [*PYTHON, *WORKER, "--disaggregation-mode", "prefill"])
    group.wait_until(lambda: list((group.folder / "kv").glob("v1/mdc/*")), "the worker did not register")
    findings = Findings(group.folder, "--url", f"http://127.0.0.1:{free_port()}", "--logs", str(group.folder))
    assert "prefill workers only, no decode worker" in findings.evidence("missing-peer-role")


def test_bundle_of_the_doctor_is_read(tmp_path: Path) -> None:
    port = free_port()
    bundle = tmp_path / "bug.tar.gz"
    variables = {"ETCD_ENDPOINTS": f"http://127.0.0.1:{port}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    own = {name: os.environ[name] for name in INHERITED if name in os.environ}
    command = [*PYTHON, "dynamo.cli", "doctor", "--http-port", str(port), "--bundle", str(bundle)]
    subprocess.run(command, env={**own, **variables}, capture_output=True, timeout=60, check=False)
    findings = Findings(tmp_path, "--bundle", str(bundle))
    assert findings.status == 1
    assert "doctor etcd" in findings.evidence("doctor")


POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "g-worker-0", "labels": {"nvidia.com/dynamo-graph-deployment-name": "g"}},
    "spec": {
        "containers": [{"name": "main", "image": "nvcr.io/x:9", "env": [{"name": "HF_TOKEN", "value": "s3cret-value"}]}]
    },
}
WAITING = {
    "phase": "Pending",
    "containerStatuses": [
        {
            "name": "main",
            "image": "nvcr.io/x:9",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}},
        }
    ],
}


def test_cluster_with_a_pod_that_cannot_pull_its_image(tmp_path: Path) -> None:
    with KubernetesServer(tmp_path / "kubernetes", controllers=False) as server:
        pods = "/api/v1/namespaces/default/pods"
        post(server, pods, POD)
        post(server, f"{pods}/g-worker-0/status", {**POD, "status": WAITING}, "PUT")
        server.server.logs["default/g-worker-0"] = "RuntimeError: No CUDA GPUs are available"
        kubeconfig = str(server.kubeconfig)
        saved = tmp_path / "saved.tar.gz"
        findings = Findings(tmp_path, "g", "--namespace", "default", "--save", str(saved), KUBECONFIG=kubeconfig)
        empty = Findings(tmp_path, "--namespace", "other", KUBECONFIG=kubeconfig)
    assert findings.status == 1
    assert findings.evidence("image-pull") == "pod/g-worker-0: main ImagePullBackOff: Back-off pulling image"
    assert findings.evidence("gpu-absent") == "pod/g-worker-0/main: RuntimeError: No CUDA GPUs are available"
    assert (empty.status, empty.found) == (0, {})
    assert Findings(tmp_path, "--bundle", str(saved)).found.keys() == findings.found.keys()
    assert b"s3cret-value" not in subprocess.run(["tar", "xzOf", str(saved)], capture_output=True, check=True).stdout


def test_cluster_that_does_not_respond_or_has_no_such_graph_is_one_line(tmp_path: Path) -> None:
    own = {name: os.environ[name] for name in INHERITED if name in os.environ}
    command = [*PYTHON, "dynamo.cli", "troubleshoot", "g"]

    def run() -> "subprocess.CompletedProcess[str]":
        environment = {**own, "KUBECONFIG": kubeconfig}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    with KubernetesServer(tmp_path / "kubernetes", controllers=False) as server:
        kubeconfig = str(server.kubeconfig)
        absent = run()
    assert absent.returncode == 1
    assert absent.stderr == "error: g: no DynamoGraphDeployment of this name in namespace default\n"
    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("error: Kubernetes API server")
    assert len(done.stderr.splitlines()) == 1


def post(server: KubernetesServer, path: str, value: dict[str, Any], method: str = "POST") -> None:
    """Send an object to the API server."""
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(value).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.status in {200, 201}


@pytest.mark.skipif(nats_server_binary() is None, reason="needs nats-server")
def test_worker_with_another_event_plane_is_a_mismatch(group: ProcessGroup) -> None:
    with NatsServer(group.folder) as nats:
        frontend = Frontend(group, DYN_EVENT_PLANE="zmq")
        group.start("worker", [*PYTHON, *WORKER, "--event-plane", "nats"], {"NATS_SERVER": nats.url})
        frontend.wait_listed()
        findings = Findings(group.folder, "--url", frontend.url, "--logs", str(group.folder))
    assert findings.status == 1
    assert "DYN_EVENT_PLANE=nats" in findings.evidence("plane-mismatch")


def test_output_of_a_graph_whose_worker_was_killed_names_it(group: ProcessGroup) -> None:
    port = free_port()
    serve = [*PYTHON, "dynamo.cli", "serve", "--engine", "mocker", "--http-port", str(port)]
    group.start("serve", serve, {"TMPDIR": str(group.folder), "DYN_FILE_KV": ""})
    group.wait_until(lambda: "Press Ctrl-C" in group.logs(), "the graph did not start")
    for process in local_processes():
        if process.module == "dynamo.mocker" and str(group.folder) in variables_of(process.pid).get("DYN_FILE_KV", ""):
            os.kill(process.pid, signal.SIGKILL)
    group.wait_until(lambda: "was killed by SIGKILL" in group.logs(), "the worker was not restarted")
    findings = Findings(group.folder, "--url", f"http://127.0.0.1:{port}", "--logs", str(group.folder))
    assert findings.status == 1
    assert "worker-1 was killed by SIGKILL" in findings.evidence("host-memory")


def test_script_of_the_skill_collects_evidence_that_is_a_bundle(tmp_path: Path) -> None:
    script = (
        Path(__file__).parents[3] / ".agents" / "skills" / "dynamo-troubleshoot" / "scripts" / "collect-evidence.sh"
    )
    own = {name: os.environ[name] for name in INHERITED if name in os.environ}

    def run(*argv: str) -> "subprocess.CompletedProcess[str]":
        environment = {**own, "KUBECONFIG": str(server.kubeconfig), "PYTHON": sys.executable}
        return subprocess.run([script, *argv], env=environment, capture_output=True, text=True, timeout=60, check=False)

    with KubernetesServer(tmp_path / "kubernetes", controllers=False) as server:
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for _, crd in manifests(has_conversion=False):
            post(server, crds, crd)
        graph = {
            "apiVersion": "nvidia.com/v1beta1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": "g"},
            "spec": {"components": [{"name": "Frontend", "type": "frontend", "replicas": 1}]},
        }
        post(server, "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments", graph)
        pods = "/api/v1/namespaces/default/pods"
        post(server, pods, POD)
        post(server, f"{pods}/g-worker-0/status", {**POD, "status": WAITING}, "PUT")
        done = run("-k", "dgd", "-r", "g", "-n", "default", "-o", str(tmp_path / "out"))
        absent = run("-k", "dgdr", "-r", "x", "-o", str(tmp_path / "absent"))
        wrong = run("-k", "pod", "-r", "x", "-o", str(tmp_path / "wrong"))
    assert (done.returncode, absent.returncode, wrong.returncode) == (0, 1, 2), done.stdout + done.stderr
    assert "PASS|resource|dgd/g collected" in done.stdout
    assert "FAIL|resource|dgdr/x not found" in absent.stdout
    assert {"g.yaml", "pods.txt", "describe-g-worker-0.txt"} <= {one.name for one in (tmp_path / "out").iterdir()}
    findings = Findings(tmp_path, "--bundle", str(tmp_path / "out"))
    assert {"image-pull", "operator-absent"} <= findings.found.keys()
