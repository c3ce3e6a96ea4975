"""A scripted HTTP server of an OpenAI-compatible engine."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.settle import turns, until


@dataclass
class ReceivedRequest:
    """A request as the server received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The client closed its connection."""

    async def answer(self, body: Any, status: int = 200, kind: str = "application/json") -> None:
        """Send a complete response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    async def begin(self) -> None:
        """Begin a stream."""
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())

    async def send_event(self, *events: Any) -> None:
        for event in events:
            data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def finish(self) -> None:
        await self.send_event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")


Serve = Callable[[ReceivedRequest], Awaitable[None]]


class Server:
    """An HTTP server whose pages are functions."""

    def __init__(self) -> None:
        self.pages: dict[str, Serve] = {}
        self.received_requests: list[ReceivedRequest] = []
        self.url = ""
        self._writers: list[asyncio.StreamWriter] = []

    def page(self, path: str, body: Any, status: int = 200) -> None:
        """Return a page with constant content."""

        async def serve(requested: ReceivedRequest) -> None:
            await requested.answer(body, status, "text/plain" if isinstance(body, bytes) else "application/json")

        self.pages[path] = serve

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while line := (await reader.readline()).decode():
            method, path, _ = line.split()
            headers: dict[str, str] = {}
            while header := (await reader.readline()).decode().strip():
                name, _, value = header.partition(":")
                headers[name.lower()] = value.strip()
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            requested = ReceivedRequest(method, path, headers, json.loads(body) if body else None, writer)
            self.received_requests.append(requested)
            found = self.pages.get(path)
            if found is None:
                await requested.answer({"error": {"message": "no such page"}}, 404)
                continue
            watch = asyncio.ensure_future(self._watch(reader, requested))
            await found(requested)
            watch.cancel()
        writer.close()

    @staticmethod
    async def _watch(reader: asyncio.StreamReader, requested: ReceivedRequest) -> None:
        await until(reader.at_eof)
        requested.left.set()

    def sent_at_s(self, path: str) -> list[ReceivedRequest]:
        return [one for one in self.received_requests if one.path == path]

    def hang_up(self) -> None:
        """Close every connection, including those in use."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def running(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        listening.close()
        made.hang_up()
        await turns()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running() as made:
        made.page("/health", b"")
        made.page("/v1/models", {"data": [{"id": "theirs", "owned_by": "someone"}]})
        yield made
