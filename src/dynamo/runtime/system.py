"""System server: `/health`, `/live`, `/metrics`, engine routes and model assets of one process.

It serves only registered files, each under its own path: a request's path is looked up and never joined to a directory.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, BinaryIO

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from dynamo.core.api_keys import ADMIN_API_KEYS, is_one_of, presented_key
from dynamo.core.config import setting
from dynamo.core.http_server import HttpServer, ServerLimits, metrics_response, plain_text
from dynamo.core.listening import bind
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.metrics_page import MetricsPage
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.server import EngineRoute

logger = logging.getLogger(__name__)

FILE_CHUNK_BYTES = 1 << 18
ADAPTER_ROUTES = {"GET": "list_loras", "POST": "load_lora", "DELETE": "unload_lora"}


class SystemServer:
    """HTTP server for the state of one process."""

    def __init__(
        self,
        health: SystemHealth,
        metrics: MetricsRegistry,
        routes: Mapping[str, EngineRoute],
        files: Mapping[str, str] | None = None,
        admin_keys: Sequence[str] = (),
        limits: ServerLimits | None = None,
        *,
        records: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Create the server; with `admin_keys`, engine routes and adapters require one of them.

        `records` returns the discovery records of this process, which `/metadata` shows.
        """
        self._admin_keys = admin_keys
        self._health = health
        self._metrics = MetricsPage(metrics)
        self._routes = routes
        self._records = records
        self.files = {} if files is None else files
        """File of each model asset path; looked up at every request."""
        self.application = self._application()
        self.http = HttpServer(self.application, limits or ServerLimits())

    @property
    def port(self) -> int:
        return self.http.port

    async def listen(self, host: str, port: int) -> None:
        """Open the port. Raises `StartupError` when it is in use."""
        await self.http.start(bind(host, port, "DYN_SYSTEM_PORT"))

    async def close(self) -> None:
        await self.http.close()

    def _application(self) -> Starlette:
        health_paths = [
            setting("DYN_SYSTEM_HEALTH_PATH", "/health", str),
            setting("DYN_SYSTEM_LIVE_PATH", "/live", str),
        ]
        application = Starlette(exception_handlers={405: _wrong_method, Exception: _failed})
        application.router = Router(
            [
                *(Route(path, self._show_health) for path in health_paths),
                Route("/metrics", self._show_metrics),
                Route("/metadata", self._show_metadata),
                Route("/engine/{name:path}", self._engine, methods=["GET", "POST"]),
                Route("/v1/loras", self._adapters, methods=list(ADAPTER_ROUTES)),
                Route("/v1/loras/{name:path}", self._adapters, methods=list(ADAPTER_ROUTES)),
            ],
            redirect_slashes=False,
            default=self._file_or_not_found,
        )
        return application

    async def _show_health(self, request: Request) -> Response:
        return plain_text(200 if self._health.is_ready() else 503, self._health.render())

    async def _show_metrics(self, request: Request) -> Response:
        return await metrics_response(request, self._metrics)

    async def _show_metadata(self, request: Request) -> Response:
        if self._records is None:
            return plain_text(404, "Discovery metadata not available")
        return _json(200, self._records())

    async def _engine(self, request: Request) -> Response:
        refusal = self._control_refusal(request)
        if refusal is not None:
            return refusal
        return _json(*await self._call_engine(request, request.path_params["name"], await request.body()))

    async def _adapters(self, request: Request) -> Response:
        """Serve LoRA adapters as resources, mapped to the engine routes for adapters."""
        refusal = self._control_refusal(request)
        if refusal is not None:
            return refusal
        body = await request.body()
        if request.method == "DELETE":
            body = json.dumps({"lora_name": request.path_params.get("name", "")}).encode()
        status, value = await self._call_engine(request, ADAPTER_ROUTES[request.method], body)
        if status == 200 and value.get("status") == "error":
            status = 400
        return _json(status, value)

    def _control_refusal(self, request: Request) -> Response | None:
        """Return the refusal of a control request: without an admin key, or HEAD, which Starlette allows with GET."""
        if request.method == "HEAD":
            return _wrong_method(request, HTTPException(405))
        if not self._admin_keys or is_one_of(presented_key(request.headers), self._admin_keys):
            return None
        message = f"{_path_of(request)} requires a key of {ADMIN_API_KEYS}"
        return _json(401, {"error": "Unauthorized", "message": message})

    async def _call_engine(self, request: Request, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the result of an engine route."""
        route = self._routes.get(name)
        if route is None:
            return _not_found(request)
        try:
            value = json.loads(body) if body else {}
        except ValueError as error:
            return 400, {"error": "Invalid JSON", "message": str(error)}
        try:
            return 200, await route(value)
        except Exception as error:  # Request boundary: the operator gets an answer, whatever failed.
            logger.exception("engine route %s failed", name)
            return 500, {"error": "Handler error", "message": f"{type(error).__name__}: {error}"}

    async def _file_or_not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = self.files.get(_path_of(request)) if request.method in {"GET", "HEAD"} else None
        if path is None:
            await _json(*_not_found(request))(scope, receive, send)
            return
        try:
            file = await asyncio.to_thread(open, path, "rb")
        except OSError as error:
            logger.error("failed to read model asset %s: %s", path, error.strerror)  # noqa: TRY400 - one line
            await plain_text(404, "File not found")(scope, receive, send)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            headers = {"content-type": "application/octet-stream", "content-length": str(size)}
            content = _chunks(file, 0 if request.method == "HEAD" else size)
            await StreamingResponse(content, headers=headers)(scope, receive, send)


async def _chunks(file: BinaryIO, size: int) -> AsyncIterator[bytes]:
    """Yield `size` bytes in chunks, so that memory is independent of the file's size and of the client's speed.

    A file that shrinks yields fewer; the server then closes the connection before the announced length.
    """
    while size > 0 and (data := await asyncio.to_thread(file.read, min(FILE_CHUNK_BYTES, size))):
        size -= len(data)
        yield data


def _path_of(request: Request) -> str:
    """Return the path as the client sent it, percent-encoded."""
    return bytes(request.scope.get("raw_path") or request.url.path.encode()).decode("latin-1")


def _not_found(request: Request) -> tuple[int, dict[str, Any]]:
    return 404, {"error": "Route not found", "message": f"Route {_path_of(request)} not found"}


def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = plain_text(405, f"{request.method} is not allowed on {_path_of(request)}")
    response.headers.update(error.headers or {})
    return response


def _failed(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised: bad engine metrics fail one scrape, not the process."""
    return plain_text(500, "Internal error")


def _json(status: int, value: dict[str, Any]) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
