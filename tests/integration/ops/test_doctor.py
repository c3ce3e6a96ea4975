"""`dynamo doctor` as a process, on a healthy machine and on broken subjects: exit status and rows."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.etcd import EtcdCluster
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.nats import NatsServer, nats_server_binary
from tests.cluster.processes import ProcessGroup

pytestmark = pytest.mark.integration

DYNAMO = [sys.executable, "-m", "dynamo.cli"]
MODEL = Path(__file__).parents[3] / "src" / "dynamo" / "cpu" / "demo_model"
INHERITED = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")


class Report:
    """Exit status and rows of one run."""

    def __init__(self, folder: Path, *argv: str, prefix: Sequence[str] = (), **variables: str) -> None:
        own = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment = {
            **own,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "DYN_FILE_KV": str(folder / "kv"),
            "DYN_HTTP_PORT": str(free_port()),
            "DYN_SYSTEM_PORT": str(free_port()),
            **variables,
        }
        done = subprocess.run(
            [*prefix, *DYNAMO, "doctor", "--json", *argv],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.status, self.errors = done.returncode, done.stderr
        value = json.loads(done.stdout)
        self.verdict: str = value["verdict"]
        self.rows: list[dict[str, Any]] = value["rows"]

    def row(self, check: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["check"] == check)

    def failures(self) -> list[str]:
        """Return the failed checks, but for those of this machine's resources."""
        local = re.compile(r"memory|shared memory|open files|disk .*|gpu.*|packages|extra .*")
        return [row["check"] for row in self.rows if row["status"] == "FAIL" and not local.fullmatch(row["check"])]


def test_healthy_machine_passes(tmp_path: Path) -> None:
    report = Report(tmp_path, str(MODEL))
    assert report.failures() == []
    assert report.status == (report.verdict == "FAIL")
    for check in ("python", "variables", "discovery", "model"):
        assert report.row(check)["status"] == "PASS", report.row(check)
    for check in ("etcd", "NATS", "Kubernetes", "frontend"):
        assert report.row(check)["status"] == "SKIP", report.row(check)


def test_wrong_model_path_names_the_nearest_directory(tmp_path: Path) -> None:
    (tmp_path / "llama-3").mkdir()
    report = Report(tmp_path, str(tmp_path / "lama-3"))
    assert (report.status, report.failures()) == (1, ["model"])
    assert report.row("model")["remedy"] == f"did you mean {tmp_path / 'llama-3'}?"


def test_incomplete_model_names_the_missing_file(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    report = Report(tmp_path, str(tmp_path / "model"))
    assert (report.status, report.failures()) == (1, ["model"])
    assert "no config.json" in report.row("model")["evidence"]


def test_taken_port_names_its_process(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(5)
        port = taken.getsockname()[1]
        report = Report(tmp_path, DYN_HTTP_PORT=str(port))
    assert (report.status, report.failures()) == (1, [f"port {port}"])
    assert f"(pid {os.getpid()})" in report.row(f"port {port}")["evidence"]


def test_dead_etcd_and_dead_nats_fail_within_their_deadline(tmp_path: Path) -> None:
    port = free_port()
    report = Report(tmp_path, ETCD_ENDPOINTS=f"http://127.0.0.1:{port}", NATS_SERVER=f"nats://127.0.0.1:{port}")
    assert (report.status, report.failures()) == (1, ["etcd", "NATS"])
    assert f"http://127.0.0.1:{port}" in report.row("etcd")["evidence"]
    assert report.row("discovery")["status"] == "SKIP"


def test_etcd_that_serves_passes_and_its_clock_is_compared(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as etcd:
        report = Report(tmp_path, ETCD_ENDPOINTS=etcd.wait().endpoints)
    assert report.failures() == []
    assert report.row("etcd")["status"] == "PASS"
    assert report.row("clock")["status"] == "PASS"


@pytest.mark.skipif(nats_server_binary() is None, reason="needs nats-server")
def test_nats_that_serves_passes_and_wrong_credentials_fail(tmp_path: Path) -> None:
    with NatsServer(tmp_path, 'authorization { user: "user", password: "user" }') as nats:
        good = Report(tmp_path, NATS_SERVER=nats.url)
        bad = Report(tmp_path, NATS_SERVER=nats.url, NATS_AUTH_TOKEN="wrong-value")
    assert (good.failures(), good.row("NATS")["status"]) == ([], "PASS")
    assert (bad.status, bad.failures()) == (1, ["NATS"])
    assert "authorization rejected" in bad.row("NATS")["evidence"]


def test_kubernetes_that_serves_is_a_warning_without_resource_definitions(tmp_path: Path) -> None:
    with KubernetesServer(tmp_path / "kubernetes", controllers=False) as server:
        report = Report(tmp_path, KUBECONFIG=str(server.kubeconfig))
        required = Report(tmp_path, KUBECONFIG=str(server.kubeconfig), DYN_DISCOVERY_BACKEND="kubernetes")
    assert report.failures() == []
    assert "DynamoGraphDeployment is not installed" in report.row("Kubernetes")["evidence"]
    assert "DynamoWorkerMetadata is not installed" in required.row("Kubernetes")["evidence"]
    assert required.status == 1


def test_discovery_directory_that_others_can_write_fails(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    report = Report(tmp_path)
    assert (report.status, report.failures()) == (1, ["discovery"])
    assert "mode 0777" in report.row("discovery")["evidence"]


def test_discovery_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = Report(tmp_path, DYN_FILE_KV=str(tmp_path / "file" / "kv"))
    assert report.status == 1
    assert "discovery" in report.failures()


SMALL_DISK = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"']
"""Runs a command in a mount namespace in which the directory of the first argument is a disk of 1 MiB."""


def test_full_disk_names_its_directory(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    prefix = [*SMALL_DISK, str(tmp_path / "small")]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    report = Report(tmp_path, prefix=prefix, DYN_FILE_KV=str(tmp_path / "small" / "kv"))
    assert report.status == 1
    assert report.row("disk discovery")["status"] == "FAIL"
    assert str(tmp_path / "small" / "kv") in report.row("disk discovery")["evidence"]


def test_misspelled_variable_is_a_warning_with_the_nearest_name(tmp_path: Path) -> None:
    report = Report(tmp_path, DYN_ROUTER_MOD="kv")
    assert report.failures() == []
    row = report.row("variables")
    assert (row["status"], row["remedy"]) == ("WARN", "did you mean DYN_ROUTER_MODE?")


def test_wrong_value_of_a_variable_fails(tmp_path: Path) -> None:
    report = Report(tmp_path, DYN_HTTP_PORT="abc")
    assert (report.status, report.failures()) == (1, ["settings"])
    assert "DYN_HTTP_PORT='abc'" in report.row("settings")["evidence"]


def test_kubeconfig_that_does_not_exist_fails(tmp_path: Path) -> None:
    report = Report(tmp_path, KUBECONFIG=str(tmp_path / "absent"))
    assert (report.status, report.failures()) == (1, ["Kubernetes"])


def test_running_graph_is_reported_and_its_logs_are_in_the_bundle(tmp_path: Path) -> None:
    port = free_port()
    group = ProcessGroup(tmp_path)
    group.start(
        "serve",
        [*DYNAMO, "serve", "--http-port", str(port), "--engine", "mocker"],
        {"TMPDIR": str(tmp_path), "DYN_FILE_KV": "", "DYN_API_KEY": "secret-key-1"},
    )
    try:
        group.wait_until(lambda: "Press Ctrl-C" in group.logs(), "the graph did not start")
        bundle = tmp_path / "bug.tar.gz"
        report = Report(
            tmp_path, "--bundle", str(bundle), DYN_HTTP_PORT=str(port), DYN_API_KEY="secret-key-1", DYN_FILE_KV=""
        )
    finally:
        group.stop()
    assert report.failures() == []
    assert report.row("frontend")["status"] == "PASS"
    assert report.row(f"port {port}")["evidence"].startswith("in use by a Dynamo frontend")
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
        texts = b"".join(file.read() for name in names if (file := archive.extractfile(name)))
    assert {"bug/report.json", "bug/health.json", "bug/metrics.txt", "bug/environment.json"} <= set(names)
    assert b"secret-key-1" not in texts


WRONG_CLOCK = "import time\nright = time.time\ntime.time = lambda: right() + 600\n"


def test_frontend_whose_clock_is_wrong_and_a_process_of_another_release_are_named(tmp_path: Path) -> None:
    """The frontend is a real one whose `time.time` is ten minutes ahead; the worker's environment is that of 1.6.0."""
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(WRONG_CLOCK)
    other = tmp_path / "other"
    (other / "lib" / "python3.11" / "site-packages" / "ai_dynamo-1.6.0.dist-info").mkdir(parents=True)
    (other / "bin").mkdir()
    (other / "bin" / "python").symlink_to(sys.executable)
    group = ProcessGroup(tmp_path)
    port = free_port()
    address = ["--http-host", "127.0.0.1", "--http-port", str(port)]
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "ahead"), *sys.path])}
    group.start("frontend", [sys.executable, "-m", "dynamo.frontend", *address], paths)
    worker = [str(other / "bin" / "python"), "-m", "dynamo.mocker", "--model-path", str(MODEL)]
    group.start("worker", worker, {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        group.wait_until(lambda: list((tmp_path / "kv").glob("v1/mdc/*")), "the worker did not register")
        group.wait_until(lambda: is_listening(port), "the frontend did not start")
        report = Report(tmp_path, DYN_HTTP_PORT=str(port))
    finally:
        group.stop()
    assert report.failures() == ["clock"]
    assert report.status == 1
    assert re.search(r"is (599|60\d)\.\d s ahead", report.row("clock")["evidence"])
    assert report.row("versions")["status"] == "WARN"
    assert "ai-dynamo 1.6.0" in report.row("versions")["evidence"]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
