"""System server: `/health`, `/live`, `/metrics`, engine routes and model assets of one process.

A minimal HTTP/1.1 server on the event loop, so that a worker needs no web framework. It serves only registered files,
each under its own path: a request's path is looked up and never joined to a directory.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

from dynamo.core.api_keys import ADMIN_API_KEYS, is_one_of, presented_key
from dynamo.core.config import setting
from dynamo.core.listening import listen_error
from dynamo.core.metrics import CONTENT_TYPE, MetricsRegistry
from dynamo.core.openmetrics import negotiated
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.health import SystemHealth

logger = logging.getLogger(__name__)

EngineRoute = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

HEAD_BYTES_MAX = 16_384
BODY_BYTES_MAX = 1 << 20
IDLE_S = 30.0  # Timeout for a connection without a request, and for a client that does not read a file.
CONNECTIONS_MAX = 256  # Enough for probes, scrapers and every frontend of a large cluster.
FILE_CHUNK_BYTES = 1 << 18
ENGINE_METHODS = frozenset({"GET", "POST"})
ADAPTERS = "/v1/loras"
ADAPTER_ROUTES = {"GET": "list_loras", "POST": "load_lora", "DELETE": "unload_lora"}
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Payload Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

Answer = tuple[int, str, str]
"""Status, content type, body."""


class SystemServer:
    """HTTP server for the state of one process."""

    def __init__(
        self,
        health: SystemHealth,
        metrics: MetricsRegistry,
        routes: Mapping[str, EngineRoute],
        files: Mapping[str, str] | None = None,
        admin_keys: Sequence[str] = (),
    ) -> None:
        """Create the server; with `admin_keys`, engine routes and adapters require one of them."""
        self._admin_keys = admin_keys
        self._health = health
        self._metrics = metrics
        self._routes = routes
        self.files = {} if files is None else files
        """File of each model asset path; looked up at every request."""
        self._health_paths = {
            setting("DYN_SYSTEM_HEALTH_PATH", "/health", str),
            setting("DYN_SYSTEM_LIVE_PATH", "/live", str),
        }
        self._server: asyncio.Server | None = None
        self.tasks = TaskOwner("system")
        self.connections: set[_Connection] = set()

    @property
    def port(self) -> int:
        assert self._server is not None, "port before listen()"
        return int(self._server.sockets[0].getsockname()[1])

    async def listen(self, host: str, port: int) -> None:
        """Open the port. Raises `StartupError` when it is in use."""
        try:
            self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, port)
        except OSError as error:
            raise listen_error(f"DYN_SYSTEM_PORT={port}", host, error) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()
        await self.tasks.cancel_and_wait()

    async def answer(self, method: str, path: str, body: bytes, key: str | None = None) -> Answer:
        """Return the response to a request that carries `key`, None for no key."""
        if path in self._health_paths:
            return (200 if self._health.is_ready() else 503), "text/plain", self._health.render()
        if path == "/metrics":
            return 200, CONTENT_TYPE, self._metrics.render()
        if path == "/metadata":
            return 404, "text/plain", "Discovery metadata not available"
        is_adapters = path == ADAPTERS or path.startswith(f"{ADAPTERS}/")
        is_engine = path.startswith("/engine/")
        if (is_engine or is_adapters) and self._admin_keys and not is_one_of(key, self._admin_keys):
            return _json(401, {"error": "Unauthorized", "message": f"{path} requires a key of {ADMIN_API_KEYS}"})
        if is_engine:
            if method not in ENGINE_METHODS:
                return 405, "text/plain", f"{method} is not allowed on {path}"
            return await self._engine(path.removeprefix("/engine/"), path, body)
        if is_adapters:
            return await self._adapters(method, path, body)
        return _json(404, {"error": "Route not found", "message": f"Route {path} not found"})

    async def _adapters(self, method: str, path: str, body: bytes) -> Answer:
        """Serve LoRA adapters as resources, mapped to the engine routes for adapters."""
        name = ADAPTER_ROUTES.get(method)
        if name is None:
            return 405, "text/plain", f"{method} is not allowed on {path}"
        if method == "DELETE":
            body = json.dumps({"lora_name": unquote(path.removeprefix(f"{ADAPTERS}/"))}).encode()
        status, kind, text = await self._engine(name, path, body)
        if status == 200 and json.loads(text).get("status") == "error":
            status = 400
        return status, kind, text

    async def _engine(self, name: str, path: str, body: bytes) -> Answer:
        route = self._routes.get(name)
        if route is None:
            return _json(404, {"error": "Route not found", "message": f"Route {path} not found"})
        try:
            value = json.loads(body) if body else {}
        except ValueError as error:
            return _json(400, {"error": "Invalid JSON", "message": str(error)})
        try:
            return _json(200, await route(value))
        except Exception as error:
            logger.exception("engine route %s failed", name)
            return _json(500, {"error": "Handler error", "message": f"{type(error).__name__}: {error}"})


class _Connection(asyncio.Protocol):
    """One HTTP connection; requests are handled in order."""

    def __init__(self, server: SystemServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._is_answering = False
        self._is_half_closed = False
        self._accept = ""
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._server.connections) >= CONNECTIONS_MAX:
            self._refuse(503, "too many connections")
            return
        self._server.connections.add(self)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        """Stop writing: the client reads slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Continue writing."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._is_answering:
            self._next()
        elif len(self._data) > HEAD_BYTES_MAX + BODY_BYTES_MAX and self._transport is not None:
            self._transport.abort()  # The client sends requests without reading responses.

    def eof_received(self) -> bool:
        """Keep the connection for the response to a whole request; without one, it is closed."""
        self._is_half_closed = True
        return self._is_answering

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    def _next(self) -> None:
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            if len(self._data) > HEAD_BYTES_MAX:
                self._refuse(400, "request head too long")
            return
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._refuse(400, "not an HTTP/1.1 request")
            return
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length_text = headers.get("content-length", "0")
        if not length_text.isdigit() or int(length_text) > BODY_BYTES_MAX:
            self._refuse(413, "request body too long")
            return
        length = int(length_text)
        if len(rest) < length:
            return
        body, self._data = rest[:length], rest[length:]
        keeps = headers.get("connection", "").lower() != "close" and words[2] == "HTTP/1.1"
        self._is_answering = True
        self._accept = headers.get("accept", "")
        key = presented_key(headers)
        self._server.tasks.start(self._answer(words[0], words[1].partition("?")[0], body, keeps, key), "answer")

    async def _answer(self, method: str, path: str, body: bytes, keeps: bool, key: str | None) -> None:
        if self._timer is not None:
            self._timer.cancel()  # The idle timeout covers the wait for a request, not the response.
        if path in self._server.files and method in {"GET", "HEAD"}:
            await self._answer_file(method, self._server.files[path])
        else:
            status, kind, text = await self._judge(method, path, body, key)
            if kind == CONTENT_TYPE:
                kind, text = negotiated(self._accept, text)
            self._write(status, kind, text.encode(), is_head=method == "HEAD")
        self._is_answering = False
        if not keeps or (self._is_half_closed and not self._data):
            self.close()
            return
        self._wait()
        if self._data:
            self._next()

    async def _judge(self, method: str, path: str, body: bytes, key: str | None) -> Answer:
        """Return the response, 500 after an exception: bad engine metrics fail one scrape, not the connection."""
        try:
            return await self._server.answer(method, path, body, key)
        except Exception:
            logger.exception("%s %s failed", method, path)
            return 500, "text/plain", "Internal error"

    async def _answer_file(self, method: str, path: str) -> None:
        """Send the file in chunks, so that memory is independent of its size and of the client's speed."""
        try:
            file = await asyncio.to_thread(open, path, "rb")
        except OSError as error:
            logger.error("failed to read model asset %s: %s", path, error.strerror)  # noqa: TRY400 - one line
            self._write(404, "text/plain", b"File not found")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if self._transport is not None:
                self._transport.write(_head(200, "application/octet-stream", size))
            if method == "GET":
                await self._send(file, size)

    async def _send(self, file: BinaryIO, size: int) -> None:
        """Send exactly `size` bytes; stop after `IDLE_S` without progress or when the file shrinks."""
        sent = 0
        try:
            while sent < size and self._transport is not None:
                data = await asyncio.to_thread(file.read, min(FILE_CHUNK_BYTES, size - sent))
                if not data or self._transport is None:
                    break
                self._transport.write(data)
                sent += len(data)
                async with asyncio.timeout(IDLE_S):
                    await self._writable.wait()
        except TimeoutError:
            logger.info("model asset transfer timed out: the client stopped reading")
        except OSError as error:
            logger.error("failed to read model asset: %s", error.strerror)  # noqa: TRY400 - one line is enough
        if sent < size and self._transport is not None:
            self._transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        self._write(status, "text/plain", message.encode())
        self.close()

    def _write(self, status: int, kind: str, body: bytes, *, is_head: bool = False) -> None:
        if self._transport is not None:
            head = _head(status, kind, len(body))
            self._transport.write(head if is_head else head + body)


def _head(status: int, kind: str, length: int) -> bytes:
    reason = REASONS.get(status, "Error")
    return f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()


def _json(status: int, value: dict[str, Any]) -> Answer:
    return status, "application/json", json.dumps(value)
