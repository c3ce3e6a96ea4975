"""HTTP client: requests to one server, with streamed responses, deadlines and bounded bodies.

    async with HttpClient(url, deadlines).request("POST", "/v1/completions", body, headers) as response:
        while (events := await response.events()) is not None: ...

    with BlockingHttpClient(url, deadlines).request("GET", "/v1/models") as response:
        body = response.read()

Leaving the block before the end of the response closes the connection at once, which cancels the request at the server.
Every failure is a `WorkerUnavailable`: `CannotConnect`, `Disconnected` or `ResponseTimeout`.
"""

import asyncio
import os
import socket
import ssl
import threading
import urllib.parse
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httptools
from msgspec import Struct

from dynamo.core.boundaries import Rollback
from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, ResponseTimeout

READ_BYTES = 1 << 16
HEAD_BYTES_MAX = 1 << 18  # Limit of status line and headers.
EVENT_BYTES_MAX = 8 << 20  # Limit of one event; a server that never ends an event would fill the memory.
BODY_BYTES_MAX = 256 << 20  # Limit of a response that is read whole; thousands of embeddings take a tenth of it.
CLOSE_S = 1.0
BODILESS = frozenset({204, 304})
BODILESS_METHODS = frozenset({"GET", "HEAD"})
"""Methods whose requests have no body unless one is given."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


class Deadlines(Struct, frozen=True):
    """Timeouts of one request, in seconds."""

    connect_s: float
    first_s: float | None
    """From the request to the first byte of the response; None for no limit."""
    between_s: float | None
    """Between two pieces of the response."""
    whole_s: float | None = None
    """From the request to the end of its response."""


class _Parsed:
    """Parser output that has not been consumed. An interim response (1xx) is ignored."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_headers = False
        self.is_complete = False
        self._parser: Any = None

    def parser(self) -> Any:
        """Return the parser that calls the `on_` methods."""
        self._parser = httptools.HttpResponseParser(self)
        return self._parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
        else:
            self.has_headers = True
            self._parser = None  # Ends the reference cycle.

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = self.has_headers

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection ends the body."""
        if not self.has_headers or self.is_complete:
            return False
        return not {"content-length", "transfer-encoding"} & self.headers.keys()


class _ResponseState:
    """State of one response, without I/O."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._parsed = _Parsed()
        self._parser = self._parsed.parser()
        self._head_bytes = 0
        self._rest = bytearray()
        self.has_begun = False
        """Whether the first byte arrived."""
        self.is_whole = False
        """Whether the whole response arrived."""

    @property
    def status(self) -> int:
        return self._parsed.status

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

    @property
    def _wait_s(self) -> float | None:
        """Maximum wait for the next bytes."""
        return self._deadlines.between_s if self.has_begun else self._deadlines.first_s

    def _receive(self, data: bytes) -> None:
        """Process bytes of the connection; none mark its end. Raise `Disconnected`."""
        parsed = self._parsed
        if not data:
            if parsed.ends_with_connection:
                self.is_whole = True
                return
            raise Disconnected("the connection was closed before the end of the response")
        self.has_begun = True
        if not parsed.has_headers:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX + READ_BYTES:
                raise Disconnected(f"the headers of the response exceed {HEAD_BYTES_MAX} bytes")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise Disconnected(f"the response is not valid HTTP: {error}") from None
        if parsed.has_headers and self.status in BODILESS:
            parsed.is_complete = True

    def _take(self) -> bytes | None:
        """Return the body bytes received since the last call, empty if more must be read; None at the end."""
        parsed = self._parsed
        if not parsed.body and (parsed.is_complete or self.is_whole):
            self.is_whole = True
            return None
        found = bytes(parsed.body)
        parsed.body.clear()
        return found

    def _split_events(self, part: bytes) -> list[bytes]:
        """Return the data of the server-sent events that are complete with `part`."""
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


class HttpResponse(_ResponseState):
    """The response to one request."""

    def __init__(self, reader: asyncio.StreamReader, deadlines: Deadlines) -> None:
        super().__init__(deadlines)
        self._reader = reader

    async def begin(self) -> None:
        """Return when status and headers have arrived. Raises as `part`."""
        while not self._parsed.has_headers:
            await self._feed()

    async def part(self) -> bytes | None:
        """Return the body bytes received since the last call; None at the end.

        Raises `ResponseTimeout` if none arrive in time, `Disconnected` if the response is incomplete.
        """
        while (part := self._take()) == b"":
            await self._feed()
        return part

    async def read(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """Return the whole body. Raises `Disconnected` if it exceeds `bytes_max`."""
        found = bytearray()
        while (part := await self.part()) is not None:
            found += part
            _check_size(found, bytes_max)
        return bytes(found)

    async def events(self) -> list[bytes] | None:
        """Return the data of the server-sent events received since the last call (may be empty); None at the end."""
        part = await self.part()
        return None if part is None else self._split_events(part)

    async def _feed(self) -> None:
        """Read from the connection once."""
        try:
            async with asyncio.timeout(self._wait_s):
                data = await self._reader.read(READ_BYTES)
        except TimeoutError:
            raise ResponseTimeout(f"no data for {self._wait_s:g} s") from None
        self._receive(data)


class BlockingResponse(_ResponseState):
    """The response to one request, read in the caller's thread. The methods are those of `HttpResponse`."""

    def __init__(self, connection: socket.socket, deadlines: Deadlines) -> None:
        super().__init__(deadlines)
        self._connection = connection

    def begin(self) -> None:
        while not self._parsed.has_headers:
            self._feed()

    def part(self) -> bytes | None:
        while (part := self._take()) == b"":
            self._feed()
        return part

    def read(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        found = bytearray()
        while (part := self.part()) is not None:
            found += part
            _check_size(found, bytes_max)
        return bytes(found)

    def events(self) -> list[bytes] | None:
        part = self.part()
        return None if part is None else self._split_events(part)

    def _feed(self) -> None:
        try:
            self._connection.settimeout(self._wait_s)
            data = self._connection.recv(READ_BYTES)
        except TimeoutError:
            raise ResponseTimeout(f"no data for {self._wait_s:g} s") from None
        except OSError as error:
            raise Disconnected(f"the connection broke: {_why(error)}") from None
        self._receive(data)


class _ServerAddress:
    """The server at one URL, and the head of requests to it."""

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
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._deadlines = deadlines
        authority = f"[{self._host}]" if ":" in self._host else self._host
        self.authority = f"{authority}:{self._port}"
        """Host and port."""
        is_default_port = self._port == (443 if self._tls else 80)
        self._host_header = authority if is_default_port else self.authority
        self._head = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\nhost: {self._host_header}\r\n{self._head}"
        if body or method not in BODILESS_METHODS:
            head += f"content-length: {len(body)}\r\n"
            if not any(name.lower() == "content-type" for name in headers):
                head += "content-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{head}\r\n".encode("latin-1") + body

    def _cannot_connect(self, error: OSError, limit_s: float) -> CannotConnect:
        if isinstance(error, TimeoutError):
            return CannotConnect(f"no connection to {self.authority} within {limit_s:g} s")
        return CannotConnect(f"no connection to {self.authority}: {_why(error)}")


class HttpClient(_ServerAddress):
    """Client of the server at one URL, over reused connections. Call `close` when done."""

    def __init__(
        self,
        url: str,
        deadlines: Deadlines,
        *,
        setting: str = "--url",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        connect: Connect | None = None,
    ) -> None:
        """`connect` opens connections in place of one to the URL's host; its errors are raised as they are."""
        super().__init__(url, deadlines, setting=setting, headers=headers, tls=tls)
        self._dial = connect
        self._idle: deque[Connection] = deque()
        self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        """Writers of the connections that are open or being closed."""

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.popleft()[1].close()

    async def closed(self) -> None:
        """Close the idle connections, and return when all that were closed are: an event loop must not end before."""
        while self._idle:
            self._end(self._idle.popleft()[1])
        closing = [writer.wait_closed() for writer in self._writers if writer.is_closing()]
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*closing, return_exceptions=True)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
    ) -> AsyncIterator[HttpResponse]:
        """Send one request; the block begins when status and headers of the response have arrived.

        Raises `CannotConnect`, `Disconnected` and `ResponseTimeout`.
        """
        limits = deadlines or self._deadlines
        sent = self._request(method, path, body, headers or {})
        try:
            async with asyncio.timeout(limits.whole_s) as whole:
                connection, response = await self._begin(sent, limits)
                try:
                    yield response
                finally:
                    if response.keeps_connection:
                        self._idle.append(connection)
                    else:
                        self._end(connection[1])
        except OSError as error:
            if whole.expired():
                raise ResponseTimeout(f"no complete response within {limits.whole_s:g} s") from None
            raise Disconnected(f"the connection broke: {error}") from None

    async def _begin(self, sent: bytes, limits: Deadlines) -> tuple[Connection, HttpResponse]:
        """Send a request; retry if a reused idle connection is closed, which is not a failure of the server."""
        while True:
            connection = self._idle_connection()
            was_idle = connection is not None
            if connection is None:
                connection = await self._connect(limits.connect_s)
                self._writers.add(connection[1])
            response = HttpResponse(connection[0], limits)
            with Rollback(lambda writer=connection[1]: self._end(writer)):  # type: ignore[misc]
                try:
                    connection[1].write(sent)
                    await response.begin()
                except (OSError, Disconnected) as error:
                    if not was_idle or response.has_begun:
                        raise Disconnected(f"the connection broke: {error}") from None
                else:
                    return connection, response
            connection[1].close()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection without the exchange of TLS closes, which may take as long as the server likes."""
        if self._tls is None:
            writer.close()
        else:
            writer.transport.abort()

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection[0].at_eof() and not connection[1].is_closing():
                return connection
            connection[1].close()
        return None

    async def _connect(self, limit_s: float) -> Connection:
        if self._dial is not None:
            return await self._dial()
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ_BYTES)
        except OSError as error:
            raise self._cannot_connect(error, limit_s) from None


class BlockingHttpClient(_ServerAddress):
    """Client of the server at one URL for threads and commands; each request has its own connection."""

    @contextmanager
    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Iterator[BlockingResponse]:
        """Send one request; as `HttpClient.request`."""
        limits = self._deadlines
        connection = self._connect(limits.connect_s)
        late = threading.Event()
        timer = None if limits.whole_s is None else _shutdown_later(connection, limits.whole_s, late)
        response = BlockingResponse(connection, limits)
        try:
            try:
                connection.sendall(self._request(method, path, body, {"connection": "close", **(headers or {})}))
            except OSError as error:
                raise Disconnected(f"the connection broke: {_why(error)}") from None
            response.begin()
            yield response
        except Disconnected:
            if late.is_set():
                raise ResponseTimeout(f"no complete response within {limits.whole_s:g} s") from None
            raise
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def _connect(self, limit_s: float) -> socket.socket:
        try:
            connection = socket.create_connection((self._host, self._port), limit_s)
            if self._tls is None:
                return connection
            with Rollback(connection.close):
                return self._tls.wrap_socket(connection, server_hostname=self._host)
        except OSError as error:
            raise self._cannot_connect(error, limit_s) from None


def _shutdown_later(connection: socket.socket, after_s: float, late: threading.Event) -> threading.Timer:
    """Start a timer that shuts the connection down, which ends reads from it."""

    def end() -> None:
        late.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
    return timer


def _check_size(body: bytearray, bytes_max: int) -> None:
    if len(body) > bytes_max:
        raise Disconnected(f"the response exceeds {bytes_max} bytes")


def _why(error: OSError) -> str:
    """Return the system's error text, which asyncio replaces; TLS errors have other numbers and keep their text."""
    is_systems = error.errno is not None and error.errno > 0 and not isinstance(error, ssl.SSLError)
    return os.strerror(error.errno) if is_systems and error.errno is not None else str(error)
