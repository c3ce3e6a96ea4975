"""Scale requests of two namespaces to one global planner, with virtual deployments in memory."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster

from dynamo.core.clock import ManualClock
from dynamo.core.metrics import MetricsRegistry
from dynamo.global_planner.arbitration import GpuArbiter, ReplicaPools, TotalGpuBand
from dynamo.global_planner.executor import VirtualExecutor
from dynamo.global_planner.handler import NO_OPERATION, ScaleRequestHandler
from dynamo.llm.virtual_connector import VirtualConnectorClient
from dynamo.runtime.distributed import DistributedRuntime


def scale(namespace: str, **targets: int) -> dict[str, Any]:
    return {
        "caller_namespace": namespace,
        "graph_deployment_name": f"graph-{namespace}",
        "k8s_namespace": "default",
        "target_replicas": [{"sub_component_type": role, "desired_replicas": n} for role, n in targets.items()],
    }


class Harness:
    """One handler, and the environments of its deployments."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.clock = ManualClock()
        self.executor = VirtualExecutor(runtime, ["a", "b"], {"prefill": 2, "decode": 1})
        self.handler = self.made(self.executor)

    def made(self, executor: Any) -> ScaleRequestHandler:
        arbiter = GpuArbiter(TotalGpuBand(-1, 8), 60)
        return ScaleRequestHandler(arbiter, executor, ["a", "b"], self.runtime.metrics, clock=self.clock)

    async def send(self, request: Any) -> dict[str, Any]:
        (response,) = [one async for one in self.handler.scale_request(request)]
        return dict(response)

    async def carry_out(self, namespace: str) -> list[int]:
        client = VirtualConnectorClient(self.runtime, namespace)
        decision = await client.get()
        await client.complete(decision)
        return [decision.num_prefill_workers, decision.num_decode_workers]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    cluster = MemoryCluster()
    yield Harness(cluster.runtime())
    await cluster.shutdown()


async def test_request_is_published_to_the_environment_of_the_caller(harness: Harness) -> None:
    response = await harness.send(scale("a", prefill=2, decode=3))
    assert response == {
        "status": "success",
        "message": "Scaled graph-a successfully",
        "current_replicas": {"prefill": 2, "decode": 3},
    }
    assert await harness.carry_out("a") == [2, 3]


async def test_second_namespace_is_limited_to_the_remaining_gpus(harness: Harness) -> None:
    await harness.send(scale("a", decode=5))
    response = await harness.send(scale("b", decode=4))
    assert response["status"] == "rejected"
    assert "total 9 exceeds ceiling (8)" in response["message"]
    assert (await harness.send(scale("b", decode=3)))["status"] == "success"


async def test_rejected_scale_up_is_applied_with_a_later_scale_down(harness: Harness) -> None:
    await harness.send(scale("a", decode=5))
    await harness.carry_out("a")
    await harness.send(scale("b", decode=4))
    assert (await harness.send(scale("a", decode=3)))["status"] == "success"
    assert [await harness.carry_out(name) for name in "ab"] == [[-1, 3], [-1, 4]]


async def test_pending_decision_is_rejected_until_the_previous_one_is_complete(harness: Harness) -> None:
    await harness.send(scale("a", decode=2))
    assert (await harness.send(scale("a", decode=3)))["status"] == "rejected"
    await harness.carry_out("a")
    assert (await harness.send(scale("a", decode=3)))["status"] == "success"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (scale("c", decode=1), "Namespace c not authorized"),
        (scale("a"), "target_replicas cannot be empty"),
        (scale("a", decode=-1), "desired_replicas -1"),
        ({"caller_namespace": "a"}, "malformed scale request"),
        ("text", "malformed scale request"),
    ],
)
async def test_invalid_request_is_an_error_without_effect(harness: Harness, request_: Any, message: str) -> None:
    response = await harness.send(request_)
    assert response["status"] == "error"
    assert message in response["message"]
    assert await harness.carry_out("a") == [-1, -1]


async def test_no_operation_mode_returns_success_without_a_change(harness: Harness) -> None:
    harness.handler = ScaleRequestHandler(GpuArbiter(TotalGpuBand(), 60), None, [], MetricsRegistry())
    assert await harness.send(scale("a", decode=9)) == {
        "status": "success",
        "message": NO_OPERATION,
        "current_replicas": {},
    }


async def test_failing_registry_is_an_error_response(harness: Harness) -> None:
    async def observe() -> ReplicaPools:
        raise ConnectionError("registry unavailable")

    harness.executor.observe = observe  # type: ignore[method-assign]
    assert (await harness.send(scale("a", decode=1))) == {
        "status": "error",
        "message": "registry unavailable",
        "current_replicas": {},
    }
