"""The first performance data: the released planner reads it from a worker of this runtime, and ours from a released one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner_peer import planner_home, planner_python
from benchmarks.stacks import stack_environment
from tests.cluster.peers import require_peer
from tests.cluster.processes import ProcessGroup
from tests.unit.planner.connectors.test_workers import record

from dynamo.core.config import load
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.workers import LiveWorkers
from dynamo.planner.worker_benchmarks import measured_steps
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.run_service import open_runtime

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
SCRIPT = str(HERE / "peer_perf_metrics.py")
SOURCE = str(HERE.parents[1] / "src")


def result(kind: str, wall_s: float, **load: int) -> dict[str, Any]:
    """Return a measured point, with a heartbeat that readers omit."""
    step = {
        "version": 1,
        "worker_id": "w",
        "dp_rank": 0,
        "counter_id": 1,
        "wall_time": wall_s,
        "scheduled_requests": load,
    }
    return {"point": {"point_type": kind, "isl": 100}, "fpms": [step, {**step, "wall_time": 0.0}]}


BENCHMARK = {
    "status": "valid",
    "results": [
        result("prefill", 0.02, num_prefill_requests=1, sum_prefill_tokens=300),
        result("decode", 0.01, num_decode_requests=4, sum_decode_kv_tokens=2000),
        result("decode", 0.03, num_decode_requests=16, sum_decode_kv_tokens=9000),
    ],
}
DECODE_ROWS = [[0.01, 0, 0, 4, 2000], [0.03, 0, 0, 16, 9000]]


class Workers(ProcessGroup):
    """Workers that serve a benchmark result, and the released planner's bootstrap."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "discovery").mkdir()
        (folder / "benchmark.json").write_text(json.dumps(BENCHMARK))

    def environment(self) -> dict[str, str]:
        return stack_environment(str(self.folder), dict(os.environ))

    def serve(self, python: str, component: str) -> None:
        variables = {"PYTHONPATH": SOURCE} if python == sys.executable else {}
        self.start(component, [python, SCRIPT, "serve", component, str(self.folder / "benchmark.json")], variables)

    def fetched(self, role: str) -> list[Any]:
        """Return the points that the released planner's bootstrap reads from the component `backend` of the namespace
        `ns`.
        """
        done = subprocess.run(
            [planner_python(), SCRIPT, "fetch", "ns", "backend", role],
            env=self.environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        lines = [line.removeprefix("steps ") for line in done.stdout.splitlines() if line.startswith("steps ")]
        assert lines, done.stderr[-2000:] + self.logs()
        return list(json.loads(lines[0]))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    require_peer()
    if not os.path.exists(os.path.join(planner_home(), "ready")):
        pytest.skip(f"the released planner is not installed in {planner_home()}: python -m benchmarks.planner_peer")
    made = Workers(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def test_released_planner_reads_the_benchmark_of_a_worker_of_this_runtime(workers: Workers) -> None:
    workers.serve(sys.executable, "ns.backend")
    assert workers.fetched("decode") == DECODE_ROWS
    assert workers.fetched("prefill") == [[0.02, 1, 300, 0, 0]]


async def test_this_planner_reads_the_benchmark_of_a_released_worker(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.serve(require_peer(), "ns.decode")
    for name, value in workers.environment().items():
        monkeypatch.setenv(name, value)
    config = parse({"namespace": "ns", "optimization_target": "sla", "mode": "decode"})
    async with open_runtime(load(RuntimeOptions, [])) as runtime:
        found = await measured_steps(runtime, config, LiveWorkers(prefill={}, decode={2: record(2)}), wait_s=30.0)
    rows = [
        [
            one.wall_time,
            one.scheduled_requests.num_prefill_requests,
            one.scheduled_requests.sum_prefill_tokens,
            one.scheduled_requests.num_decode_requests,
            one.scheduled_requests.sum_decode_kv_tokens,
        ]
        for one in found[EngineRole.DECODE]
    ]
    assert rows == DECODE_ROWS
