"""HTTP client: requests to one server over reused connections, with streamed responses.

    async with client.ask("POST", "/v1/completions", body, headers) as answer:
        while (events := await answer.events()) is not None: ...

Leaving the block before the end of the response closes the connection at once, which cancels the request at the server.
"""

import asyncio
import os
import ssl
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httptools

from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, ResponseTimeout

READ_BYTES = 1 << 16
EVENT_BYTES_MAX = 8 << 20  # Limit of one event; a server that never ends an event would fill the memory.
BODY_BYTES_MAX = 256 << 20  # Limit of a response that is read whole; thousands of embeddings take a tenth of it.
BODILESS = frozenset({204, 304})

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of one request, in seconds."""

    connect_s: float
    first_s: float
    """From the request to the first byte of the response."""
    between_s: float
    """Between two pieces of the response."""


class _Parsed:
    """Parser output that has not been consumed."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.headers: dict[str, str] = {}
        self.has_headers = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection ends the body."""
        if not self.has_headers or self.is_complete:
            return False
        return not {"content-length", "transfer-encoding"} & self.headers.keys()


class HttpAnswer:
    """The response to one request."""

    def __init__(self, reader: asyncio.StreamReader, deadlines: Deadlines) -> None:
        self._reader = reader
        self._deadlines = deadlines
        self._parsed = _Parsed()
        self._parser = httptools.HttpResponseParser(self._parsed)
        self._rest = bytearray()
        self.has_begun = False
        """Whether the first byte arrived."""
        self.is_whole = False
        """Whether the whole response arrived."""

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def headers(self) -> Mapping[str, str]:
        """Header values by lower-case name."""
        return self._parsed.headers

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection can be used for another request."""
        parsed = self._parsed
        says_close = parsed.headers.get("connection", "").lower() == "close" or self._parser.get_http_version() != "1.1"
        return self.is_whole and not parsed.ends_with_connection and not says_close

    async def begin(self) -> None:
        """Return when status and headers have arrived. Raises as `part`."""
        while not self._parsed.has_headers:
            await self._feed()

    async def part(self) -> bytes | None:
        """Return the body bytes received since the last call; None at the end.

        Raises `ResponseTimeout` if none arrive in time, `Disconnected` if the response is incomplete.
        """
        parsed = self._parsed
        while not parsed.body:
            if parsed.is_complete or self.is_whole:
                self.is_whole = True
                return None
            await self._feed()
        found = bytes(parsed.body)
        parsed.body.clear()
        return found

    async def read(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """Return the whole body. Raises `Disconnected` if it exceeds `bytes_max`."""
        found = bytearray()
        while (part := await self.part()) is not None:
            found += part
            if len(found) > bytes_max:
                raise Disconnected(f"the response exceeds {bytes_max} bytes")
        return bytes(found)

    async def events(self) -> list[bytes] | None:
        """Return the data of the server-sent events received since the last call (may be empty); None at the end."""
        part = await self.part()
        if part is None:
            return None
        rest = self._rest
        rest += part.replace(b"\r", b"") if b"\r" in part else part  # JSON text contains no unescaped CR.
        end = rest.rfind(b"\n\n")
        if end < 0:
            if len(rest) > EVENT_BYTES_MAX:
                raise Disconnected(f"a server-sent event exceeds {EVENT_BYTES_MAX} bytes")
            return []
        whole = bytes(rest[:end])
        del rest[: end + 2]
        return [line[5:].strip() for line in whole.split(b"\n") if line.startswith(b"data:")]

    async def _feed(self) -> None:
        """Read from the connection once."""
        limit_s = self._deadlines.between_s if self.has_begun else self._deadlines.first_s
        try:
            async with asyncio.timeout(limit_s):
                data = await self._reader.read(READ_BYTES)
        except TimeoutError:
            raise ResponseTimeout(f"no data for {limit_s:g} s") from None
        if not data:
            if self._parsed.ends_with_connection:
                self.is_whole = True
                return
            raise Disconnected("the server closed the connection before the end of the response")
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Disconnected(f"the response is not valid HTTP: {error}") from None
        if self._parsed.has_headers and self.status in BODILESS:
            self._parsed.is_complete = True


class HttpClient:
    """Client of the server at one URL. Call `close` when done."""

    def __init__(
        self,
        url: str,
        deadlines: Deadlines,
        *,
        setting: str = "--url",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare a client; `headers` are sent with every request, `tls` replaces the system's certificate authorities.

        Raises `ConfigError` that names the `setting` for an invalid URL.
        """
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ConfigError(f"{setting} {url!r}: expected something like http://localhost:8000")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._deadlines = deadlines
        authority = f"[{self._host}]" if ":" in self._host else self._host
        self.authority = f"{authority}:{self._port}"
        """Host and port."""
        self._head = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: deque[Connection] = deque()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.popleft()[1].close()

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
    ) -> AsyncIterator[HttpAnswer]:
        """Send one request; the block begins when status and headers of the response have arrived.

        Raises `CannotConnect`, `Disconnected` and `ResponseTimeout`.
        """
        limits = deadlines or self._deadlines
        sent = self._request(method, path, body, headers or {})
        connection, answer = await self._begin(sent, limits)
        try:
            yield answer
        except OSError as error:
            raise Disconnected(f"the connection broke: {error}") from None
        finally:
            if answer.keeps_connection:
                self._idle.append(connection)
            else:
                connection[1].close()

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\nhost: {self.authority}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{self._head}"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{head}\r\n".encode("latin-1") + body

    async def _begin(self, sent: bytes, limits: Deadlines) -> tuple[Connection, HttpAnswer]:
        """Send a request; retry if a reused idle connection is closed, which is not a failure of the server."""
        while True:
            connection = self._idle_connection()
            was_idle = connection is not None
            connection = connection or await self._connect(limits.connect_s)
            answer = HttpAnswer(connection[0], limits)
            try:
                connection[1].write(sent)
                await answer.begin()
            except (OSError, Disconnected) as error:
                connection[1].close()
                if was_idle and not answer.has_begun:
                    continue
                raise Disconnected(f"the connection broke: {error}") from None
            except BaseException:
                connection[1].close()
                raise
            return connection, answer

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection[0].at_eof() and not connection[1].is_closing():
                return connection
            connection[1].close()
        return None

    async def _connect(self, limit_s: float) -> Connection:
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ_BYTES)
        except TimeoutError:
            raise CannotConnect(f"no connection to {self.authority} within {limit_s:g} s") from None
        except OSError as error:
            raise CannotConnect(f"no connection to {self.authority}: {_why(error)}") from None


def _why(error: OSError) -> str:
    """Return the system's error text, which asyncio replaces; TLS errors have other numbers and keep their text."""
    is_systems = error.errno is not None and error.errno > 0 and not isinstance(error, ssl.SSLError)
    return os.strerror(error.errno) if is_systems and error.errno is not None else str(error)
