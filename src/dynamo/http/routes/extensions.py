"""Route extensions: GET routes that a deployment adds to its frontend.

    def provide():
        return FrontendRoute("GET", "/ready", lambda context: {"ready": context.has_any_ready_model()})

named by `--frontend-route-extension package.module:provide`, or registered under the entry point group
`dynamo.frontend.routes`. A handler is a synchronous function that runs in a thread of its own; few run at a time.
"""

import asyncio
import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError
from dynamo.core.threads import in_daemon_thread
from dynamo.http.routes.table import Operation, PlainHandler, RouteTable, as_json, refuse
from dynamo.serving.errors import ErrorAnswer, overload_status

if TYPE_CHECKING:
    from dynamo.serving.models import Models

logger = logging.getLogger(__name__)

GROUP = "dynamo.frontend.routes"
HANDLER_S = 30.0  # Timeout of a handler, the same as upstream's.
RUNNING_MAX = 16  # Concurrent handlers. A handler that hangs keeps its thread, so more than these are refused.
FAILED = {"error": "frontend route extension failed"}


class FrontendExtensionContext:
    """State of the frontend that a handler may read."""

    def __init__(self, models: "Models", is_draining: Callable[[], bool]) -> None:
        self._models = models
        self._is_draining = is_draining

    def is_ready(self) -> bool:
        """Return whether the HTTP service has started."""
        return True

    def is_cancelled(self) -> bool:
        """Return whether the frontend is shutting down."""
        return self._is_draining()

    def has_any_ready_model(self) -> bool:
        return bool(self.serving_ready_display_names())

    def is_model_ready_to_serve(self, model: str) -> bool:
        return model in self.serving_ready_display_names()

    def model_display_names(self) -> list[str]:
        """Return the names of all models that a worker has registered."""
        return sorted({one.name for one in self._models.all_sets()})

    def serving_ready_display_names(self) -> list[str]:
        """Return the names of the models that can serve requests."""
        return sorted({one.name for one in self._models.all_sets() if one.worker_ids()})


class FrontendResponse:
    """Response with a status code of its own."""

    def __init__(self, status_code: int, body: object) -> None:
        if not 100 <= status_code <= 999:
            raise ValueError(f"invalid status code {status_code}")
        self.status_code = status_code
        self.body = body


Handler = Callable[[FrontendExtensionContext], object]


class FrontendRoute:
    """One path and its handler."""

    def __init__(self, method: str, path: str, handler: Handler) -> None:
        """Raise `ValueError` unless it is a GET of a fixed path, `TypeError` if the handler is not callable."""
        if method.upper() != "GET":
            raise ValueError(f"unsupported FrontendRoute method {method!r}; only GET is supported")
        if not path.startswith("/"):
            raise ValueError(f"frontend route path must start with '/': {path!r}")
        if re.search(r"[{}*\s]", path):
            raise ValueError(f"frontend route path must be static (no '{{...}}', '*', or whitespace): {path!r}")
        if not callable(handler):
            raise TypeError("FrontendRoute handler must be callable")
        if inspect.iscoroutinefunction(handler):
            raise ValueError("FrontendRoute handler must be synchronous; async def handlers are not supported")
        self.method = "GET"
        self.path = path
        self.handler = handler


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
                    f"--frontend-route-extension: {one.method} {one.path} is already in use by another route"
                )
            taken.add((one.method, one.path))
            operation = Operation("Route of this deployment", answer={}, refusals=(500, 503))
            routes.plain("GET", one.path, self._endpoint(one.handler), operation)

    def _endpoint(self, handler: Handler) -> PlainHandler:
        async def answer(request: Request) -> Response:
            if self._running >= RUNNING_MAX:
                return refuse(ErrorAnswer(overload_status(), "Service temporarily overloaded", code="overloaded"))
            try:
                async with asyncio.timeout(HANDLER_S):
                    return await in_daemon_thread(lambda: self._call(handler), "route extension")
            except TimeoutError:
                return as_json({"error": "frontend route extension timed out"}, 503)
            except Exception:
                logger.exception("route extension failed: %s", request.url.path)
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


def load_extensions(names: Sequence[str]) -> list[FrontendRoute]:
    """Call each named provider once and return its routes. Raise `ConfigError`."""
    routes: list[FrontendRoute] = []
    for name in dict.fromkeys(names):
        provide = _provider(name)
        if not callable(provide):
            raise ConfigError(f"--frontend-route-extension {name}: must name a callable")
        try:
            provided: Any = provide()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--frontend-route-extension {name}: {error}") from None
        routes += _as_routes(name, provided)
    return routes


def _as_routes(name: str, provided: Any) -> list[FrontendRoute]:
    if provided is None:
        return []
    if isinstance(provided, FrontendRoute):
        return [provided]
    routes = list(provided) if isinstance(provided, Iterable) else [provided]
    for route in routes:
        if not isinstance(route, FrontendRoute):
            raise ConfigError(
                f"--frontend-route-extension {name}: returned {route!r}; must return FrontendRoute objects"
            )
    return routes


def _provider(name: str) -> Any:
    """Return the function with that name among the entry points, or at that `module:function`."""
    points = importlib.metadata.entry_points(group=GROUP)
    matches = [point for point in points if point.name == name]
    if len(matches) > 1:
        raise ConfigError(f"--frontend-route-extension {name}: several entry points have this name")
    if matches:
        return matches[0].load()
    module, separator, path = name.partition(":")
    if not separator:
        known = ", ".join(sorted(point.name for point in points)) or "none"
        raise ConfigError(f"--frontend-route-extension {name}: no such entry point (available: {known})")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--frontend-route-extension {name}: {error}") from None
    return found
