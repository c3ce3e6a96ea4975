"""Global-planner connector: what is sent, and what each response means."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster

from dynamo.core.clock import ManualClock
from dynamo.core.errors import Unknown
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.base import ScaleStatus
from dynamo.planner.connectors.global_planner import GlobalPlannerConnector
from dynamo.protocols.planner import ScalingDecision
from dynamo.runtime.streams import GeneratorHandler

CONFIG = {"environment": "global-planner", "global_planner_namespace": "g", "namespace": "n", "mode": "agg"}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("success", ScaleStatus.ACCEPTED),
        ("scaling", ScaleStatus.ACCEPTED),
        ("rejected", ScaleStatus.HELD),
        ("error", ScaleStatus.FAILED),
    ],
)
async def test_response_of_the_global_planner_becomes_an_outcome(status: str, expected: ScaleStatus) -> None:
    requests: list[Any] = []

    async def scale(request: Any) -> AsyncIterator[Any]:
        requests.append(request)
        yield {"status": status, "message": "GPU budget", "current_replicas": {}}

    cluster = MemoryCluster()
    server, runtime = cluster.runtime(), cluster.runtime()
    await server.endpoint("g.GlobalPlanner.scale_request").serve(GeneratorHandler(scale, server.tasks))
    connector = GlobalPlannerConnector(runtime, parse(CONFIG), clock=ManualClock(wall=5.0))
    await connector.start()
    outcome = await connector.scale(ScalingDecision(num_decode=4))
    assert (outcome.status, outcome.message) == (expected, f"global planner: {status}: GPU budget")
    assert requests[0]["caller_namespace"] == "n"
    assert requests[0]["timestamp"] == 5.0
    (target,) = requests[0]["target_replicas"]
    assert (target["sub_component_type"], target["desired_replicas"]) == ("decode", 4)
    counts = await connector.counts()
    assert counts.expected_num_decode == (4 if expected is ScaleStatus.ACCEPTED else 0)
    await connector.close()
    await cluster.shutdown()


async def test_malformed_response_is_an_error() -> None:
    async def scale(request: Any) -> AsyncIterator[Any]:
        yield {"status": "perhaps"}

    cluster = MemoryCluster()
    server, runtime = cluster.runtime(), cluster.runtime()
    await server.endpoint("g.GlobalPlanner.scale_request").serve(GeneratorHandler(scale, server.tasks))
    connector = GlobalPlannerConnector(runtime, parse(CONFIG), clock=ManualClock())
    with pytest.raises(Unknown, match="not started"):
        await connector.scale(ScalingDecision(num_decode=4))
    await connector.start()
    with pytest.raises(Unknown, match="malformed response"):
        await connector.scale(ScalingDecision(num_decode=4))
    await connector.close()
    await cluster.shutdown()
