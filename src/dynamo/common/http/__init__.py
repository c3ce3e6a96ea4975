"""HTTP fetches of media: one client for the process, on aiohttp."""

import logging

from dynamo.common.configuration.groups.http_args import HttpArgGroup, HttpConfigBase, from_env
from dynamo.common.http.aiohttp_client import AiohttpClient
from dynamo.common.http.base import (
    HttpClient,
    HttpConfigurationError,
    HttpConnectionError,
    HttpError,
    HttpStatusError,
    HttpTimeoutError,
)
from dynamo.common.http.url_validator import UrlValidationPolicy
from dynamo.core.config import environ

__all__ = [
    "AiohttpClient",
    "HttpArgGroup",
    "HttpClient",
    "HttpConfigBase",
    "HttpConfigurationError",
    "HttpConnectionError",
    "HttpError",
    "HttpStatusError",
    "HttpTimeoutError",
    "close_http_client",
    "fetch_bytes",
    "from_env",
    "get_default_client",
]

logger = logging.getLogger(__name__)

_default: HttpClient | None = None


def get_default_client() -> HttpClient:
    """Return the client of the process, created with the settings of the environment by the first call."""
    global _default  # noqa: PLW0603 -- one client for the process
    if _default is None:
        backend = environ().get("DYN_HTTP_BACKEND", "aiohttp")
        if backend != "aiohttp":
            logger.warning("ignored DYN_HTTP_BACKEND=%s: only aiohttp is supported", backend)
        _default = AiohttpClient()
    return _default


async def fetch_bytes(
    url: str,
    timeout: float,  # noqa: ASYNC109 -- part of the interface
    *,
    policy: UrlValidationPolicy | None = None,
    max_bytes: int | None = None,
    read_timeout: float | None = None,
) -> bytes:
    """Return the content of a URL; see `HttpClient.fetch_bytes`."""
    client = get_default_client()
    return await client.fetch_bytes(url, timeout, policy=policy, max_bytes=max_bytes, read_timeout=read_timeout)


async def close_http_client() -> None:
    """Close the client of the process; the next fetch creates another."""
    global _default
    client, _default = _default, None
    if client is not None:
        await client.close()
