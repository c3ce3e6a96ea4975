"""Connections to an API server: requests with the current credentials, over a proxy where one is configured."""

import asyncio
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from dynamo.core.boundaries import Rollback
from dynamo.core.config import setting
from dynamo.core.errors import CannotConnect, ConfigError
from dynamo.core.http_client import READ_BYTES, Connection, Deadlines, HttpClient, HttpResponse
from dynamo.k8s.credentials import CredentialsUnavailable, Identity, UserCredentials
from dynamo.k8s.kubeconfig import ClusterAccess

UNAUTHORIZED = 401
HEADERS = {"accept": "application/json", "user-agent": "dynamo-serve"}
PROXY_HEAD_BYTES = 1 << 14


class ApiConnection:
    """Requests to the API server of one `ClusterAccess`."""

    def __init__(self, access: ClusterAccess, deadlines: Deadlines) -> None:
        """Raise `ConfigError` for an invalid address, certificate or proxy."""
        self._access = access
        self._deadlines = deadlines
        self._credentials = UserCredentials(access)
        self._is_tls = access.cluster.server.startswith("https://")
        self._proxy = proxy_of(access)
        self._identity = Identity()
        self._http = self._client(self._identity)

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], deadlines: Deadlines
    ) -> AsyncIterator[HttpResponse]:
        """Send one request; the block begins when status and headers have arrived.

        A request that is refused with 401 is repeated with renewed credentials, where they can be renewed. Raise
        `CannotConnect`, `Disconnected`, `ResponseTimeout` and `CredentialsUnavailable`.
        """
        identity = await self._credentials.current()
        async with self._send(identity, method, path, body, headers, deadlines) as response:
            if response.status != UNAUTHORIZED or not self._credentials.expire(identity):
                yield response
                return
            await response.read()
        identity = await self._credentials.current()
        async with self._send(identity, method, path, body, headers, deadlines) as response:
            yield response

    async def close(self) -> None:
        """Close the idle connections."""
        await self._http.closed()

    @asynccontextmanager
    async def _send(
        self, identity: Identity, method: str, path: str, body: bytes, headers: Mapping[str, str], deadlines: Deadlines
    ) -> AsyncIterator[HttpResponse]:
        if identity[1:] != self._identity[1:]:  # Another certificate: it belongs to the connection.
            try:
                renewed = self._client(identity)
            except ConfigError as error:  # What the program printed is no certificate with its key.
                self._credentials.expire(identity)
                raise CredentialsUnavailable(str(error)) from None
            self._http.close()
            self._http = renewed
        self._identity = identity
        http = self._http
        try:
            async with http.request(method, path, body, {**identity.headers, **headers}, deadlines) as response:
                yield response
        finally:
            if http is not self._http:  # The certificate was renewed during the request.
                http.close()

    def _client(self, identity: Identity) -> HttpClient:
        cluster = self._access.cluster
        tls = self._access.tls(identity.certificate_pem, identity.key_pem) if self._is_tls else None
        dials = self._proxy or (tls is not None and cluster.tls_server_name)
        return HttpClient(
            cluster.server,
            self._deadlines,
            setting=f"{self._access.source}: server",
            headers=HEADERS,
            tls=tls,
            connect=(lambda: self._dial(tls)) if dials else None,
        )

    async def _dial(self, tls: ssl.SSLContext | None) -> Connection:
        """Connect over the proxy, or with another name than the address in the server's certificate."""
        server = urllib.parse.urlsplit(self._access.cluster.server)
        host, port = server.hostname or "", server.port or (443 if tls else 80)
        name = self._access.cluster.tls_server_name or host
        target = self._proxy or (host, port)
        try:
            async with asyncio.timeout(self._deadlines.connect_s):
                if self._proxy is None:
                    return await asyncio.open_connection(host, port, ssl=tls, server_hostname=name, limit=READ_BYTES)
                connection = await asyncio.open_connection(*target, limit=READ_BYTES)
                with Rollback(connection[1].close):
                    await _tunnel(connection, host, port)
                    if tls is not None:
                        await connection[1].start_tls(tls, server_hostname=name)
                return connection
        except TimeoutError:
            limit_s = self._deadlines.connect_s
            raise CannotConnect(f"no connection to {target[0]}:{target[1]} within {limit_s:g} s") from None
        except OSError as error:
            raise CannotConnect(f"no connection to {target[0]}:{target[1]}: {error}") from None


async def _tunnel(connection: Connection, host: str, port: int) -> None:
    """Have a proxy connect to a server. Raise `CannotConnect`."""
    reader, writer = connection
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    writer.write(f"CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n".encode("latin-1"))
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise CannotConnect("the proxy closed the connection") from None
    status = head[:PROXY_HEAD_BYTES].split(b"\r\n", 1)[0].decode("latin-1")
    if status.split(" ")[1:2] != ["200"]:
        raise CannotConnect(f"the proxy refuses to connect to {authority}: {status}")


def proxy_of(access: ClusterAccess) -> tuple[str, int] | None:
    """Return host and port of the proxy that the cluster or HTTPS_PROXY names; None for none. Raise `ConfigError`."""
    server = urllib.parse.urlsplit(access.cluster.server)
    named, url = f"{access.source}: proxy-url", access.cluster.proxy_url or ""
    if not url and server.scheme == "https" and not _is_direct(server.hostname or ""):
        named, url = "HTTPS_PROXY", _either("HTTPS_PROXY")
    if not url:
        return None
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"{named} {url!r}: must be the http:// address of a proxy")
    return parts.hostname, parts.port or 80


def _either(name: str) -> str:
    return setting(name, "", str) or setting(name.lower(), "", str)


def _is_direct(host: str) -> bool:
    """Return whether NO_PROXY has a host, one of its domains or its network."""
    for one in filter(None, (part.strip() for part in _either("NO_PROXY").split(","))):
        if one in ("*", host) or host.endswith(f".{one.lstrip('.')}") or _is_in(host, one):
            return True
    return host in {"localhost", "127.0.0.1", "::1"}


def _is_in(host: str, network: str) -> bool:
    if "/" not in network:
        return False
    import ipaddress

    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
