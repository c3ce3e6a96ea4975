"""EventStream: server-sent events of an HTTP server, each as it comes, over connections that are used again."""

from collections.abc import AsyncGenerator, Mapping

from dynamo.core.errors import HttpError
from dynamo.core.http_client import Deadlines, HttpAnswer, HttpClient

ERROR_BYTES, ERROR_CHARS = 1 << 20, 300


class EventStream:
    """A server at a URL. `close` when done."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises `ConfigError` for a URL that is none. `timeout_s`: the longest silence."""
        self._client = HttpClient(url, Deadlines(timeout_s, timeout_s, timeout_s))

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        self._client.close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The data of each event of the answer. Raises what `core.errors` has for a server that fails or is silent."""
        async with self._client.ask("POST", path, body, headers) as answer:
            await _check(answer)
            while (events := await answer.events()) is not None:
                for event in events:
                    yield event

    async def get(self, path: str) -> bytes:
        """A whole answer."""
        async with self._client.ask("GET", path) as answer:
            await _check(answer)
            return await answer.read()


async def _check(answer: HttpAnswer) -> None:
    """Raises `HttpError` for a refusal."""
    if answer.status >= 400:
        raise HttpError(answer.status, (await answer.read(ERROR_BYTES)).decode("utf-8", "replace")[:ERROR_CHARS])
