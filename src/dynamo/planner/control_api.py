"""Control API of a planner: `GET` and `PATCH /v1/min-endpoints`, without authentication and on the loopback address only.

Of two planners on one machine, the second one cannot listen: it logs the reason and goes on, as it would without the API.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from dynamo.core.errors import StartupError
from dynamo.planner.runtime_limits import read_update
from dynamo.runtime.json_service import ANY_HOST, HttpCall, JsonRoutes

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PATH = "/v1/min-endpoints"


class RuntimeLimits(Protocol):
    """Owner of the limits: `PlannerService`."""

    async def limits(self) -> dict[str, Any]:
        """Return the present limits."""

    async def set_limits(self, update: dict[str, int]) -> dict[str, Any]:
        """Change limits, and return all of them. Raises `HttpError`."""


def control_routes(planner: RuntimeLimits) -> JsonRoutes:
    """Return the routes of `control_api_port`."""
    routes = JsonRoutes()

    async def get(call: HttpCall[None]) -> tuple[int, Any]:
        return 200, await planner.limits()

    async def patch(call: HttpCall[bytes]) -> tuple[int, Any]:
        return 200, await planner.set_limits(read_update(call.body))

    routes.add("GET", PATH, get)
    routes.add("PATCH", PATH, patch, bytes)
    return routes


@asynccontextmanager
async def serve_optional(
    routes: JsonRoutes, port: int, setting: str, *, host: str = ANY_HOST
) -> AsyncIterator[str | None]:
    """Serve routes within the block and return their URL; None without a port, or if the port cannot be used."""
    async with AsyncExitStack() as stack:
        url: str | None = None
        if port > 0:
            try:
                url = await stack.enter_async_context(routes.serve(port, host=host, setting=setting))
            except StartupError as error:
                logger.error("%s; the planner continues without it", error)  # noqa: TRY400 - one line
            else:
                logger.info("%s: serving %s", setting, url)
        yield url
