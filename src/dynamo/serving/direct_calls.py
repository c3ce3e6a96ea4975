"""Direct calls: one request to one instance of an endpoint that discovery lists, and its reply as an object.

For control endpoints, which are called rarely: planners and the controls of workers.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from dynamo.core.errors import DynamoException
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

REPLY_S = 2.0


class DirectCalls:
    """Caller of control endpoints; keeps the clients of the endpoints that were used last."""

    def __init__(self, runtime: DistributedRuntime, clients_max: int) -> None:
        self.runtime = runtime
        self._clients_max = clients_max
        self._clients: dict[EndpointId, Client] = {}

    async def call(
        self, endpoint: EndpointId, instance_id: int, request: Any = None, timeout_s: float = REPLY_S
    ) -> dict[str, Any]:
        """Return the reply of an instance, or an object with `error` if there is none in time."""
        reply: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._client(endpoint)
                async for element in await client.direct(request, instance_id, annotated=False):
                    reply |= element
        except TimeoutError:
            reply["error"] = f"no reply within {timeout_s:g} s"
        except DynamoException as error:
            reply["error"] = str(error)
        return reply

    async def close(self) -> None:
        """Close the clients."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    async def _client(self, endpoint: EndpointId) -> Client:
        client = self._clients.pop(endpoint, None)
        if client is None:
            if len(self._clients) >= self._clients_max:
                await self._clients.pop(next(iter(self._clients))).close()
            client = await self.runtime.endpoint(str(endpoint)).client()
        self._clients[endpoint] = client  # The last used one is dropped last.
        await client.wait_for_instances(REPLY_S)
        return client


def instances_of(keys: Iterable[str], name: str, component: str | None = None) -> list[tuple[EndpointId, int]]:
    """Return the endpoints of that name among discovery keys of instances, `<namespace>/<component>/<name>/<id in hex>`."""
    found = []
    for key in keys:
        parts = key.split("/")
        if len(parts) == 4 and parts[2] == name and component in (None, parts[1]):
            try:
                found.append((EndpointId(*parts[:3]), int(parts[3], 16)))
            except ValueError:
                logger.warning("malformed discovery key: %s", key)
    return found
