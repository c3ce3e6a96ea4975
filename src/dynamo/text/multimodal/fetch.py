"""Media fetch: download of an image, a video or a sound from its URL, for components that need its bytes.

    media = await fetch("https://example.com/cat.png", accepts=("image/",))

The connection goes to the address that was checked, so that a name that resolves to another host a moment later has no
effect; every redirect is checked as well. The response is bounded in bytes, before and after decompression, and in
time. The allowed sources are defined in `text.multimodal.source`.
"""

import asyncio
import contextlib
import socket
import ssl
import urllib.parse
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httptools

from dynamo.core.errors import InvalidArgument
from dynamo.text.multimodal.source import (
    FetchLimits,
    Media,
    Remote,
    check_address,
    check_type,
    decode_data_url,
    environment_limits,
    is_data,
    local_of,
    remote_of,
    type_of,
)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolver from host and port to addresses. Raises `OSError`."""

PIECE_BYTES = 64 << 10
HEAD_BYTES_MAX = 64 << 10
ADDRESSES_MAX = 3  # Addresses of a host that are tried.
PARTIAL = 206
REDIRECTS = frozenset({301, 302, 303, 307, 308})
AGENT = "dynamo"
FAILURES = (OSError, EOFError, httptools.HttpParserError, httptools.HttpParserUpgrade)


async def fetch(
    url: str,
    limits: FetchLimits | None = None,
    *,
    accepts: tuple[str, ...] = (),
    resolve: Resolve | None = None,
    tls: ssl.SSLContext | None = None,
    head_bytes: int | None = None,
) -> Media:
    """Return the content of the URL. `accepts` lists prefixes of content types, none for all.

    With `head_bytes` only that many first bytes are requested from a remote host. `resolve` and `tls` replace the
    system's name service and certificates. Raise `InvalidArgument` if the source is not allowed, too large, too slow,
    or missing.
    """
    limits = limits or environment_limits()
    if is_data(url):
        return decode_data_url(url, limits, accepts)
    if url[:5].lower() == "file:":
        return await asyncio.to_thread(_read_file, local_of(url, limits), limits)
    one = _Fetch(limits, accepts, resolve or system_resolve, tls, head_bytes)
    try:
        async with asyncio.timeout(limits.timeout_s):
            return await one.follow(url)
    except TimeoutError:
        raise InvalidArgument(f"the media did not arrive within {limits.timeout_s:g} s") from None


class MediaFetcher:
    """Fetcher with a process-wide limit on concurrent fetches; further ones wait."""

    def __init__(
        self, limits: FetchLimits | None = None, *, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._limits = limits or environment_limits()
        self._resolve = resolve
        self._tls = tls
        self._slots = asyncio.Semaphore(self._limits.concurrency)

    async def fetch(self, url: str, *, accepts: tuple[str, ...] = ()) -> Media:
        """Fetch the content of a URL; see `fetch`."""
        async with self._slots:
            return await fetch(url, self._limits, accepts=accepts, resolve=self._resolve, tls=self._tls)


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses that the system's name service returns."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class _Fetch:
    """Fetch of one URL, with its redirects."""

    def __init__(
        self,
        limits: FetchLimits,
        accepts: tuple[str, ...],
        resolve: Resolve,
        tls: ssl.SSLContext | None,
        head_bytes: int | None = None,
    ) -> None:
        self._limits = limits
        self._head_bytes = head_bytes
        self._accepts = accepts
        self._resolve = resolve
        self._tls = tls

    async def follow(self, url: str) -> Media:
        for _ in range(self._limits.redirects_max + 1):
            remote = remote_of(url, self._limits)
            try:
                response = await self._get(remote)
            except FAILURES as error:
                raise InvalidArgument(f"{remote.host} cannot be reached: {_words(error)}") from None
            if response.status not in REDIRECTS or not response.location:
                return self._judged(response)
            try:
                url = urllib.parse.urljoin(url, response.location)
            except ValueError:
                raise InvalidArgument(f"{remote.host} redirects to an invalid URL") from None
        raise InvalidArgument(f"more than {self._limits.redirects_max} redirects")

    def _judged(self, response: "_MediaResponse") -> Media:
        if not response.is_good:
            raise InvalidArgument(f"the media's host responded with status {response.status}")
        return Media(bytes(response.body), response.content_type)

    async def _get(self, remote: Remote) -> "_MediaResponse":
        response = _MediaResponse(self._limits.file_bytes_max, self._accepts, self._head_bytes)
        part = "" if self._head_bytes is None else f"range: bytes=0-{self._head_bytes - 1}\r\n"
        async with self._connected(remote) as (reader, writer):
            writer.write(
                f"GET {remote.target} HTTP/1.1\r\nhost: {remote.authority}\r\nuser-agent: {AGENT}\r\n{part}"
                "accept: */*\r\naccept-encoding: identity\r\nconnection: close\r\n\r\n".encode("ascii")
            )
            await writer.drain()
            while not response.is_complete:
                piece = await reader.read(PIECE_BYTES)
                if not piece:
                    response.end()
                    break
                response.feed(piece)
        return response

    @contextlib.asynccontextmanager
    async def _connected(self, remote: Remote) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to an address of the host that was checked, and to no other."""
        async with asyncio.timeout(self._limits.connect_timeout_s):
            addresses = await self._resolve(remote.host, remote.port)
        if not addresses:
            raise OSError("the host has no address")
        for address in addresses:  # A single non-public address is enough to reject the name.
            check_address(address, self._limits)
        tls: Any = None
        if remote.is_tls:
            tls = self._tls or await asyncio.to_thread(ssl.create_default_context)
        reader, writer = await self._open(remote, list(dict.fromkeys(addresses))[:ADDRESSES_MAX], tls)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _open(
        self, remote: Remote, addresses: Sequence[str], tls: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        last: Exception = OSError("the host has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s):
                    name = remote.host if tls is not None else None
                    return await asyncio.open_connection(
                        address, remote.port, ssl=tls, server_hostname=name, limit=PIECE_BYTES
                    )
            except (OSError, TimeoutError) as error:
                last = error
        raise last


class _MediaResponse:
    """A response as it arrives; bytes above the limit are discarded. httptools calls its `on_` methods."""

    def __init__(self, bytes_max: int, accepts: tuple[str, ...], head_bytes: int | None = None) -> None:
        """`head_bytes`: number of bytes needed; the rest is not awaited."""
        self.status = 0
        self._wanted = head_bytes
        self.location = ""
        self.content_type = ""
        self.body = bytearray()
        self.is_complete = False
        self._bytes_max = bytes_max
        self._accepts = accepts
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._is_head = True
        self._headers: dict[str, str] = {}
        self._inflate: Any = None
        self._refusal: InvalidArgument | None = None

    @property
    def is_good(self) -> bool:
        """Whether the status is successful: 200, or 206 for a request of the first bytes."""
        return self.status == 200 or (self._wanted is not None and self.status == PARTIAL)

    def feed(self, piece: bytes) -> None:
        """Raise `InvalidArgument` for content that is too large or not accepted, `HttpParserError` for invalid HTTP."""
        if self._is_head:
            self._head_bytes += len(piece)
            if self._head_bytes > HEAD_BYTES_MAX + PIECE_BYTES:
                raise InvalidArgument("the headers of the media's host are too long")
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserError:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            raise self._refusal

    def end(self) -> None:
        """Handle the closed connection. Raise `EOFError` if the response is incomplete."""
        is_bounded = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._is_head or is_bounded:
            raise EOFError("the connection was closed too early")
        self._finish()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # An interim response.
            self._headers.clear()
            return
        self._is_head = False
        self.location = self._headers.get("location", "")
        self.content_type = type_of(self._headers.get("content-type", ""))
        if not self.is_good:
            self.is_complete = True  # The body of an error is not read.
            return
        try:
            check_type(self.content_type, self._accepts)
            self._inflate = _inflater(self._headers.get("content-encoding", ""))
        except InvalidArgument as error:
            self._refusal = error
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > self._bytes_max:
            self._refuse_size()

    def on_body(self, data: bytes) -> None:
        if self._refusal is not None or self.is_complete:
            return
        space_left = self._bytes_max - len(self.body)
        if self._inflate is not None:
            try:
                data = self._inflate.decompress(data, space_left + 1)
            except zlib.error:
                self._refusal = InvalidArgument("the media cannot be decompressed")
                return
        if len(data) > space_left:
            self._refuse_size()
        else:
            self.body += data
            if self._wanted is not None and len(self.body) >= self._wanted:
                self.is_complete = True

    def on_message_complete(self) -> None:
        if self.status >= 200 and not self.is_complete:
            self._finish()

    def _finish(self) -> None:
        if self._inflate is not None and self._refusal is None and not self._inflate.eof:
            self._refusal = InvalidArgument("the compressed data of the media is truncated")
        self.is_complete = True
        if self._refusal is not None and self.status:
            self.body.clear()

    def _refuse_size(self) -> None:
        message = f"the media has more than {self._bytes_max} bytes (DYN_MM_MAX_FILE_SIZE_MB)"
        self._refusal = InvalidArgument(message)
        self.body.clear()


def _inflater(encoding: str) -> Any:
    """Return a decompressor for an unsolicited content encoding, None for none. Raise `InvalidArgument`."""
    words = [word.strip().lower() for word in encoding.split(",") if word.strip()]
    if words in ([], ["identity"]):
        return None
    if words in (["gzip"], ["x-gzip"], ["deflate"]):
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    raise InvalidArgument(f"the media has the unsupported content encoding {encoding[:40]!r}")


def _read_file(path: str, limits: FetchLimits) -> Media:
    try:
        with open(path, "rb") as file:
            data = file.read(limits.file_bytes_max + 1)
    except OSError as error:
        raise InvalidArgument(f"the file cannot be read: {error.strerror}") from None
    if len(data) > limits.file_bytes_max:
        raise InvalidArgument(f"the file has more than {limits.file_bytes_max} bytes (DYN_MM_MAX_FILE_SIZE_MB)")
    return Media(data, "")


def _words(error: BaseException) -> str:
    """Describe a failure without addresses: the addresses behind a name are not disclosed to clients."""
    match error:
        case ssl.SSLCertVerificationError():
            return "its certificate is not valid for it"
        case ssl.SSLError():
            return "TLS failed"
        case TimeoutError():
            return "connecting took too long"
        case socket.gaierror():
            return "the name cannot be resolved"
        case httptools.HttpParserError() | httptools.HttpParserUpgrade():
            return "the response is not valid HTTP"
        case EOFError():
            return "the connection was closed too early"
        case _:
            return "the connection failed"
