"""Routes by which a trainer controls workers: registration, listing, and checks of LoRA requests."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from dynamo.core.config import environ
from dynamo.core.errors import InvalidArgument

TRUE_ENV_VALUES = {"1", "true", "yes", "on"}

RLRouteHandler = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]
EndpointGenerator = Callable[[dict[str, Any]], AsyncIterator[dict[str, Any] | None]]


class RLAdminValidationError(ValueError):
    """A request that lacks a field."""


def env_bool(name: str, default: bool = False) -> bool:
    """Return whether a variable is true; the default if it is unset."""
    text = environ().get(name)
    return default if text is None else text.strip().lower() in TRUE_ENV_VALUES


async def first_endpoint_response(endpoint_handler: EndpointGenerator, body: dict[str, Any]) -> dict[str, Any]:
    """Return the first item of a handler's stream, which is then closed."""
    stream: Any = endpoint_handler(body)
    if not hasattr(stream, "aclose"):
        return await anext(aiter(stream), None) or {"status": "ok"}
    async with aclosing(stream):
        return await anext(stream, None) or {"status": "ok"}


def require_lora_load_request(request: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return an adapter's name and URI. Raise `RLAdminValidationError`."""
    return require_lora_unload_request(request), _text(_object((request or {}).get("source"), "source"), "source.uri")


def require_lora_unload_request(request: Mapping[str, Any] | None) -> str:
    """Return an adapter's name. Raise `RLAdminValidationError`."""
    return _text(_object(request, "lora_name"), "lora_name")


def _object(value: Any, name: str) -> Mapping[str, Any]:
    """Return the object that contains a field."""
    if isinstance(value, Mapping) and (value or name != "source"):
        return value
    raise RLAdminValidationError(f"'{name}' object is required in request")


def _text(container: Mapping[str, Any], path: str) -> str:
    """Return the text at the last name of a path."""
    text = container.get(path.rpartition(".")[2])
    if isinstance(text, str) and text:
        return text
    raise RLAdminValidationError(f"'{path}' is required and must be a string")


class RLRouteRegistry:
    """Routes of a worker, listed for the trainer by its request-plane endpoint."""

    def __init__(self, runtime: Any, *, logger_: logging.Logger | None = None, world_size: int | None = None) -> None:
        if not (world_size is None or (type(world_size) is int and world_size > 0)):
            raise InvalidArgument(f"world_size {world_size!r}: must be an integer above 0")
        self.routes: dict[str, RLRouteHandler] = {}
        self._runtime = runtime
        self._facts = {} if world_size is None else {"world_size": world_size}

    def add_route(self, name: str, handler: RLRouteHandler) -> None:
        """Add a route."""
        self.routes[name] = handler

    def add_routes(self, routes: Mapping[str, RLRouteHandler]) -> None:
        """Add routes."""
        self.routes.update(routes)

    def describe(self) -> dict[str, Any]:
        """Return the routes, the URL of the worker's system server and the world size."""
        url = getattr(self._runtime, "system_status_server_url", lambda: None)()
        where = {"system_url": url} if url else {}
        return {"status": "ok", "routes": sorted(self.routes), **where, **self._facts}

    async def dispatch(self, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Answer a request of the trainer; `routes` is the only method."""
        given: Mapping[str, Any] = request if isinstance(request, Mapping) else {}
        method = given.get("method")
        if not (isinstance(method, str) and method):
            return {"status": "error", "message": "the request must be an object with a 'method', a text"}
        if method != "routes":
            return _failed(method, "rl request-plane endpoint only supports method='routes'")
        if not isinstance(given.get("kwargs", {}), Mapping):
            return _failed(method, "rl_dispatch: 'kwargs' must be an object")
        return self.describe()

    async def dispatch_stream(self, request: Mapping[str, Any] | None = None) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer, as handlers of endpoints do."""
        yield await self.dispatch(request)


def register_rl_routes(
    runtime: Any, registry: RLRouteRegistry, routes: Mapping[str, RLRouteHandler], *, enable_dispatch: bool
) -> None:
    """Serve routes at `/engine/NAME`, and list them with `enable_dispatch`."""
    if enable_dispatch:
        registry.add_routes(routes)
    for route in routes.items():
        runtime.register_engine_route(*route)


def _failed(method: str, message: str) -> dict[str, Any]:
    return {"status": "error", "method": method, "message": message}
