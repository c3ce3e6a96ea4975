"""Route table: the routes of the HTTP service, their handlers and their descriptions.

A group of routes is a function in a module of its own (`openai.py`, `system.py`, …), named in `groups.py`. It adds its
routes to the table and takes its dependencies from the context:

    def add(routes: RouteTable, context: RouteContext) -> None:
        routes.hot("POST", "/v1/embeddings", handler, Operation("Embeddings", body=EmbeddingRequest, answer=…))
        routes.plain("GET", "/v1/things/{thing}", endpoint, Operation("One thing", answer=Thing))

A *hot* route has a fixed path; its handler gets a `ResponseStream` with the whole body and writes the response to it.
A *socket* route opens a WebSocket: its handler gets the `Exchange`, which has the connection. A *plain* route is a
Starlette endpoint; its path may have parameters. The OpenAPI document is generated from the `Operation` of each route, so
that it covers all of them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo.core.codec import json_encode
from dynamo.core.config import setting
from dynamo.core.errors import HttpError
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.server.exchange import HotHandler
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.response_stream import RequestAccount, RequestHandler

if TYPE_CHECKING:
    from dynamo.http.extensions import FrontendRoute
    from dynamo.http.server.gate import Account, Keys
    from dynamo.http.server.siblings import Siblings
    from dynamo.serving.models import Models
    from dynamo.serving.pipeline import Pipeline
    from dynamo.text.request_template import RequestTemplate

NOT_ADMIN = ErrorAnswer(
    403,
    "This route needs an admin API key (--admin-api-key, DYN_ADMIN_API_KEYS, or admin = true in the keys file)",
    code="admin_key_required",
    label="forbidden",
)

ErrorBody = Callable[[ErrorAnswer], bytes]
PlainHandler = Callable[[Request], Awaitable[Response]]

PLAIN_BODY_BYTES_MAX = 1 << 20
"""Maximum JSON body of a plain route; the bodies of hot routes have limits of their own (`Limits`)."""
ENGINE_REFUSALS = (400, 404, 413, 503, 529)
"""Error statuses of a route that sends requests to workers."""


class Access(Enum):
    """API key that a route requires, on a server with keys."""

    OPEN = "open"
    """No key: probes and metrics scrapers use the route."""
    KEY = "key"
    ADMIN = "admin"
    """An admin key: the route changes state for every caller, or shows the requests of other callers."""


class Operation(Struct, frozen=True):
    """Description of a route in the OpenAPI document."""

    summary: str
    body: Any = None
    """Type of the request, or its JSON schema; None without a body."""
    answer: Any = None
    """Type of the response, or its JSON schema; None for any object."""
    streams: bool = False
    """Whether the route can respond with server-sent events."""
    refusals: tuple[int, ...] = ()
    """Statuses of its errors."""
    body_media: str = "application/json"
    answer_media: str = "application/json"
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas of its optional query parameters."""
    error: Any = None
    """Type of its errors; None for OpenAI's form."""
    is_listed: bool = True
    """Whether the OpenAPI document describes it; pages and their own data are not part of the API."""


class RouteEntry(Struct, frozen=True):
    """One method on one path."""

    method: str
    path: str
    handler: HotHandler | PlainHandler
    operation: Operation
    is_hot: bool
    access: Access
    error_body: ErrorBody = ErrorAnswer.body
    """Formats errors of the path that occur before its handler runs."""


class RouteContext(Struct, frozen=True):
    """Dependencies of route handlers."""

    pipeline: "Pipeline"
    models: "Models"
    registry: MetricsRegistry
    is_sound: Callable[[], bool]
    """Returns whether all required background tasks are running."""
    apis: ApiOptions = field(default_factory=ApiOptions)
    metrics_prefix: str = "dynamo_frontend"
    template: "RequestTemplate | None" = None
    """Defaults for fields that requests omit."""
    extensions: "Sequence[FrontendRoute]" = ()
    siblings: "Siblings | None" = None
    """The other processes that share the port of this one."""
    keys: "Keys | None" = None
    """API keys; None on a server without keys."""


RouteGroup = Callable[["RouteTable", RouteContext], None]


class RouteTable:
    """All routes of one service."""

    def __init__(self, *, asks_keys: bool = False) -> None:
        """`asks_keys`: whether routes that need a key require one."""
        self.entries: list[RouteEntry] = []
        self.request_handlers: dict[str, RequestHandler] = {}
        """Handlers of hot routes by default path; requests without a connection, such as batch lines, use them too."""
        self.asks_keys = asks_keys
        self.on_start: list[Callable[[], None]] = []
        """Called when the service starts to serve."""
        self.on_stop: list[Callable[[], Awaitable[None]]] = []
        """Awaited after the service has sent its last response."""

    def hot(
        self,
        method: str,
        path: str,
        handler: RequestHandler,
        operation: Operation,
        *,
        variable: str | None = None,
        error_body: ErrorBody = ErrorAnswer.body,
    ) -> None:
        """Add a route whose handler writes to the transport. `variable` names the setting that moves its path."""
        self.request_handlers[path] = handler
        self.entries.append(RouteEntry(method, moved(path, variable), handler, operation, True, Access.KEY, error_body))

    def socket(self, path: str, handler: HotHandler, operation: Operation, *, variable: str) -> None:
        """Add a route that opens a WebSocket. `variable` names the setting that moves its path."""
        self.entries.append(RouteEntry("GET", moved(path, variable), handler, operation, True, Access.KEY))

    def plain(
        self,
        method: str,
        path: str,
        handler: PlainHandler,
        operation: Operation,
        *,
        variable: str | None = None,
        access: Access = Access.KEY,
    ) -> None:
        """Add a route that is a Starlette endpoint. `variable` names the setting that moves its path."""
        if access is Access.ADMIN:
            handler = self._for_admins(handler)
        self.entries.append(RouteEntry(method, moved(path, variable), handler, operation, False, access))

    def keep_only(self, method: str) -> None:
        """Remove the routes of all other methods."""
        self.entries = [one for one in self.entries if one.method == method]

    def hot_handlers(self) -> dict[tuple[bytes, bytes], HotHandler]:
        """Return the hot handlers by (method, path), for the lookup in the protocol."""
        hot: dict[tuple[bytes, bytes], Any] = {}
        for entry in self.entries:
            if entry.is_hot:
                hot[entry.method.encode(), entry.path.encode()] = entry.handler
        return hot

    def error_bodies(self) -> dict[bytes, ErrorBody]:
        """Return the formatters of paths whose errors are not in OpenAI's form."""
        special = [one for one in self.entries if one.error_body is not ErrorAnswer.body]
        return {one.path.encode(): one.error_body for one in special}

    def open_paths(self) -> set[bytes]:
        """Return the paths that need no key."""
        return {one.path.encode() for one in self.entries if one.access is Access.OPEN}

    def _for_admins(self, handler: PlainHandler) -> PlainHandler:
        """Return a handler that refuses callers without an admin key.

        The check is here and not at the gate, which matches paths before they are unquoted.
        """

        async def answer(request: Request) -> Response:
            account = account_of(request)
            if self.asks_keys and (account is None or not account.is_admin):
                return refuse(NOT_ADMIN)
            return await handler(request)

        return answer

    def starlette_routes(self) -> list[Route]:
        """Return the plain routes, and the paths of the hot ones so that a wrong method gets a 405, not a 404."""
        paths: dict[str, dict[str, PlainHandler]] = {}
        for entry in self.entries:
            handler: Any = _hot_elsewhere if entry.is_hot else entry.handler
            paths.setdefault(entry.path, {})[entry.method] = handler
        return [Route(path, _by_method(handlers), methods=list(handlers)) for path, handlers in paths.items()]


def routes_of(context: RouteContext, groups: Sequence[RouteGroup]) -> RouteTable:
    """Return a table with the routes of the groups."""
    table = RouteTable(asks_keys=context.keys is not None)
    for add in groups:
        add(table, context)
    return table


def _by_method(handlers: Mapping[str, PlainHandler]) -> PlainHandler:
    """Return one endpoint for a path, so that the `allow` header of a 405 lists all its methods."""

    async def answer(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request)

    return answer


async def _hot_elsewhere(request: Request) -> Response:
    """Placeholder for a hot route, never called with the route's method: the protocol handles those requests first."""
    raise HTTPException(404)


async def body_of(request: Request) -> bytes:
    """Return the body of a plain request. Raise `HttpError` (413) if it is too long; only file uploads may be long."""
    pieces: list[bytes] = []
    length = 0
    async for piece in request.stream():
        if piece:
            pieces.append(piece)
        length += len(piece)
        if length > PLAIN_BODY_BYTES_MAX:
            raise HttpError(413, f"The request body exceeds {PLAIN_BODY_BYTES_MAX} bytes")
    return b"".join(pieces)  # A single piece is not copied.


def account_of(request: Request) -> "Account | None":
    """Return the account of a plain request, None on a server without keys."""
    account: Account | None = request.scope.get("state", {}).get("account")
    return account


def owner_of(request: Request) -> str | None:
    """Return the owner of objects that a plain request stores or reads, None on a server without keys."""
    return owner_of_account(account_of(request))


def owner_of_account(account: RequestAccount | None) -> str | None:
    """Return the owner of objects that a caller stores or reads, None on a server without keys."""
    return None if account is None else account.owner


def moved(path: str, variable: str | None) -> str:
    """Return the path, or the one that the setting replaces it with."""
    return path if variable is None else setting(variable, path, str)


def as_json(value: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(json_encode(value), status, media_type="application/json")


def refuse(error: ErrorAnswer) -> Response:
    """Return the response of an error on a plain route."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error.body(), error.status, headers, media_type="application/json")
