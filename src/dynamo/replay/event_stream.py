"""EventStream: server-sent events of an HTTP server, each as it comes, over connections that are used again."""

import asyncio
import contextlib
import ssl
import urllib.parse
from collections import deque
from collections.abc import AsyncGenerator, Mapping

import httptools

from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, HttpError, ResponseTimeout

READ_BYTES = 1 << 16
EVENT_BYTES_MAX = 1 << 20  # Of an event that has no end: a server that never ends one would fill the memory.
ERROR_CHARS = 300


class _Answer:
    """What the parser has found and nobody has taken."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.has_headers = False
        self.is_complete = False

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EventStream:
    """A server at a URL. `close` when done."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises `ConfigError` for a URL that is none. `timeout_s`: the longest silence."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ConfigError(f"--url {url!r}: expected something like http://localhost:8000")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._idle: deque[Connection] = deque()

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        while self._idle:
            self._idle.popleft()[1].close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The data of each event of the answer. Raises what `core.errors` has for a server that fails or is silent."""
        async with contextlib.aclosing(self._ask("POST", path, body, headers)) as parts:
            rest = bytearray()
            async for part in parts:
                rest += part.replace(b"\r", b"")  # Inside of JSON it is never bare.
                while (end := rest.find(b"\n\n")) >= 0:
                    event = bytes(rest[:end])
                    del rest[: end + 2]
                    for line in event.splitlines():
                        if line.startswith(b"data:"):
                            yield line[5:].strip()
                if len(rest) > EVENT_BYTES_MAX:
                    raise Disconnected(f"an event of more than {EVENT_BYTES_MAX} bytes")

    async def get(self, path: str) -> bytes:
        """A whole answer."""
        found = bytearray()
        async with contextlib.aclosing(self._ask("GET", path, b"", {})) as parts:
            async for part in parts:
                found += part
        return bytes(found)

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        head = [f"{method} {self._path}{path} HTTP/1.1", f"host: {self._host}:{self._port}"]
        head += ["content-type: application/json", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        sent = "\r\n".join([*head, "", ""]).encode("latin-1") + body
        connection = await self._connect()
        is_whole = False
        try:
            connection[1].write(sent)
            async for part in self._read(connection[0]):
                yield part
            is_whole = True
        except OSError as error:
            raise Disconnected(f"the connection broke: {error}") from None
        finally:
            if is_whole:
                self._idle.append(connection)
            else:
                connection[1].close()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection[0].at_eof() and not connection[1].is_closing():
                return connection
            connection[1].close()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ_BYTES)
        except TimeoutError:
            raise CannotConnect(f"no connection to {self._host}:{self._port} within {self._timeout_s:g} s") from None
        except OSError as error:
            raise CannotConnect(f"no connection to {self._host}:{self._port}: {error.strerror or error}") from None

    async def _read(self, reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        refused = bytearray()
        while not answer.is_complete:
            try:
                async with asyncio.timeout(self._timeout_s):
                    data = await reader.read(READ_BYTES)
            except TimeoutError:
                raise ResponseTimeout(f"nothing came for {self._timeout_s:g} s") from None
            if not data:
                raise Disconnected("the server closed the connection before the answer's end")
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise Disconnected(f"no HTTP came back: {error}") from None
            part = bytes(answer.body)
            answer.body.clear()
            if not answer.has_headers:
                continue
            if parser.get_status_code() >= 400:
                refused += part
            elif part:
                yield part
        if parser.get_status_code() >= 400:
            raise HttpError(parser.get_status_code(), refused.decode("utf-8", "replace")[:ERROR_CHARS])
