"""A frontend, mocker workers, a supervisor and a planner, each of either implementation, as processes under load."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.corpus import bench_model
from benchmarks.planner_peer import planner_home, planner_python
from benchmarks.ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.etcd import EtcdCluster
from tests.cluster.peers import OURS, PeerCluster, require_peer

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")
MODEL = "bench"
NAMESPACE = "dynamo"
CHATS = 40
"""Requests in progress under load: more than one worker has sequence slots and blocks for."""
WORKER_FLAGS = ("--num-gpu-blocks-override", "128", "--block-size", "16", "--max-num-seqs", "8", "--speedup-ratio", "1")
PLAN = {
    "environment": "virtual",
    "mode": "agg",
    "backend": "mocker",
    "namespace": NAMESPACE,
    "model_name": MODEL,
    "optimization_target": "load",
    "load_adjustment_interval_seconds": 1,
    "decode_scale_up_kv_rate": 60,
    "decode_scale_down_kv_rate": 10,
    "prefill_scale_up_queue_tokens": 2000,
    "prefill_scale_down_queue_tokens": 100,
    "pre_deployment_sweeping_mode": "none",
    "max_gpu_budget": 3,
    "decode_engine_num_gpu": 1,
    "prefill_engine_num_gpu": 1,
    "control_api_port": 0,
    "live_dashboard_port": 0,
    "report_interval_hours": None,
}
STEP_S = 45.0


def require_planner_peer() -> str:
    """Return the Python of the released planner; skip the test where it is not installed."""
    require_peer()
    if not os.path.exists(os.path.join(planner_home(), "ready")):
        pytest.skip(f"the released planner is not installed in {planner_home()}: python -m benchmarks.planner_peer")
    return planner_python()


@dataclass
class LoadResult:
    """Statuses of the requests so far."""

    statuses: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class LiveDeployment(PeerCluster):
    """A planned deployment: `frontend`, `workers`, `supervisor` and `planner` are `ours` or `theirs`.

    All are in etcd, because the released virtual connector works nowhere else.
    """

    def __init__(
        self,
        folder: Path,
        etcd: EtcdCluster,
        *,
        frontend: str,
        workers: str,
        supervisor: str,
        planner: str,
        **settings: Any,
    ) -> None:
        registry = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.endpoints, "ETCD_LEASE_TTL": "5"}
        super().__init__(folder, "--migration-limit", "3", frontends=(frontend,), variables=registry)
        self.port = self.ports[frontend]
        self.metrics_port = free_port()
        self.reasons: list[str] = []
        """The load scaling decisions of the planner, each change once."""
        self.advised: list[str] = []
        """Those of the advisory planner."""
        self._advisory_port = 0
        command = [*self._python(workers), "-m", "dynamo.mocker", "--model-path", bench_model(), "--model-name", MODEL]
        script = str(HERE / "virtual_supervisor.py")
        self._start("supervisor", supervisor, [script, NAMESPACE, *command, *WORKER_FLAGS])
        plan = PLAN | {"metric_reporting_prometheus_port": self.metrics_port} | settings
        if planner == OURS:
            self._start("planner", OURS, ["-m", "dynamo.planner", "--config", json.dumps(plan)])
        else:
            program = [require_planner_peer(), str(HERE / "peer_planner_process.py"), "--config", json.dumps(plan)]
            self.start("planner", program, cwd=folder)

    def advise(self, whose: str) -> None:
        """Start an advisory planner with the settings of the other one."""
        self._advisory_port = free_port()
        plan = PLAN | {"metric_reporting_prometheus_port": self._advisory_port, "advisory": True}
        self._start("advisory", whose, ["-m", "dynamo.planner", "--config", json.dumps(plan)])

    def start_frontend(self, name: str, *flags: str) -> int:
        """Start a frontend and return its port."""
        port = free_port()
        listen = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        self._start("frontend", name, ["-m", "dynamo.frontend", *listen, *flags])
        return port

    def _start(self, name: str, whose: str, command: list[str]) -> None:
        self.start(name, [*self._python(whose), *command], cwd=self.folder)

    @staticmethod
    def _python(whose: str) -> list[str]:
        """Return the command of an interpreter; a supervisor of one implementation starts workers of the other."""
        return (
            ["env", f"PYTHONPATH={SOURCE}", sys.executable]
            if whose == OURS
            else ["env", "-u", "PYTHONPATH", require_peer()]
        )

    def carried_out(self) -> list[int]:
        """Return the number of workers after each decision."""
        lines = (self.folder / "supervisor.log").read_text(errors="replace").splitlines()
        return [json.loads(line)["workers"] for line in lines if line.startswith('{"carried_out"')]

    def note_reason(self) -> None:
        """Add the present load scaling decisions to `reasons` and `advised` if they have changed."""
        self._note(self.metrics_port, self.reasons)
        if self._advisory_port:
            self._note(self._advisory_port, self.advised)

    @staticmethod
    def _note(port: int, reasons: list[str]) -> None:
        try:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5.0).text
        except httpx.TransportError:
            return
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "dynamo_planner_load_scaling_decision" and sample.value == 1:
                    reason = sample.labels["dynamo_planner_load_scaling_decision"]
                    if reasons[-1:] != [reason]:
                        reasons.append(reason)

    async def until(self, condition: Callable[[], object], message: str) -> None:
        """Poll, noting the planner's reasons, until the condition is true."""
        try:
            async with asyncio.timeout(STEP_S):
                while not condition():
                    await asyncio.to_thread(self.note_reason)
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{message}; reasons {self.reasons}\n{self.logs()}") from None

    async def load(self, enough: asyncio.Event, found: LoadResult) -> None:
        """Keep `CHATS` chats in progress until the event."""

        async def chats(client: httpx.AsyncClient, number: int) -> None:
            turn = 0
            while not enough.is_set():
                turn += 1
                words = f"{number} {turn} " + "word " * 120
                body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 40}
                answer = await client.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body)
                found.statuses.append(answer.status_code)
                if answer.status_code != 200:
                    found.failures.append(answer.text[:200])

        async with httpx.AsyncClient(timeout=STEP_S) as client:
            await asyncio.gather(*(chats(client, number) for number in range(CHATS)))

    async def under_load(self, work: Callable[[], Awaitable[None]]) -> LoadResult:
        """Do some work under load; return the statuses of the requests."""
        enough, found = asyncio.Event(), LoadResult()
        loading = asyncio.create_task(self.load(enough, found))
        try:
            await work()
        finally:
            enough.set()
            await loading
        return found
