"""JsonService: a small HTTP service: a table of routes, JSON in, JSON out.

    routes = JsonRoutes()
    routes.add("POST", "/add", tracker.add, AddRequest)            # handler(call) -> (status, what msgspec encodes)
    async with routes.serve(port) as url: ...

A handler raises `HttpError` for a status of its own; its message is the body's `error`.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from dynamo.core.codec import json_encode
from dynamo.core.errors import HttpError
from dynamo.core.http_server import HttpServer, ServerLimits
from dynamo.core.listening import bind

logger = logging.getLogger(__name__)

LIMITS = ServerLimits(
    head_bytes=64 << 10,
    body_bytes=64 << 20,  # A prompt of a million tokens in JSON is some 8 MB.
    connections=4096,  # Gateways may use one for each of their requests in progress.
    idle_s=75.0,
    drain_s=5.0,
)

ANY_HOST = "0.0.0.0"  # noqa: S104 - as upstream: clients are on other hosts
JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class HttpCall(Generic[B]):
    """One request."""

    body: B
    query: Mapping[str, str]
    """The last value of each name."""
    path: str = ""
    """The path segment at the route's `{}`."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextBody:
    """A body that is not JSON."""

    text: str | bytes
    content_type: str = TEXT_TYPE


Handler = Callable[[HttpCall[Any]], Awaitable[tuple[int, Any]]]
"""Status, and what is encoded: None has no body."""
Observer = Callable[["AnsweredRequest"], None]


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """One request that was answered."""

    method: str
    route: str
    """The route's path; that of the request where there is no route."""
    status: int
    seconds: float
    headers: Mapping[str, str]
    is_routed: bool = True
    """Whether there is such a route."""


class JsonRoutes:
    """Routes of a service."""

    def __init__(self, *, errors_as_text: bool = False, names_missing_routes: bool = True) -> None:
        """`errors_as_text`: respond to an unreadable body in plain text; `names_missing_routes`: a 404 has a body."""
        self._routes: list[Route] = []
        self._errors_as_text = errors_as_text
        self._names_missing_routes = names_missing_routes
        self.observer: Observer | None = None

    def add(self, method: str, path: str, handler: Handler, body: type[Any] | None = None) -> None:
        """Add a route; one `{}` in the path matches any one segment. `bytes` as body: the handler decodes it."""
        decode = None if body is None else bytes if body is bytes else msgspec.json.Decoder(body).decode

        async def respond(request: Request) -> Response:
            began = time.perf_counter()
            status, value = await self._call(request, handler, decode)
            if self.observer is not None:
                self.observer(AnsweredRequest(method, path, status, time.perf_counter() - began, request.headers))
            return _encoded(status, value)

        self._routes.append(Route(path.replace("{}", "{segment}"), respond, methods=[method]))

    def application(self) -> Starlette:
        """Return the ASGI application of the routes added so far."""
        application = Starlette(exception_handlers={404: self._unrouted, 405: self._unrouted})
        application.router = Router(self._routes, redirect_slashes=False)
        return application

    @asynccontextmanager
    async def serve(self, port: int, *, host: str = ANY_HOST, setting: str = "--port") -> AsyncIterator[str]:
        """Serve the routes added so far within the block; return the server's URL. Raise `StartupError`."""
        listener = bind(host, port, setting)
        url = "http://{}:{}".format(*listener.getsockname()[:2])
        server = HttpServer(self.application(), LIMITS, lambda status, message: _encoded(status, {"error": message}))
        await server.start(listener)
        try:
            yield url
        finally:
            await server.close()

    async def _call(self, request: Request, handler: Handler, decode: Callable[[bytes], Any] | None) -> tuple[int, Any]:
        """Return the status of a request, and the value to encode."""
        try:
            body = None if decode is None else _decoded(request.headers, await request.body(), decode)
            segment = request.path_params.get("segment", "")
            return await handler(HttpCall(body, dict(request.query_params), segment, request.headers))
        except _UnreadableBody as error:
            return error.code, TextBody(error.message) if self._errors_as_text else {"error": error.message}
        except HttpError as error:
            return error.code, {"error": error.message}
        except Exception:  # Request boundary: the client gets an error response, whatever failed.
            logger.exception("%s %s failed", request.method, request.url.path)
            return 500, {"error": "internal error"}

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        """Return the response to a request without a route."""
        assert isinstance(error, HTTPException)
        if self.observer is not None:
            served = AnsweredRequest(
                request.method, request.url.path, error.status_code, 0.0, request.headers, is_routed=False
            )
            self.observer(served)
        message = "route not found" if error.status_code == 404 else "method not allowed"
        return _encoded(error.status_code, {"error": message} if self._names_missing_routes else None)


class _UnreadableBody(HttpError):
    """A body that the route cannot decode."""


def _decoded(headers: Mapping[str, str], body: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Return the body as the route's type. Raise `_UnreadableBody`."""
    if decode is not bytes and not headers.get("content-type", "").startswith(JSON_TYPE):
        raise _UnreadableBody(415, f"Expected request with `Content-Type: {JSON_TYPE}`")
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise _UnreadableBody(422, f"Failed to deserialize the JSON body into the target type: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _UnreadableBody(400, f"Failed to parse the request body as JSON: {error}") from None


def _encoded(status: int, value: Any) -> Response:
    """Return the response with this value: text, or anything that msgspec encodes; None has no body."""
    if value is None:
        return Response(status_code=status)
    if isinstance(value, TextBody):
        return Response(value.text, status, headers={"content-type": value.content_type})
    return Response(json_encode(value), status, headers={"content-type": JSON_TYPE})
