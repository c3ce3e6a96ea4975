"""AiohttpClient: the HTTP client on aiohttp, which is imported with the first fetch."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from dynamo.common.configuration.groups.http_args import HttpConfigBase
from dynamo.common.http._ssrf_resolver import BlocklistResolver
from dynamo.common.http.base import (
    HttpClient,
    HttpConfigurationError,
    HttpConnectionError,
    HttpStatusError,
    HttpTimeoutError,
    collect_capped,
)
from dynamo.common.http.url_validator import UrlValidationPolicy, describe_media_source
from dynamo.core.config import environ

DYN_MM_TRUST_EGRESS_PROXY = "DYN_MM_TRUST_EGRESS_PROXY"
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_READ_CHUNK = 1 << 16


class AiohttpClient(HttpClient):
    """Client with one pool of connections for permitted addresses, and one for all where the deployment allows it."""

    def __init__(self, config: HttpConfigBase | None = None) -> None:
        super().__init__(config)
        self._sessions: dict[bool, Any] = {}
        self._resolvers: dict[bool, BlocklistResolver] = {}

    async def _fetch_simple(
        self,
        url: str,
        timeout: float,  # noqa: ASYNC109
        *,
        max_bytes: int | None = None,
        policy: UrlValidationPolicy | None = None,
        read_timeout: float | None = None,
    ) -> bytes:
        limits = self._effective_timeout(timeout, read_timeout)
        async with self._response(url, policy, timeout=limits) as response:
            return await _body(response, url, max_bytes)

    async def _fetch_body_or_redirect(
        self,
        url: str,
        timeout: float,  # noqa: ASYNC109
        *,
        max_bytes: int | None = None,
        policy: UrlValidationPolicy | None = None,
        read_timeout: float | None = None,
    ) -> tuple[bytes | None, str | None]:
        limits = self._effective_timeout(timeout, read_timeout)
        async with self._response(url, policy, timeout=limits, allow_redirects=False) as response:
            if response.status not in _REDIRECT_STATUSES:
                return await _body(response, url, max_bytes), None
            if "Location" not in response.headers:
                raise HttpStatusError(response.status, "a redirect without a Location", url)
            return None, urljoin(str(response.url), response.headers["Location"])

    @asynccontextmanager
    async def _response(self, url: str, policy: UrlValidationPolicy | None, **options: Any) -> AsyncIterator[Any]:
        """Send a request and yield its response. Raise `HttpError`."""
        allows_private = self._connect_allows_private(policy)
        if not allows_private:
            await self._require_trusted_egress_proxy(url)
        session = await self._get_session(allows_private)
        with _http_errors(url):
            async with session.get(url, **options) as response:
                yield response

    def _effective_timeout(self, timeout: float, read_timeout: float | None = None) -> Any:
        """Return aiohttp's timeouts; the setting replaces that of the whole request."""
        from aiohttp import ClientTimeout

        override = self._config.per_call_timeout_override
        return ClientTimeout(
            total=timeout if override is None else override,
            sock_connect=self._config.connect_timeout,
            sock_read=read_timeout,
        )

    @staticmethod
    def _connect_allows_private(policy: UrlValidationPolicy | None) -> bool:
        """Return whether internal addresses are permitted, by the deployment and by the caller."""
        return UrlValidationPolicy.from_env().allow_private_ips and (policy is None or policy.allow_private_ips)

    @staticmethod
    async def _require_trusted_egress_proxy(url: str) -> None:
        """Raise `HttpConfigurationError` for a fetch by a proxy, which connects to addresses that are not checked here."""
        if environ().get(DYN_MM_TRUST_EGRESS_PROXY) != "1" and await asyncio.to_thread(_uses_proxy, url):
            what = f"{describe_media_source(url)} would be fetched by a proxy, which this process cannot restrict"
            raise HttpConfigurationError(f"{what}; {DYN_MM_TRUST_EGRESS_PROXY}=1 trusts the proxy to do so")

    def _build_session(self, allow_private_ips: bool) -> Any:
        """Return a session with a pool of its own."""
        # `Any`: the types of aiohttp, where it is installed, ask for a subclass of its own resolver.
        resolver: Any = BlocklistResolver(allow_private_ips=allow_private_ips)
        from aiohttp import ClientSession, TCPConnector

        self._resolvers[allow_private_ips] = resolver  # A connector closes no resolver that it was given.
        settings = self._config
        connector = TCPConnector(
            resolver=resolver, limit=settings.max_connections, keepalive_timeout=settings.keepalive_timeout
        )
        return ClientSession(connector=connector, trust_env=True)

    async def _get_session(self, allow_private_ips: bool) -> Any:
        """Return the session for addresses of a kind, created with the first fetch."""
        session = self._sessions.get(allow_private_ips)
        if session is None or session.closed:
            session = self._sessions[allow_private_ips] = self._build_session(allow_private_ips)
        return session

    async def close(self) -> None:
        """Close the sessions and their resolvers; the next fetch creates new ones."""
        closing = [*self._sessions.values(), *self._resolvers.values()]
        self._sessions, self._resolvers = {}, {}
        for one in closing:
            await one.close()


async def _body(response: Any, url: str, max_bytes: int | None) -> bytes:
    response.raise_for_status()
    return await collect_capped(response.content.iter_chunked(_READ_CHUNK), url, max_bytes)


@contextmanager
def _http_errors(url: str) -> Iterator[None]:
    """Raise an `HttpError` for an error of aiohttp."""
    import aiohttp

    label = describe_media_source(url)
    try:
        yield
    except TimeoutError as error:  # Before ClientError: some of aiohttp's are both.
        raise HttpTimeoutError(f"{label} did not respond in time") from error
    except aiohttp.ClientResponseError as error:
        raise HttpStatusError(error.status, error.message, url) from error
    except (aiohttp.ClientError, OSError) as error:
        raise HttpConnectionError(f"cannot fetch {label}: {error}") from error


def _uses_proxy(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")
