"""Media fetch: download of an image, a video or a sound from its URL, for components that need its bytes.

    media = await fetch("https://example.com/cat.png", accepts=("image/",))

The connection goes to the address that was checked, so that a name that resolves to another host a moment later has no
effect; every redirect is checked as well. The response is bounded in bytes, before and after decompression, and in
time. The allowed sources are defined in `text.multimodal.source`.
"""

import asyncio
import socket
import ssl
import urllib.parse
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from dynamo.core.errors import InvalidArgument, WorkerUnavailable
from dynamo.core.http_client import READ_BYTES, Connection, Deadlines, HttpClient, HttpResponse
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

ADDRESSES_MAX = 3  # Addresses of a host that are tried.
OK, PARTIAL = 200, 206
REDIRECTS = frozenset({301, 302, 303, 307, 308})
HEADERS = {"user-agent": "dynamo", "accept": "*/*", "accept-encoding": "identity", "connection": "close"}
NO_DEADLINES = Deadlines(connect_s=0, first_s=None, between_s=None)
"""`fetch` limits the time of the whole transfer, and `FetchLimits.connect_timeout_s` that of each connection attempt."""


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
            found = await self._get(remote)
            if isinstance(found, Media):
                return found
            try:
                url = urllib.parse.urljoin(url, found)
            except ValueError:
                raise InvalidArgument(f"{remote.host} redirects to an invalid URL") from None
        raise InvalidArgument(f"more than {self._limits.redirects_max} redirects")

    async def _get(self, remote: Remote) -> Media | str:
        """Return the media, or the location to which the host redirects."""
        tls = None
        if remote.is_tls:
            tls = self._tls or await asyncio.to_thread(ssl.create_default_context)
        url = f"{'http' if tls is None else 'https'}://{remote.authority}"
        client = HttpClient(url, NO_DEADLINES, headers=HEADERS, tls=tls, connect=lambda: self._open(remote, tls))
        headers = {} if self._head_bytes is None else {"range": f"bytes=0-{self._head_bytes - 1}"}
        try:
            async with client.request("GET", remote.target, headers=headers) as response:
                location = response.headers.get("location", "")
                if response.status in REDIRECTS and location:
                    return location
                return await self._read(response)
        except WorkerUnavailable as error:
            raise InvalidArgument(f"{remote.host} cannot be reached: {error}") from None
        finally:
            client.close()

    async def _read(self, response: HttpResponse) -> Media:
        """Return the body, or its first bytes. Raise `InvalidArgument` if it is not accepted or too large."""
        if response.status != OK and (self._head_bytes is None or response.status != PARTIAL):
            raise InvalidArgument(f"the media's host responded with status {response.status}")
        content_type = type_of(response.headers.get("content-type", ""))
        check_type(content_type, self._accepts)
        body = _Body(self._limits.file_bytes_max, response.headers)
        while (part := await response.part()) is not None:
            body.add(part)
            if self._head_bytes is not None and len(body.data) >= self._head_bytes:
                break
        else:
            body.end()
        return Media(bytes(body.data), content_type)

    async def _open(self, remote: Remote, tls: ssl.SSLContext | None) -> Connection:
        """Connect to an address of the host that was checked, and to no other."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                addresses = await self._resolve(remote.host, remote.port)
            for address in addresses:  # A single non-public address is enough to reject the name.
                check_address(address, self._limits)
            return await self._connect(remote, list(dict.fromkeys(addresses))[:ADDRESSES_MAX], tls)
        except OSError as error:
            raise InvalidArgument(f"{remote.host} cannot be reached: {_words(error)}") from None

    async def _connect(self, remote: Remote, addresses: Sequence[str], tls: ssl.SSLContext | None) -> Connection:
        last = OSError("the host has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s):
                    name = remote.host if tls is not None else None
                    return await asyncio.open_connection(
                        address, remote.port, ssl=tls, server_hostname=name, limit=READ_BYTES
                    )
            except OSError as error:
                last = error
        raise last


class _Body:
    """Body of a response as it arrives, decompressed. Every method raises `InvalidArgument`."""

    def __init__(self, bytes_max: int, headers: Mapping[str, str]) -> None:
        self.data = bytearray()
        self._bytes_max = bytes_max
        self._inflate = _inflater(headers.get("content-encoding", ""))
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > bytes_max:
            self._refuse_size()

    def add(self, part: bytes) -> None:
        """Add the next bytes."""
        space_left = self._bytes_max - len(self.data)
        if self._inflate is not None:
            try:
                part = self._inflate.decompress(part, space_left + 1)
            except zlib.error:
                raise InvalidArgument("the media cannot be decompressed") from None
        if len(part) > space_left:
            self._refuse_size()
        self.data += part

    def end(self) -> None:
        """Check that the compressed data are complete."""
        if self._inflate is not None and not self._inflate.eof:
            raise InvalidArgument("the compressed data of the media is truncated")

    def _refuse_size(self) -> NoReturn:
        raise InvalidArgument(f"the media has more than {self._bytes_max} bytes (DYN_MM_MAX_FILE_SIZE_MB)")


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


def _words(error: OSError) -> str:
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
        case _:
            return "the connection failed"
