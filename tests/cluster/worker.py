"""A worker process with an open system port, whose metrics and routes a test reads."""

from pathlib import Path
from typing import Any

import httpx
from benchmarks.ports import free_port
from tests.cluster.cluster import MODEL, Cluster


class WorkerProcess:
    """A mocker or CPU worker of the model `m`, listed by its frontend once it is constructed."""

    def __init__(self, cluster: Cluster, *argv: str, module: str = "mocker", **variables: str) -> None:
        before, port = cluster.workers(), free_port()
        self.log = cluster.folder / f"{module}{len(cluster.processes)}.log"
        known = set(records(cluster))
        system = {"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}
        self.process = cluster.run(module, "--model-name", MODEL, *argv, **system, **variables)
        cluster.wait_until(lambda: cluster.workers() > before, f"the worker never appeared: {self.log}")
        (self.record,) = set(records(cluster)) - known
        self._http, self._system = cluster.http, f"http://127.0.0.1:{port}"

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port that the request plane listens on."""
        host, _, port = self.record.read_text().partition('"tcp":"')[2].partition("/")[0].rpartition(":")
        return host, int(port)

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Send a request to the system port."""
        return self._http.request(method, f"{self._system}{path}", json=body)

    def metric(self, name: str) -> float:
        """Return the sum of the series of exactly that name, whatever their labels."""
        lines = self.request("GET", "/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    @property
    def inflight(self) -> float:
        """Return the number of requests that the request plane has not finished."""
        return self.metric("dynamo_component_inflight_requests")

    @property
    def is_idle(self) -> bool:
        """Return whether neither the request plane nor the engine has a request."""
        return self.inflight == 0 == self.metric("vllm:num_requests_running")


def records(cluster: Cluster) -> list[Path]:
    """Return the discovery records of the cluster's generate endpoints."""
    folder = cluster.folder / "kv" / "v1" / "instances"
    return list(folder.glob("*generate*")) if folder.exists() else []
