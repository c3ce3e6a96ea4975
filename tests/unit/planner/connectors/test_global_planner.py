"""Global-planner connector: forwarded requests, and the outcome of each response."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.planner.connectors.test_workers import record, register

from dynamo.core.clock import ManualClock
from dynamo.core.errors import Unknown
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.base import ScaleStatus
from dynamo.planner.connectors.global_planner import GlobalPlannerConnector
from dynamo.protocols.planner import ScalingDecision
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import serve_unary_endpoint

CONFIG = parse({"namespace": "ns", "environment": "global-planner", "global_planner_namespace": "global"})


class ScriptedPlanner:
    """Global planner that gives one response to all requests."""

    def __init__(self) -> None:
        self.reply: Any = {"status": "success", "message": "done", "current_replicas": {}}
        self.requests: list[Any] = []

    async def handle(self, request: Any, *, context: object) -> Any:
        self.requests.append(request)
        return self.reply


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    yield runtime
    await runtime.shutdown()


@pytest.fixture
async def planner(runtime: DistributedRuntime) -> AsyncIterator[ScriptedPlanner]:
    planner = ScriptedPlanner()
    endpoint = runtime.endpoint("global.GlobalPlanner.scale_request")
    serving = asyncio.ensure_future(serve_unary_endpoint(endpoint, planner.handle))
    await turns()
    yield planner
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def connector_of(runtime: DistributedRuntime) -> GlobalPlannerConnector:
    connector = GlobalPlannerConnector(runtime, CONFIG, clock=ManualClock(wall=7.0))
    await connector.start()
    return connector


async def test_request_names_the_deployment_and_only_the_roles_that_change(
    runtime: DistributedRuntime, planner: ScriptedPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAME", "graph")
    monkeypatch.setenv("POD_NAMESPACE", "pods")
    connector = await connector_of(runtime)
    outcome = await connector.scale(ScalingDecision(num_decode=3))
    await connector.close()
    assert (outcome.status, outcome.message) == (ScaleStatus.ACCEPTED, "global planner: success: done")
    assert planner.requests == [
        {
            "caller_namespace": "ns",
            "graph_deployment_name": "graph",
            "k8s_namespace": "pods",
            "target_replicas": [{"sub_component_type": "decode", "desired_replicas": 3, "component_name": None}],
            "blocking": False,
            "timestamp": 7.0,
            "predicted_load": None,
        }
    ]


@pytest.mark.parametrize(
    ("status", "expected"),
    [("scaling", ScaleStatus.ACCEPTED), ("rejected", ScaleStatus.HELD), ("error", ScaleStatus.FAILED)],
)
async def test_each_response_status_has_a_scale_outcome(
    runtime: DistributedRuntime, planner: ScriptedPlanner, status: str, expected: ScaleStatus
) -> None:
    planner.reply = {"status": status}
    connector = await connector_of(runtime)
    outcome = await connector.scale(ScalingDecision(num_decode=3))
    assert (outcome.status, outcome.message) == (expected, f"global planner: {status}")
    is_expected = (await connector.counts()).expected_num_decode == 3
    await connector.close()
    assert is_expected == (expected is ScaleStatus.ACCEPTED)


async def test_reached_number_is_no_longer_expected_when_a_worker_ends(
    runtime: DistributedRuntime, planner: ScriptedPlanner
) -> None:
    assert isinstance(runtime.discovery, MemoryDiscovery)
    connector = await connector_of(runtime)
    await connector.scale(ScalingDecision(num_decode=1))
    assert (await connector.counts()).expected_num_decode == 1
    await register(runtime.discovery, record(1))
    assert (await connector.counts()).ready_num_decode == 1
    await runtime.discovery.delete("v1/instances", "ns/decode/generate/1")
    assert (await connector.counts()).expected_num_decode == 0
    await connector.close()


async def test_malformed_response_is_an_error(runtime: DistributedRuntime, planner: ScriptedPlanner) -> None:
    planner.reply = {"status": "later"}
    connector = await connector_of(runtime)
    with pytest.raises(Unknown, match="malformed response of the global planner"):
        await connector.scale(ScalingDecision(num_decode=3))
    await connector.close()


async def test_request_before_the_start_is_an_error(runtime: DistributedRuntime) -> None:
    with pytest.raises(Unknown, match="not started"):
        await GlobalPlannerConnector(runtime, CONFIG).scale(ScalingDecision(num_decode=3))
