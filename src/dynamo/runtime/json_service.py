"""JsonService: a small HTTP service: a table of routes, JSON in, JSON out (serving-plane.md §4.12).

    routes = JsonRoutes()
    routes.add("POST", "/add", tracker.add, AddRequest)            # handler(call) -> (status, what msgspec encodes)
    server = JsonServer(routes); await server.start(socket); ...; await server.stop()

A handler raises `HttpError` for a status of its own; its message is the body's `error`.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError, HttpError
from dynamo.core.listening import listen_error

logger = logging.getLogger(__name__)

BODY_MAX = 64 << 20  # A prompt of a million tokens in JSON is some 8 MB.
KEEP_ALIVE_S = 75.0
DRAIN_S = 5.0
POLL_S = 0.01

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
class Text:
    """A body that is not JSON."""

    text: str
    content_type: str = TEXT_TYPE


Handler = Callable[[HttpCall[Any]], Awaitable[tuple[int, Any]]]
"""Status, and what is encoded: None has no body."""
Observer = Callable[["Served"], None]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered."""

    method: str
    route: str
    """The route's path; that of the request where there is no route."""
    status: int
    seconds: float
    headers: Mapping[str, str]
    is_routed: bool = True
    """Whether there is such a route."""


@dataclass(frozen=True, slots=True)
class _Entry:
    handler: Handler
    decode: "Callable[[bytes], Any] | None"
    path: str


class JsonRoutes:
    """What a service answers."""

    def __init__(self, *, errors_as_text: bool = False, names_missing_routes: bool = True) -> None:
        """`errors_as_text`: a body that cannot be read is answered with plain text; `names_missing_routes`: a 404 has a body."""
        self._exact: dict[str, dict[str, _Entry]] = {}
        self._open: list[tuple[str, str, dict[str, _Entry]]] = []
        """Paths with a variable segment: the parts before and after it."""
        self._errors_as_text = errors_as_text
        self._names_missing_routes = names_missing_routes
        self.observer: Observer | None = None

    def add(self, method: str, path: str, handler: Handler, body: type[Any] | None = None) -> None:
        """A route; one `{}` in the path matches any one segment."""
        decode = None if body is None else msgspec.json.Decoder(body).decode
        entry = _Entry(handler, decode, path)
        if "{}" not in path:
            self._exact.setdefault(path, {})[method] = entry
            return
        before, _, behind = path.partition("{}")
        for known_before, known_behind, methods in self._open:
            if (known_before, known_behind) == (before, behind):
                methods[method] = entry
                return
        self._open.append((before, behind, {method: entry}))

    def find(self, path: str) -> tuple[dict[str, _Entry], str] | None:
        """The entries of a path by method, and its variable part."""
        exact = self._exact.get(path)
        if exact is not None:
            return exact, ""
        for before, behind, methods in self._open:
            part = path[len(before) : len(path) - len(behind)]
            if path.startswith(before) and path.endswith(behind) and part and "/" not in part:
                return methods, unquote(part)
        return None

    async def answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Any]:
        """Status, and what is encoded."""
        began = time.perf_counter()
        found = self.find(path)
        route = path
        try:
            if found is None:
                raise HttpError(404, "route not found")  # noqa: TRY301 - all refusals are answered below
            entry = found[0].get(method)
            if entry is None:
                raise HttpError(405, "method not allowed")  # noqa: TRY301
            route = entry.path
            status, value = await entry.handler(self._call(entry, found[1], query, headers, body))
        except _Unreadable as error:
            status = error.code
            value = Text(error.message) if self._errors_as_text else {"error": error.message}
        except HttpError as error:
            status, value = error.code, {"error": error.message}
            if status in (404, 405) and (found is None or method not in found[0]) and not self._names_missing_routes:
                value = None
        except Exception:
            logger.exception("%s %s failed", method, path)
            status, value = 500, {"error": "internal error"}
        if self.observer is not None:
            is_routed = found is not None and method in found[0]
            self.observer(Served(method, route, status, time.perf_counter() - began, headers, is_routed))
        return status, value

    @staticmethod
    def _call(entry: _Entry, part: str, query: str, headers: Mapping[str, str], body: bytes) -> HttpCall[Any]:
        read: Any = None
        if entry.decode is not None:
            kind = headers.get("content-type", "")
            if not kind.startswith(JSON_TYPE):
                raise _Unreadable(415, f"Expected request with `Content-Type: {JSON_TYPE}`")
            try:
                read = entry.decode(body)
            except msgspec.ValidationError as error:
                raise _Unreadable(422, f"Failed to deserialize the JSON body into the target type: {error}") from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _Unreadable(400, f"Failed to parse the request body as JSON: {error}") from None
        return HttpCall(read, dict(parse_qsl(query, keep_blank_values=True)), part, headers)


class _Unreadable(HttpError):
    """A body that is not what the route takes."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, which also answers clients that half-closed their connection."""

    _is_half_closed = False

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for the response to a whole request; without one, it is closed."""
        cycle = self.cycle
        self._is_half_closed = cycle is not None and not cycle.response_complete and not cycle.more_body
        return self._is_half_closed

    def on_response_complete(self) -> None:
        """Go on with the next request of the connection, if it may have one."""
        super().on_response_complete()
        if self._is_half_closed and not self.pipeline and self.cycle.response_complete:
            self.transport.close()


class JsonServer:
    """Listens, and answers by a table of routes."""

    def __init__(self, routes: JsonRoutes) -> None:
        self._routes = routes
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accepts requests on a bound socket."""
        config = uvicorn.Config(
            self._application, loop="none", lifespan="off", interface="asgi3", ws="none", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=int(KEEP_ALIVE_S),
        )  # fmt: skip
        config.load()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Protocol(config, self._state, {}), sock=listener
        )

    async def stop(self) -> None:
        """Accepts no more, lets those under way end within a moment, then closes."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._state.connections:  # noqa: ASYNC110 - uvicorn keeps a set, and no event
                    await asyncio.sleep(POLL_S)

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if len(body) > BODY_MAX:
                await self._send(send, 413, {"error": f"the body is longer than {BODY_MAX} bytes"})
                return
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        status, value = await self._routes.answer(scope["method"], scope["path"], query, headers, bytes(body))
        await self._send(send, status, value)

    @staticmethod
    async def _send(send: Any, status: int, value: Any) -> None:
        headers = []
        if value is None:
            body = b""
        elif isinstance(value, Text):
            body = value.text.encode()
            headers.append((b"content-type", value.content_type.encode()))
        else:
            body = json_encode(value)
            headers.append((b"content-type", JSON_TYPE.encode()))
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def listen(port: int, host: str = "0.0.0.0") -> socket.socket:  # noqa: S104 - upstream's: peers are elsewhere
    """Return a bound socket. Raises `StartupError` for a port that is in use."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port {port}: expected 0 to 65535")
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise listen_error(f"--port {port}", host, error) from None
