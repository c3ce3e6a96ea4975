"""Workers' own benchmarks: the first performance data of a planner, from the endpoint `{namespace}.{component}.get_perf_metrics`.

Released vLLM workers serve it, with results if they were started with a benchmark mode. Released mockers do not.
"""

import asyncio
import logging

from dynamo.core.errors import DynamoException, NotReady
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Backend, OptimizationTarget, PlannerConfig, SweepMode
from dynamo.planner.connectors.workers import LiveWorkers
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.profile_data import benchmark_steps
from dynamo.planner.start import Steps, scaled_roles
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import UnaryClient

logger = logging.getLogger(__name__)

ENDPOINT = "get_perf_metrics"
INSTANCE_WAIT_S = 10.0
"""Wait for an instance of the endpoint, which a worker may register after its model; as in the released planner."""
RESPONSE_S = 10.0


async def measured_steps(
    runtime: DistributedRuntime, config: PlannerConfig, workers: LiveWorkers, *, wait_s: float = INSTANCE_WAIT_S
) -> Steps:
    """Return the steps that the workers of each scaled role have measured; a role without any is absent.

    This waits for the endpoint only where latencies decide, because thresholds need no performance model, and neither with
    `pre_deployment_sweeping_mode: none` nor with mockers.
    """
    roles = scaled_roles(config)
    is_expected = (
        config.pre_deployment_sweeping_mode not in (None, SweepMode.NONE) and config.backend is not Backend.MOCKER
    )
    wait_s = wait_s if is_expected and config.optimization_target is OptimizationTarget.SLA else 0.0
    found = await asyncio.gather(*(_of_role(runtime, workers, role, wait_s) for role in roles))
    return {role: steps for role, steps in zip(roles, found, strict=True) if steps}


async def _of_role(
    runtime: DistributedRuntime, workers: LiveWorkers, role: EngineRole, wait_s: float
) -> list[ForwardPassMetrics]:
    """Return the steps of the first component of a role that has any."""
    served = workers.endpoints(PREFILL if role is EngineRole.PREFILL else DECODE)
    for component in sorted({(one.namespace, one.component) for one in served}):
        endpoint = EndpointId(*component, ENDPOINT)
        try:
            steps = benchmark_steps(await _response(runtime, endpoint, wait_s), role)
        except DynamoException as error:
            logger.info("%s: no performance data: %s", endpoint, error)
            continue
        except TimeoutError:
            logger.info("%s: no response within %g s", endpoint, RESPONSE_S)
            continue
        logger.info("%s: %d steps for the performance model of %s workers", endpoint, len(steps), role.value)
        if steps:
            return steps
    return []


async def _response(runtime: DistributedRuntime, endpoint: EndpointId, wait_s: float) -> object:
    """Return the response of one instance, the next in turn. Raise `DynamoException` without an instance."""
    client = await runtime.endpoint(str(endpoint)).client()
    try:
        if not client.instance_ids() and wait_s == 0:
            raise NotReady("no worker serves it")
        await client.wait_for_instances(wait_s)
        async with asyncio.timeout(RESPONSE_S):
            return await UnaryClient(client).complete(None)
    finally:
        await client.close()
