"""Failures that users report, reproduced with real processes: one command leads to the cause of each."""

import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.cluster.etcd import EtcdCluster
from tests.cluster.processes import ProcessGroup
from tests.integration.ops.test_troubleshoot import PYTHON, WORKER, Findings, Frontend, group

from dynamo.ops.local_graph import local_processes, variables_of

pytestmark = pytest.mark.integration

__all__ = ["group"]


def complete(frontend: Frontend, prompt: str = "hello") -> int:
    """Return the status of one completion."""
    body = json.dumps({"model": "demo_model", "prompt": prompt, "max_tokens": 64}).encode()
    request = urllib.request.Request(f"{frontend.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def found(group: ProcessGroup, frontend: Frontend) -> Findings:
    return Findings(group.folder, "--url", frontend.url, "--logs", str(group.folder))


def model_records(folder: Path) -> list[Path]:
    return list((folder / "kv").glob("v1/mdc/*"))


def test_stopped_worker_is_named_and_a_killed_one_has_left_its_registration(group: ProcessGroup) -> None:
    frontend = Frontend(group)
    worker = group.start("worker", [*PYTHON, *WORKER])
    frontend.wait_listed()
    (record,) = model_records(group.folder)
    os.kill(worker.pid, signal.SIGSTOP)
    group.wait_until(lambda: not frontend.models(), "the model is still listed")
    stopped = found(group, frontend)
    worker.kill()
    worker.wait()
    os.utime(record, (record.stat().st_mtime - 60,) * 2)
    killed = found(group, frontend)
    assert (stopped.status, killed.status) == (1, 1)
    assert next(iter(stopped.found)) == "stopped-process"
    assert f"dynamo.mocker (pid {worker.pid}): stopped (state T)" in stopped.evidence("stopped-process")
    assert "stopped-process" not in killed.found
    assert f"{record.parent.name}/dynamo/backend/generate" in killed.evidence("worker-lost")
    assert list(killed.found)[-1] == "no-models", "the symptom follows its cause"


def test_frontend_of_another_namespace_names_that_of_the_workers(group: ProcessGroup) -> None:
    frontend = Frontend(group, DYN_NAMESPACE="prod")
    group.start("worker", [*PYTHON, *WORKER, "--endpoint", "dyn://dev.backend.generate"])
    group.wait_until(lambda: model_records(group.folder), "the worker did not register")
    findings = found(group, frontend)
    assert findings.status == 1
    assert "serves namespace prod; models are registered in dev" in findings.evidence("namespace-mismatch")


def test_router_without_events_and_requests_above_a_threshold_are_named(group: ProcessGroup) -> None:
    frontend = Frontend(group, DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD="1", DYN_ROUTER_MODE="kv")
    group.start("worker", [*PYTHON, *WORKER, "--no-enable-prefix-caching"])
    frontend.wait_listed()
    assert {complete(frontend) for _ in range(20)} == {200}
    statuses: list[int] = []

    def is_refused() -> bool:
        """Send requests at once until one meets another one in its prefill."""
        with ThreadPoolExecutor(8) as clients:
            statuses.extend(clients.map(lambda _: complete(frontend, "long " * 400), range(8)))
        return 529 in statuses

    group.wait_until(is_refused, "no request was refused")
    refused = statuses.count(529)
    findings = found(group, frontend)
    assert "no KV event applied" in findings.evidence("router-without-events")
    assert f"{refused} requests refused because all workers were above" in findings.evidence("requests-refused")


def test_open_files_that_run_out_are_named(group: ProcessGroup) -> None:
    limited = ["bash", "-c", 'ulimit -n 24; exec "$0" "$@"', *PYTHON, *WORKER]
    process = group.start("worker", limited)
    assert process.wait(60) != 0
    findings = Findings(group.folder, "--logs", str(group.folder))
    assert "open-files" in findings.found, group.logs()


def test_etcd_that_is_lost_while_a_graph_runs_is_named(group: ProcessGroup) -> None:
    with EtcdCluster(group.folder) as etcd:
        variables = {"ETCD_ENDPOINTS": etcd.wait().endpoints, "DYN_DISCOVERY_BACKEND": "etcd", "ETCD_LEASE_TTL": "2"}
        frontend = Frontend(group, **variables)
        group.start("worker", [*PYTHON, *WORKER], variables)
        frontend.wait_listed()
        before = found(group, frontend)
        etcd.members[0].kill()
        group.wait_until(lambda: "etcd" in (group.folder / "worker.log").read_text(), "the worker noticed nothing")
        findings = found(group, frontend)
    assert "etcd-down" not in before.found
    assert findings.status == 1
    assert "logs/worker.log" in findings.evidence("etcd-down")
    assert complete(frontend) == 200, "requests are served from the last view"


def test_decode_workers_without_prefill_workers_are_named(group: ProcessGroup) -> None:
    frontend = Frontend(group)
    group.start("worker", [*PYTHON, *WORKER, "--disaggregation-mode", "decode"])
    group.wait_until(lambda: model_records(group.folder), "the worker did not register")
    findings = found(group, frontend)
    assert findings.status == 1
    assert "decode workers only, no prefill worker" in findings.evidence("missing-peer-role")


def test_process_that_ends_again_and_again_reaches_the_limit_of_restarts(group: ProcessGroup) -> None:
    variables = {"TMPDIR": str(group.folder), "DYN_FILE_KV": ""}
    serve = [*PYTHON, "dynamo.cli", "serve", "--engine", "mocker", "--http-port", str(free_port())]
    graph = group.start("serve", serve, variables)
    group.wait_until(lambda: "Press Ctrl-C" in group.logs(), "the graph did not start")
    killed: set[int] = set()

    def kill_worker() -> bool:
        for process in local_processes():
            is_own = str(group.folder) in variables_of(process.pid).get("DYN_FILE_KV", "")
            if process.module == "dynamo.mocker" and is_own and process.pid not in killed:
                killed.add(process.pid)
                os.kill(process.pid, signal.SIGKILL)
        return graph.poll() is not None

    group.wait_until(kill_worker, "the graph did not end")
    findings = Findings(group.folder, "--logs", str(group.folder))
    assert (graph.returncode, findings.status) == (1, 1)
    assert re.search(r"worker-1 was killed by SIGKILL, the \dth time within", findings.evidence("restart-limit"))


def test_worker_of_another_release_is_named(group: ProcessGroup) -> None:
    frontend = Frontend(group)
    other = group.folder / "other"
    venv.create(other, symlinks=True)
    (packages,) = other.glob("lib/python3*/site-packages")
    (packages / "dynamo_serve-0.0.1.dist-info").mkdir()
    paths = [str(Path(one).resolve()) for one in sys.path if one]
    (packages / "release.pth").write_text("".join(f"import site; site.addsitedir({one!r})\n" for one in paths))
    group.start("worker", [str(other / "bin" / "python"), "-m", *WORKER])
    frontend.wait_listed()
    assert "release 0.0.1" in found(group, frontend).evidence("version-skew")
