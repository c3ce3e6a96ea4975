"""Handler of scale requests: authorization, arbitration and execution, one request after the other."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from typing import Any

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoException
from dynamo.core.metrics import MetricsRegistry
from dynamo.global_planner.arbitration import GpuArbiter, apply_order, total_gpus
from dynamo.global_planner.executor import ScaleExecutor
from dynamo.planner.errors import DynamoGraphDeploymentNotReadyError, EmptyTargetReplicasError, PlannerError
from dynamo.protocols.scaling import ScaleRequest, ScaleResponse

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 120.0
"""Deadline of one request with its wait for the requests before it; above the minute of a blocking one."""
NO_OPERATION = "[no-operation] Scale request received and logged (not executed)"
FAILURES = (DynamoException, PlannerError, OSError)  # TimeoutError is an OSError.


class ScaleRequestHandler:
    """Serves scale requests of the managed namespaces; without an executor, requests are only logged."""

    def __init__(
        self,
        arbiter: GpuArbiter,
        executor: ScaleExecutor | None,
        managed: Collection[str],
        metrics: MetricsRegistry,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._executor = executor
        self._managed = frozenset(managed)
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()  # Two requests must not be decided by the same observation.
        self._requests = metrics.counter(
            "dynamo_global_planner_requests_total", "Scale requests by result", ("status",)
        )
        self._partners = metrics.counter(
            "dynamo_global_planner_paired_changes_total", "Changes of other pools applied with a request"
        )
        self._gpus = metrics.gauge("dynamo_global_planner_gpus", "GPUs of all deployments at the last request")
        self._intents = metrics.gauge("dynamo_global_planner_intents", "Stored intents")

    async def scale_request(self, request: Any) -> AsyncIterator[Any]:
        """Yield the response of one request; a failure is a response too."""
        response = await self._respond(request)
        self._requests.labels(status=response.status).inc()
        yield msgspec.to_builtins(response)

    async def _respond(self, raw: Any) -> ScaleResponse:
        try:
            request = msgspec.convert(raw, ScaleRequest)
        except msgspec.ValidationError as error:
            return ScaleResponse(status="error", message=f"malformed scale request: {error}")
        if self._managed and request.caller_namespace not in self._managed:
            return ScaleResponse(status="error", message=f"Namespace {request.caller_namespace[:253]} not authorized")
        problem = request.problem()
        if problem is not None:
            return ScaleResponse(status="error", message=problem)
        wanted = {one.sub_component_type: one.desired_replicas for one in request.target_replicas}
        if self._executor is None:
            logger.info("no-operation: %s requests %s for %s", request.caller_namespace, wanted, request.participant)
            return ScaleResponse(status="success", message=NO_OPERATION)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                response = await self._execute(request, self._executor)
        except DynamoGraphDeploymentNotReadyError as error:
            response = ScaleResponse(status="rejected", message=str(error))
        except FAILURES as error:
            message = str(error) or f"not complete after {REQUEST_TIMEOUT_S:g} s"
            response = ScaleResponse(status="error", message=message)
        logger.info("%s requests %s: %s: %s", request.caller_namespace, wanted, response.status, response.message)
        return response

    async def _execute(self, request: ScaleRequest, executor: ScaleExecutor) -> ScaleResponse:
        """Observe, decide and apply under the lock; then wait, if the request blocks, and read the result."""
        if not request.target_replicas:
            raise EmptyTargetReplicasError
        participant = executor.participant(request)
        async with self._lock:
            await executor.register(request)
            pools = await executor.observe()
            result = self._arbiter.decide(participant, request.target_replicas, pools, self._clock.now())
            self._gpus.labels().set(total_gpus(pools))
            self._intents.labels().set(self._arbiter.pending)
            if result.rejection is not None:
                return ScaleResponse(status="rejected", message=result.rejection)
            order = apply_order(participant, request.target_replicas, result.partners, pools)
            for number, (name, targets) in enumerate(order):
                try:
                    await executor.scale(name, targets)
                except FAILURES as error:
                    if not number:
                        raise  # Nothing is applied: the caller decides again at its next tick.
                    logger.warning(
                        "failed to scale %s after %s: %s; its next request corrects it", name, order[0][0], error
                    )
            self._partners.labels().inc(len(result.partners))
        if request.blocking:
            await executor.wait(participant)
        return ScaleResponse(
            status="success",
            message=f"Scaled {request.graph_deployment_name} successfully",
            current_replicas=await executor.current(participant),
        )
