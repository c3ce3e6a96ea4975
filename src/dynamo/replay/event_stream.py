"""EventStream: client for server-sent events of an HTTP server, with a connection pool."""

from collections.abc import AsyncGenerator, Mapping

from dynamo.core.errors import HttpError
from dynamo.core.http_client import Deadlines, HttpClient, HttpResponse

ERROR_BYTES, ERROR_CHARS = 1 << 20, 300


class EventStream:
    """An HTTP server at a URL. Call `close` when done."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raise `ConfigError` for an invalid URL. `timeout_s`: maximum time without data."""
        self._client = HttpClient(url, Deadlines(timeout_s, timeout_s, timeout_s))

    def close(self) -> None:
        """Close the idle connections."""
        self._client.close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event. Raise errors of `core.errors` if the server fails or times out."""
        async with self._client.request("POST", path, body, headers) as answer:
            await _check(answer)
            while (events := await answer.events()) is not None:
                for event in events:
                    yield event

    async def get(self, path: str) -> bytes:
        """Return a complete response body."""
        async with self._client.request("GET", path) as answer:
            await _check(answer)
            return await answer.read()


async def _check(answer: HttpResponse) -> None:
    """Raise `HttpError` for an error status."""
    if answer.status >= 400:
        raise HttpError(answer.status, (await answer.read(ERROR_BYTES)).decode("utf-8", "replace")[:ERROR_CHARS])
