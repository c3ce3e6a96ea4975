"""BlocklistResolver: a resolver for aiohttp, by which only permitted addresses are connected to.

A name may have another address after its validation; this check is of the address itself.
"""

import errno
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dynamo.common.http.url_validator import describe_media_source, is_blocked_ip


class SsrfBlockedAddress(OSError):
    """A host without a permitted address."""


class BlocklistResolver:
    """Resolver without blocked addresses, except those of proxies; `allow_private_ips` permits all."""

    def __init__(self, *, allow_private_ips: bool) -> None:
        try:
            from aiohttp import DefaultResolver
        except ImportError:
            raise ImportError("fetches of media require aiohttp: pip install aiohttp") from None
        self._allow_private_ips = allow_private_ips
        self._inner: Any = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[dict[str, Any]]:
        """Return the permitted addresses. Raise `SsrfBlockedAddress` if there is none."""
        found: list[dict[str, Any]] = await self._inner.resolve(host, port, family)
        is_proxy = host in {urlsplit(proxy).hostname for proxy in getproxies().values()}
        permitted = [one for one in found if self._allow_private_ips or is_proxy or not is_blocked_ip(one["host"])]
        if found and not permitted:
            reason = f"host {describe_media_source(host)} resolves only to blocked IPs"
            raise SsrfBlockedAddress(errno.EHOSTUNREACH, reason)
        return permitted

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()
