"""Status of planners: calls each planner that discovery lists and returns its state and last decisions."""

import asyncio
import logging
from typing import Any

from dynamo.core.errors import DynamoException
from dynamo.protocols.discovery import INSTANCES, EndpointId
from dynamo.protocols.planner import PLANNER_COMPONENT, STATUS_ENDPOINT
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

PLANNERS_MAX = 16
"""Planners that one request calls, in the order of their namespaces."""
REPLY_S = 2.0


class PlannerStatuses:
    """Reader of the planners' status endpoints; keeps one client for each namespace with a planner."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._clients: dict[EndpointId, Client] = {}

    async def read(self) -> list[dict[str, Any]]:
        """Return the status of each planner by namespace; one that does not answer in time has an `error` instead."""
        found = sorted(
            planners_of(await self._runtime.discovery.snapshot(INSTANCES)), key=lambda one: (one[0].namespace, one[1])
        )
        return await asyncio.gather(*(self._status(*one) for one in found[:PLANNERS_MAX]))

    async def _status(self, endpoint: EndpointId, instance_id: int) -> dict[str, Any]:
        status: dict[str, Any] = {"namespace": endpoint.namespace, "instance_id": f"{instance_id:x}"}
        try:
            async with asyncio.timeout(REPLY_S):
                client = await self._client(endpoint)
                async for reply in await client.direct(None, instance_id, annotated=False):
                    status |= reply
        except TimeoutError:
            status["error"] = f"no reply within {REPLY_S:g} s"
        except DynamoException as error:
            status["error"] = str(error)
        return status

    async def _client(self, endpoint: EndpointId) -> Client:
        client = self._clients.get(endpoint)
        if client is None:
            if len(self._clients) >= PLANNERS_MAX:
                await self._clients.pop(next(iter(self._clients))).close()
            client = self._clients[endpoint] = await self._runtime.endpoint(str(endpoint)).client()
        await client.wait_for_instances(REPLY_S)
        return client


def planners_of(keys: Any) -> list[tuple[EndpointId, int]]:
    """Return the status endpoints among discovery keys of instances, `<namespace>/Planner/status/<id in hex>`."""
    found = []
    for key in keys:
        parts = key.split("/")
        if len(parts) == 4 and parts[1:3] == [PLANNER_COMPONENT, STATUS_ENDPOINT]:
            try:
                found.append((EndpointId(*parts[:3]), int(parts[3], 16)))
            except ValueError:
                logger.warning("malformed discovery key: %s", key)
    return found
