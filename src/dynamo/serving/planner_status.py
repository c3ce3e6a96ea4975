"""Status of planners: calls each planner that discovery lists and returns its state and last decisions."""

import asyncio
from typing import Any

from dynamo.protocols.discovery import INSTANCES, PLANNER_COMPONENT, PLANNER_STATUS_ENDPOINT, EndpointId
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.serving.direct_calls import DirectCalls, instances_of

PLANNERS_MAX = 16
"""Planners that one request calls, in the order of their namespaces."""


class PlannerStatuses:
    """Reader of the planners' status endpoints."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._calls = DirectCalls(runtime, PLANNERS_MAX)

    async def read(self, decisions: int | None = None) -> list[dict[str, Any]]:
        """Return the status of each planner by namespace; one that does not answer in time has an `error` instead.

        `decisions`: number of last decisions to return; by default the planner's own choice.
        """
        keys = await self._runtime.discovery.snapshot(INSTANCES)
        found = sorted(
            instances_of(keys, PLANNER_STATUS_ENDPOINT, PLANNER_COMPONENT), key=lambda one: (one[0].namespace, one[1])
        )
        return await asyncio.gather(*(self._status(*one, decisions) for one in found[:PLANNERS_MAX]))

    async def _status(self, endpoint: EndpointId, instance_id: int, decisions: int | None) -> dict[str, Any]:
        request = None if decisions is None else {"decisions": decisions}
        reply = await self._calls.call(endpoint, instance_id, request)
        return {"namespace": endpoint.namespace, "instance_id": f"{instance_id:x}", **reply}
