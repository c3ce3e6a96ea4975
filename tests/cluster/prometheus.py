"""A real Prometheus server that scrapes targets of a test, with a generated configuration."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import ProcessGroup, stop_process, wait_until

SCRAPE_INTERVAL_S = 1
requires_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no `prometheus` binary; on Debian: apt-get install prometheus"
)


class PrometheusServer:
    """A server on a loopback port, a process of the group; `targets` are `host:port` of `/metrics`.

    The configuration adds the label by which the planner selects frontends; on Kubernetes, the operator's monitors do.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *targets: str,
        namespace: str | None = "dynamo",
        jobs: Mapping[str, Sequence[str]] | None = None,
        rules: str | None = None,
    ) -> None:
        """`jobs`: targets of further jobs, without a label; `rules`: content of a file of rules."""
        self._group = group
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.Client(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0))
        self._file: Path = group.folder / "prometheus.json"
        labels = {} if namespace is None else {"dynamo_namespace": namespace}
        scraped = [{"job_name": "targets", "static_configs": [{"targets": list(targets), "labels": labels}]}]
        scraped += [{"job_name": job, "static_configs": [{"targets": list(one)}]} for job, one in (jobs or {}).items()]
        interval = f"{SCRAPE_INTERVAL_S}s"
        common = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
        configuration: dict[str, Any] = {"global": common, "scrape_configs": scraped}
        if rules is not None:
            (group.folder / "rules.yml").write_text(rules)
            configuration["rule_files"] = ["rules.yml"]
        self._file.write_text(json.dumps(configuration))  # JSON is YAML.
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and return when it accepts queries."""
        self._process = self._group.start(
            "prometheus",
            [
                "prometheus", f"--config.file={self._file}", f"--storage.tsdb.path={self._file.parent / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn",
            ],
        )  # fmt: skip
        self._group.wait_until(self._is_ready, "Prometheus did not start")

    def stop(self) -> None:
        """Stop the server; its address refuses connections then."""
        assert self._process is not None
        self._process.terminate()
        stop_process(self._process)

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        answer = self._http.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return list(answer["data"]["result"])

    def value(self, query: str) -> float | None:
        """Return the sum of an instant query; None without a series."""
        rows = self.query(query)
        return sum(float(row["value"][1]) for row in rows) if rows else None

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """Return the alerts of that name which are firing."""
        found = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        return [one for one in found if one["labels"]["alertname"] == name and one["state"] == "firing"]

    def firing(self) -> set[str]:
        """Return the names of all alerts which are firing."""
        found = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}

    def wait_value(self, query: str, minimum: float) -> None:
        """Return when an instant query has at least this value."""
        wait_until(lambda: (self.value(query) or 0.0) >= minimum, f"{query} did not reach {minimum}")

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False
