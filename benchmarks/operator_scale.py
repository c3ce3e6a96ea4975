"""Operator at scale: many graphs until all are ready, compared with a kopf prototype that makes the same objects.

    python -m benchmarks.operator_scale [--graphs 150] [--many 500]

A graph has three components (frontend, prefill, decode) of one pod each: one account with role and binding, and for each
component a DynamoComponentDeployment, a Deployment and a Service, 12 objects in all. Each contender has an API server of
its own: the released one with its controllers where KUBEBUILDER_ASSETS names it, else that of the tests. Printed are the
seconds until every graph is ready, and the processor time and the memory of the operator's process; then the writes of ten
seconds at rest, and for ours the memory with `--many` graphs.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.cluster.kubernetes.released import ReleasedKubernetes, released_assets
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import AnyKubernetes, administrator, install_definitions
from tests.cluster.processes import stop_process, wait_until

from benchmarks.corpus import ROOT, cache_dir
from benchmarks.ports import free_port
from benchmarks.report import OURS, guarded, number, print_line, ratio, table, write_result
from benchmarks.stacks import StackFailed
from dynamo.core.config import environ, exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

KOPF = "kopf"
PACKAGES = ("kopf==1.45.2", "cryptography", "httptools", "msgspec", "pyyaml")
INSTALL_S = 900.0
READY_S, POLL_S, REST_S = 900.0, 0.5, 10.0
SETTLE_S = 3.0
PAGES = "/apis/{}/namespaces/default/{}"
GRAPHS = PAGES.format("nvidia.com/v1beta1", "dynamographdeployments")
WRITTEN = (
    GRAPHS, PAGES.format("nvidia.com/v1beta1", "dynamocomponentdeployments"), PAGES.format("apps/v1", "deployments"),
    "/api/v1/namespaces/default/services", "/api/v1/namespaces/default/events",
)  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorBench:
    """Operator with many graphs."""

    graphs: int = option(150, "--graphs", None, "Number of graphs for the comparison")
    many: int = option(500, "--many", None, "Number of graphs whose memory is measured for ours; 0: skip")

    def __post_init__(self) -> None:
        if self.graphs < 1:
            raise ConfigError(f"--graphs {self.graphs}: must be at least 1")


def graph(number: int) -> dict[str, Any]:
    """Return a graph of three components."""
    components = [
        {
            "name": name,
            "type": name,
            "replicas": 1,
            "podTemplate": {"spec": {"containers": [{"name": "main", "image": "image:1", "args": ["--model", "m"]}]}},
        }
        for name in ("frontend", "prefill", "decode")
    ]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": f"g{number}"},
        "spec": {"components": components},
    }


def ensure_kopf() -> str:
    """Return the interpreter of the environment with kopf, which is made first if need be."""
    home = os.path.join(cache_dir(), "kopf", "venv")
    python = os.path.join(home, "bin", "python")
    stamp = os.path.join(home, "packages")
    if not os.path.exists(stamp) or Path(stamp).read_text(encoding="utf-8").split() != list(PACKAGES):
        print_line(f"installing {PACKAGES[0]} into {home} (once)")
        venv.create(home, with_pip=True, symlinks=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=INSTALL_S)
        Path(stamp).write_text("\n".join(PACKAGES), encoding="utf-8")
    return python


def commands() -> dict[str, list[str]]:
    """Return the command of each contender."""
    port = free_port()
    ours = [sys.executable, "-m", "dynamo.operator", "--no-leader-elect", "--no-webhooks", "--port", str(port)]
    prototype = os.path.join(ROOT, "benchmarks", "operator_kopf.py")
    return {OURS: ours, KOPF: [ensure_kopf(), "-m", "kopf", "run", "-A", "--standalone", "-q", prototype]}


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[AnyKubernetes]:
    """Run an API server with controllers and the resource definitions."""
    assets = released_assets()
    with ReleasedKubernetes(folder, assets, controllers=True) if assets else KubernetesServer(folder) as server:
        install_definitions(server)
        yield server


@contextlib.contextmanager
def running(command: Sequence[str], server: AnyKubernetes, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run an operator and yield its process."""
    paths = f"{ROOT}/src:{ROOT}"
    variables = {**environ(), "KUBECONFIG": str(server.kubeconfig), "PYTHONPATH": paths}
    with open(folder / "operator.log", "wb") as log:
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        stop_process(process)


def cpu_s(pid: int) -> float:
    """Return user and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    """Return the largest resident size of a process so far, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def ready_graphs(api: httpx.Client) -> int:
    """Return the number of graphs that are ready."""
    items = api.get(GRAPHS).json()["items"]
    return sum((one.get("status") or {}).get("state") == "successful" for one in items)


def versions(api: httpx.Client) -> dict[str, str]:
    """Return the version of every object that an operator writes."""
    found = {}
    for path in WRITTEN:
        for one in api.get(path).json()["items"]:
            found[f"{path}/{one['metadata']['name']}"] = one["metadata"]["resourceVersion"]
    return found


def measure(name: str, command: Sequence[str], graphs: int) -> dict[str, float]:
    """Return the figures of one contender."""
    with tempfile.TemporaryDirectory(prefix="operator-") as place:
        folder = Path(place)
        with api_server(folder) as server, administrator(server) as api, running(command, server, folder) as process:
            time.sleep(SETTLE_S)
            if process.poll() is not None:
                last = (folder / "operator.log").read_text(encoding="utf-8").strip().rpartition("\n")[2]
                raise StackFailed(f"{name} ended with status {process.returncode}: {last}")
            pid = process.pid
            before, began = cpu_s(pid), time.monotonic()
            for index in range(graphs):
                api.post(GRAPHS, json=graph(index)).raise_for_status()
            wait_until(lambda: _poll(api, name, graphs) == graphs, f"{name}: not all graphs are ready", READY_S)
            seconds, used = time.monotonic() - began, cpu_s(pid) - before
            time.sleep(SETTLE_S)
            at_rest, spent = versions(api), cpu_s(pid)
            time.sleep(REST_S)
            writes = sum(one != at_rest.get(key) for key, one in versions(api).items())
            rest = (cpu_s(pid) - spent) / REST_S * 100
            return {
                "seconds": seconds, "cpu_s": used, "memory_mb": memory_mb(pid), "writes_at_rest": writes,
                "cpu_percent_at_rest": rest,
            }  # fmt: skip


def _poll(api: httpx.Client, name: str, graphs: int) -> int:
    """Return the number of ready graphs after a pause, and print it."""
    time.sleep(POLL_S)
    ready = ready_graphs(api)
    print_line(f"{name}: {ready} of {graphs} graphs are ready")
    return ready


def rows(found: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return one line for each figure: ours, kopf, and their ratio."""
    titles = {
        "seconds": "seconds until all graphs are ready",
        "cpu_s": "processor seconds of the operator",
        "memory_mb": "memory, MB",
        "writes_at_rest": "objects written in 10 s at rest",
        "cpu_percent_at_rest": "percent of a core at rest",
    }
    mine, other = found[OURS], found[KOPF]
    return [
        [title, number(mine[key]), number(other[key]), ratio(mine[key], other[key])] for key, title in titles.items()
    ]


def run(config: OperatorBench) -> int:
    """Measure both, and print and write what was found."""
    is_released = released_assets() is not None
    found: dict[str, Any] = {name: measure(name, one, config.graphs) for name, one in commands().items()}
    print_line(table([f"{config.graphs} graphs", OURS, KOPF, "ours / kopf"], rows(found)))
    if config.many:
        found["many"] = measure(OURS, commands()[OURS], config.many)
        print_line(f"{config.many} graphs, ours: {json.dumps(found['many'])}")
    result = {
        "graphs": config.graphs, "many": config.many, "kopf": PACKAGES[0],
        "server": "kube-apiserver" if is_released else "tests.cluster.kubernetes", "figures": found,
    }  # fmt: skip
    print_line(f"written to {write_result('operator_scale', result, is_whole=config == OperatorBench())}")
    return 0


def main() -> int:
    """Run the program."""
    config = load(OperatorBench, sys.argv[1:], prog="python -m benchmarks.operator_scale")
    return guarded(lambda: run(config))


if __name__ == "__main__":
    exit_on_config_error(main)
