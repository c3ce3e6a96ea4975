"""Client of a global planner: sends scale requests to its endpoint `scale_request`."""

import asyncio

import msgspec

from dynamo.core.errors import Unknown
from dynamo.protocols.scaling import ScaleRequest, ScaleResponse
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import UnaryClient

CONNECTION_TIMEOUT_S = 30.0


async def send(client: Client, request: ScaleRequest) -> ScaleResponse:
    """Return the response of an instance to a request. Raise `Unknown` for a malformed one."""
    raw = await UnaryClient(client).complete(msgspec.to_builtins(request))
    try:
        return msgspec.convert(raw, ScaleResponse)
    except msgspec.ValidationError as error:
        raise Unknown(f"malformed response of the global planner: {error}") from None


class RemotePlannerClient:
    """Client of a global planner, which connects at the first request."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        central_namespace: str,
        central_component: str = "GlobalPlanner",
        connection_timeout: float = CONNECTION_TIMEOUT_S,
        max_retries: int = 3,
    ) -> None:
        """Create a client that waits `connection_timeout` seconds for an instance, `max_retries` times."""
        self.runtime = runtime
        self.central_namespace = central_namespace
        self.central_component = central_component
        self.connection_timeout = connection_timeout
        self.max_retries = max_retries
        self._client: Client | None = None

    async def send_scale_request(self, request: ScaleRequest) -> ScaleResponse:
        """Return the response to a request. Raise `Unknown` without an instance or for a malformed response."""
        return await send(await self._connected(), request)

    async def close(self) -> None:
        """Stop following the global planner's instances."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connected(self) -> Client:
        """Return the client once there is an instance. Raise `Unknown` if there is none in time."""
        path = f"{self.central_namespace}.{self.central_component}.scale_request"
        if self._client is None:
            self._client = await self.runtime.endpoint(path).client()
        timeout_s = self.connection_timeout * max(1, self.max_retries)
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.wait_for_instances()
        except TimeoutError:
            raise Unknown(f"no global planner at {path} within {timeout_s:g} s") from None
        return self._client
