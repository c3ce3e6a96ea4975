"""Route extensions: GET routes that a deployment adds to its frontend.

    def provide():
        return FrontendRoute("GET", "/ready", lambda context: {"ready": context.has_any_ready_model()})

named by `--frontend-route-extension package.module:provide`, or registered under the entry point group
`dynamo.frontend.routes`. A handler is a synchronous function; `http.routes.extensions` calls it.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.serving.models import Models

GROUP = "dynamo.frontend.routes"


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
        if re.search(r"[{}*\s]|/:", path):
            raise ValueError(f"frontend route path must be static (no '{{...}}', '*', '/:' or whitespace): {path!r}")
        if not callable(handler):
            raise TypeError("FrontendRoute handler must be callable")
        if inspect.iscoroutinefunction(handler):
            raise ValueError("FrontendRoute handler must be synchronous; async def handlers are not supported")
        self._path = path
        self.handler = handler

    @property
    def method(self) -> str:
        """Return the HTTP method, always `GET`."""
        return "GET"

    @property
    def path(self) -> str:
        """Return the path of the route."""
        return self._path


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
    from importlib import metadata  # Imports the email package.

    points = metadata.entry_points(group=GROUP)
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
