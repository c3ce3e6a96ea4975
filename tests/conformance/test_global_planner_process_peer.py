"""The global planner as a process: the released client gets the same responses from the released one and from ours."""

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

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")
FLAGS = ["--no-operation", "--managed-namespaces", "a", "b", "--max-total-gpus", "8"]


class GlobalPlanners(ProcessGroup):
    """The released global planner in the namespace `released`, and ours in `ours`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "discovery").mkdir()
        script = str(HERE / "peer_global_planner.py")
        self.start("released", [planner_python(), script, *FLAGS], {"DYN_NAMESPACE": "released"})
        self.start(
            "ours",
            [sys.executable, "-m", "dynamo.global_planner", *FLAGS],
            {"DYN_NAMESPACE": "ours", "PYTHONPATH": SOURCE},
        )

    def environment(self) -> dict[str, str]:
        return stack_environment(str(self.folder), dict(os.environ))

    def send(self, endpoint: str, requests: list[Any]) -> list[Any]:
        """Return the responses that the released client receives."""
        lines = "".join(json.dumps({"do": "ask", "request": one}) + "\n" for one in requests)
        done = subprocess.run(
            [require_peer(), str(HERE / "peer_client.py"), endpoint],
            input=lines, env=self.environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        found = [json.loads(line.removeprefix("answer ")) for line in done.stdout.splitlines() if "answer " in line]
        assert len(found) == len(requests), done.stderr[-2000:]
        return found


@pytest.fixture
def planners(tmp_path: Path) -> Iterator[GlobalPlanners]:
    require_peer()
    if not os.path.exists(os.path.join(planner_home(), "ready")):
        pytest.skip(f"the released planner is not installed in {planner_home()}: python -m benchmarks.planner_peer")
    made = GlobalPlanners(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def scale(namespace: str, *targets: tuple[str, int]) -> dict[str, Any]:
    return {
        "caller_namespace": namespace,
        "graph_deployment_name": "graph",
        "k8s_namespace": "default",
        "target_replicas": [{"sub_component_type": role, "desired_replicas": n} for role, n in targets],
        "blocking": False,
        "timestamp": 1.0,
        "predicted_load": {"num_requests": 3},
    }


def test_both_global_planners_respond_equally(planners: GlobalPlanners) -> None:
    health = [{"text": "ping"}]

    def is_ready(name: str) -> bool:
        return planners.send(f"{name}.GlobalPlanner.health", health)[0]["error"] is None

    for name in ("released", "ours"):
        planners.wait_until(lambda name=name: is_ready(name), f"the {name} global planner did not start")
    requests = [scale("a", ("prefill", 2), ("decode", 3)), scale("b", ("decode", 100)), scale("c", ("decode", 1))]
    found = {name: planners.send(f"{name}.GlobalPlanner.scale_request", requests) for name in ("released", "ours")}
    assert found["ours"] == found["released"]
    assert [one["heard"][0]["status"] for one in found["ours"]] == ["success", "success", "error"]
    states = {name: planners.send(f"{name}.GlobalPlanner.health", health)[0]["heard"][0] for name in found}
    assert {**states["ours"], "namespace": "released"} == states["released"]
