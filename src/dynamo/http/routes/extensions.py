"""Routes that a deployment adds (`http.extensions`): their handlers run in threads of their own, few at a time."""

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from dynamo.core.boundaries import logged
from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError
from dynamo.core.threads import in_daemon_thread
from dynamo.http.extensions import FrontendExtensionContext, FrontendResponse, FrontendRoute, Handler
from dynamo.http.routes.table import Operation, PlainHandler, RouteContext, RouteTable, as_json, refuse
from dynamo.serving.errors import ErrorAnswer, overload_status

logger = logging.getLogger(__name__)

HANDLER_S = 30.0  # Timeout of a handler, the same as upstream's.
RUNNING_MAX = 16  # Concurrent handlers. A handler that hangs keeps its thread, so more than these are refused.
FAILED = {"error": "frontend route extension failed"}


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes. Raise `ConfigError` if a path is in use."""
    if context.extensions:
        seen = FrontendExtensionContext(context.models, lambda: context.pipeline.is_draining)
        Extensions(seen).add(routes, context.extensions)


class Extensions:
    """Handlers of all extensions, and the threads that they share."""

    def __init__(self, context: FrontendExtensionContext) -> None:
        self._context = context
        self._running = 0

    def add(self, routes: RouteTable, extensions: Sequence[FrontendRoute]) -> None:
        """Add the routes. Raise `ConfigError` if a path is in use."""
        taken = {(entry.method, entry.path) for entry in routes.entries}
        for one in extensions:
            if (one.method, one.path) in taken:
                raise ConfigError(
                    f"--frontend-route-extension: duplicate frontend route registered: {one.method} {one.path}"
                )
            taken.add((one.method, one.path))
            operation = Operation("Route of this deployment", answer={}, refusals=(500, 503))
            routes.plain("GET", one.path, self._endpoint(one.handler), operation)

    def _endpoint(self, handler: Handler) -> PlainHandler:
        async def answer(request: Request) -> Response:
            if self._running >= RUNNING_MAX:
                return refuse(ErrorAnswer(overload_status(), "Service temporarily overloaded", code="overloaded"))
            with logged(logger, "route extension failed: %s", request.url.path):
                try:
                    async with asyncio.timeout(HANDLER_S):
                        return await in_daemon_thread(lambda: self._call(handler), "route extension")
                except TimeoutError:
                    return as_json({"error": "frontend route extension timed out"}, 503)
            return as_json(FAILED, 500)

        return answer

    def _call(self, handler: Handler) -> Response:
        self._running += 1
        try:
            result = handler(self._context)
            status, body = (result.status_code, result.body) if isinstance(result, FrontendResponse) else (200, result)
            return Response(json_encode(body), status, media_type="application/json")
        finally:
            self._running -= 1
