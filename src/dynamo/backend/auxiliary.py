"""Auxiliary endpoints of a worker's component: one request, one response."""

from collections.abc import Mapping
from typing import Any

from dynamo.core.codec import decode
from dynamo.core.errors import DynamoException, Unknown
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import EngineRoute, ServeOptions


async def serve_auxiliary(endpoint: Endpoint, routes: Mapping[str, EngineRoute]) -> list[Serving]:
    """Serve each route as an endpoint of that name in the component of `endpoint`."""
    runtime, own = endpoint.runtime, endpoint.id
    return [
        await runtime.endpoint(str(EndpointId(own.namespace, own.component, name))).serve(
            _Handler(endpoint, name, route).handle, ServeOptions()
        )
        for name, route in routes.items()
    ]


class _Handler:
    """Request handler of one route."""

    def __init__(self, endpoint: Endpoint, name: str, route: EngineRoute) -> None:
        self._tasks = endpoint.runtime.tasks
        self._name = name
        self._route = route

    def handle(self, request: Request, reply: Reply) -> None:
        """Start a request. Raise `InvalidArgument` for one that cannot be decoded."""
        body = decode(request.body, request.codec, Any) if request.body else {}
        self._tasks.start(self._answer(body if isinstance(body, dict) else {}, reply), self._name)

    async def _answer(self, body: dict[str, Any], reply: Reply) -> None:
        try:
            reply.item(await self._route(body))
            reply.finish()
        except DynamoException as error:
            reply.fail(error)
        except Exception as error:  # Request boundary: the caller gets the error, the task owner logs it.
            reply.fail(Unknown(f"{self._name}: {error}"))
            raise
