"""Global planner process: two namespaces under one band of GPUs, with virtual environments."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.processes import ProcessGroup

from dynamo.llm.virtual_connector import VirtualConnectorClient
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import UnaryClient

pytestmark = pytest.mark.integration
FLAGS = ["--environment", "virtual", "--managed-namespaces", "a", "b", "--max-total-gpus", "8", "--prefill-gpus", "2"]


def scale(namespace: str, **targets: int) -> dict[str, Any]:
    return {
        "caller_namespace": namespace,
        "graph_deployment_name": namespace,
        "k8s_namespace": "default",
        "target_replicas": [{"sub_component_type": role, "desired_replicas": n} for role, n in targets.items()],
    }


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DistributedRuntime]:
    group = ProcessGroup(tmp_path)
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "kv"))
    group.start("global", [sys.executable, "-m", "dynamo.global_planner", *FLAGS], {"DYN_NAMESPACE": "g"})
    made = DistributedRuntime.from_options(RuntimeOptions())
    try:
        await made.connect()
        yield made
    finally:
        await made.shutdown(drain_timeout_s=0.0)
        group.stop()


async def test_two_namespaces_share_a_band_of_gpus(runtime: DistributedRuntime) -> None:
    client = await runtime.endpoint("g.GlobalPlanner.scale_request").client()
    await client.wait_for_instances()

    async def send(request: dict[str, Any]) -> tuple[str, str]:
        response = await UnaryClient(client).complete(request)
        return response["status"], response["message"]

    async def carry_out(namespace: str) -> tuple[int, int]:
        environment = VirtualConnectorClient(runtime, namespace)
        decision = await environment.get()
        await environment.complete(decision)
        return decision.num_prefill_workers, decision.num_decode_workers

    assert await send(scale("a", prefill=2, decode=2)) == ("success", "Scaled a successfully")
    assert await carry_out("a") == (2, 2)
    status, message = await send(scale("b", decode=4))
    assert (status, "total 10 exceeds ceiling (8)" in message) == ("rejected", True)
    assert (await send(scale("a", prefill=1)))[0] == "success"
    assert (await carry_out("a"), await carry_out("b")) == ((1, 2), (-1, 4))
    assert await send(scale("c", decode=1)) == ("error", "Namespace c not authorized")
    health = await runtime.endpoint("g.GlobalPlanner.health").client()
    await health.wait_for_instances()
    assert (await UnaryClient(health).complete({"text": "ping"}))["managed_namespaces"] == ["a", "b"]
