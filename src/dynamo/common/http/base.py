"""HttpClient: fetches of media with a limit on their size, each redirect of which is validated; and its errors."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from dynamo.common.configuration.groups.http_args import HttpConfigBase, from_env
from dynamo.common.http.url_validator import (
    UrlValidationError,
    UrlValidationPolicy,
    describe_error_detail,
    describe_media_source,
    validate_url,
)

_MAX_REDIRECTS = 3
_MAX_MESSAGE_LENGTH = 8192


class HttpError(Exception):
    """A fetch that failed."""


class HttpTimeoutError(HttpError):
    """The response did not arrive in time."""


class HttpConnectionError(HttpError):
    """The host cannot be reached, or ended the connection."""


class HttpConfigurationError(HttpError):
    """The settings of this process do not permit a safe fetch: no fault of the client whose URL it is."""


class HttpStatusError(HttpError):
    """The response's status is an error."""

    def __init__(self, status: int, message: str, url: str) -> None:
        self.status, self.url = status, url
        self.message = describe_error_detail(message, _MAX_MESSAGE_LENGTH)  # Sent to clients.
        super().__init__(f"{describe_media_source(url)} responded with status {status}: {self.message}")


async def collect_capped(chunks: AsyncIterator[bytes], url: str, max_bytes: int | None) -> bytes:
    """Return a body. Raise `UrlValidationError` as soon as more than `max_bytes` have arrived; None is no limit."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if max_bytes is not None and len(body) > max_bytes:
            raise UrlValidationError(f"{describe_media_source(url)} exceeds the download limit of {max_bytes} bytes")
    return bytes(body)


class HttpClient(ABC):
    """Client with the two ways of a fetch, which a library implements."""

    def __init__(self, config: HttpConfigBase | None = None) -> None:
        self._config = config or from_env()

    async def fetch_bytes(
        self,
        url: str,
        timeout: float,  # noqa: ASYNC109 -- part of the interface
        *,
        policy: UrlValidationPolicy | None = None,
        max_bytes: int | None = None,
        read_timeout: float | None = None,
    ) -> bytes:
        """Return the content of a URL. Raise `UrlValidationError` or `HttpError`.

        With a policy the URL and each redirect are validated. `timeout` is for one request, `read_timeout` for each wait for
        a part of its response, both in seconds.
        """
        if policy is None:
            return await self._fetch_simple(url, timeout, max_bytes=max_bytes, policy=None, read_timeout=read_timeout)
        hops: list[str] = []
        following: str | None = url
        while following is not None and len(hops) <= _MAX_REDIRECTS:
            hops.append(await validate_url(following, policy))
            body, following = await self._fetch_body_or_redirect(
                hops[-1], timeout, max_bytes=max_bytes, policy=policy, read_timeout=read_timeout
            )
            if body is not None:
                return body
        raise UrlValidationError(f"Too many redirects: {' to '.join(map(describe_media_source, hops))}")

    @abstractmethod
    async def _fetch_simple(
        self,
        url: str,
        timeout: float,  # noqa: ASYNC109
        *,
        max_bytes: int | None = None,
        policy: UrlValidationPolicy | None = None,
        read_timeout: float | None = None,
    ) -> bytes:
        """Return a body; the library follows redirects."""

    @abstractmethod
    async def _fetch_body_or_redirect(
        self,
        url: str,
        timeout: float,  # noqa: ASYNC109
        *,
        max_bytes: int | None = None,
        policy: UrlValidationPolicy | None = None,
        read_timeout: float | None = None,
    ) -> tuple[bytes | None, str | None]:
        """Return a body, or the URL of a redirect."""

    @abstractmethod
    async def close(self) -> None:
        """End all connections."""
