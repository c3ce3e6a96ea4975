"""Renderer: a client of the engine's render endpoint, which returns the prompt tokens of a request.

vLLM (`vllm-render`) answers `{"token_ids": [...]}`, SGLang (`sglang-renderer`) `{"input_ids": [...]}`; both at the
request's own path with `/render` appended.
"""

from typing import Any

import msgspec

from dynamo.core.errors import CannotConnect, Disconnected, InvalidArgument, NotReady, ResponseTimeout
from dynamo.core.http_client import Deadlines, HttpClient

FIELDS = {"vllm-render": "token_ids", "sglang-renderer": "input_ids"}
"""Field of the response with the tokens, by protocol."""
CONNECT_S = 2.0
ERROR_CHARS_MAX = 300

decode = msgspec.json.Decoder(Any).decode


class Renderer:
    """Tokenizes requests at one server."""

    def __init__(self, url: str, protocol: str, timeout_s: float, response_bytes_max: int) -> None:
        self._field = FIELDS[protocol]
        self._bytes_max = response_bytes_max
        deadlines = Deadlines(min(CONNECT_S, timeout_s), timeout_s, timeout_s, timeout_s)
        self._client = HttpClient(url, deadlines, setting="--tokenizer-service-url")

    async def tokens(self, path: str, body: bytes) -> list[int]:
        """Return the prompt tokens of a request to a path.

        Raises `InvalidArgument` for a request that the server refuses, `NotReady` if the server does not answer.
        """
        try:
            async with self._client.request("POST", f"{path}/render", body) as response:
                status, data = response.status, await response.read(self._bytes_max)
        except (CannotConnect, Disconnected, ResponseTimeout) as error:
            raise NotReady(f"the tokenizer service does not answer: {error}") from None
        if 400 <= status < 500:
            raise InvalidArgument(
                f"the tokenizer service refused the request: {data[:ERROR_CHARS_MAX].decode(errors='replace')}"
            )
        if status != 200:
            raise NotReady(f"the tokenizer service answered with status {status}")
        return self._tokens(data)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _tokens(self, data: bytes) -> list[int]:
        try:
            value: Any = decode(data)
        except msgspec.DecodeError:
            value = None
        tokens: Any = value.get(self._field) if isinstance(value, dict) else None
        if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in tokens):
            raise NotReady(f"the tokenizer service's answer has no list of token ids in {self._field}")
        return tokens
