"""Client of a global planner."""

import pytest
from tests.unit.planner.connectors.test_global_planner import ScriptedPlanner, planner, runtime

from dynamo.core.errors import Unknown
from dynamo.planner.connectors.clients.remote_client import RemotePlannerClient
from dynamo.planner.connectors.protocol import ScaleRequest, ScaleStatus, TargetReplica
from dynamo.runtime.distributed import DistributedRuntime

__all__ = ["planner", "runtime"]

REQUEST = ScaleRequest(
    caller_namespace="ns",
    graph_deployment_name="graph",
    k8s_namespace="default",
    target_replicas=[TargetReplica(sub_component_type="decode", desired_replicas=2)],
)


async def test_remote_client_returns_the_planner_response(
    runtime: DistributedRuntime,
    planner: ScriptedPlanner,
) -> None:
    client = RemotePlannerClient(runtime, "global")
    response = await client.send_scale_request(REQUEST)
    assert (response.status, response.message) == (ScaleStatus.SUCCESS, "done")
    assert planner.requests[0]["target_replicas"][0]["desired_replicas"] == 2
    await client.close()


async def test_malformed_planner_response_is_an_error(
    runtime: DistributedRuntime,
    planner: ScriptedPlanner,
) -> None:
    planner.reply = {"status": "other"}
    client = RemotePlannerClient(runtime, "global")
    with pytest.raises(Unknown, match="malformed response"):
        await client.send_scale_request(REQUEST)
    await client.close()


async def test_missing_global_planner_is_an_error_that_names_its_endpoint(runtime: DistributedRuntime) -> None:
    client = RemotePlannerClient(runtime, "global", connection_timeout=0.0, max_retries=1)
    with pytest.raises(Unknown, match=r"no global planner at global\.GlobalPlanner\.scale_request"):
        await client.send_scale_request(REQUEST)
    await client.close()
