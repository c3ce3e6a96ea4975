"""Health of a router: the models of a frontend, and one small chat request through its router."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.core.errors import ConfigError, DynamoException
from dynamo.http.client import ChatClient, environment_key

PROMPT = "Say hello."
TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult:
    """One request and its response."""

    model: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    response: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def is_success(self) -> bool:
        """Return whether the response has a choice."""
        return not self.error and bool(self.response.get("choices"))

    @property
    def tokens(self) -> int:
        """Return the number of generated tokens."""
        return int((self.response.get("usage") or {}).get("completion_tokens") or 0)

    @property
    def worker(self) -> str:
        """Return the id of the worker that decoded; empty if the response does not contain it."""
        found = (self.response.get("nvext") or {}).get("worker_id")
        if isinstance(found, Mapping):
            found = found.get("decode_worker_id", found.get("prefill_worker_id"))
        return "" if found is None else str(found)

    @property
    def request_id(self) -> str:
        """Return the id of the response."""
        return str(self.response.get("id") or "")


def chat_once(
    url: str, *, prefer: Collection[str] = (), prompt: str = PROMPT, max_tokens: int = TOKENS, timeout_s: float = 60.0
) -> ChatResult:
    """Return the result of one request to a preferred model, else to the first one that is listed."""
    client = ChatClient(url, timeout_s=timeout_s, verify=False, key=environment_key())
    try:
        models = client.models()
    except DynamoException as error:
        return ChatResult(error=f"GET /v1/models: {one_line(error)}")
    chosen = next((one for one in models if one in prefer), models[0] if models else "")
    if not chosen:
        return ChatResult(error="GET /v1/models: no model is listed; no worker is registered")
    return request_once(client, chosen, prompt, max_tokens)


def request_once(
    client: ChatClient, model: str, prompt: str, max_tokens: int, nvext: Mapping[str, Any] | None = None
) -> ChatResult:
    """Return the result of one request whose response contains the worker's id."""
    messages = [{"role": "user", "content": prompt}]
    options = {"max_tokens": max_tokens, "nvext": {"extra_fields": ["worker_id"], **(nvext or {})}}
    request = {"model": model, "messages": messages, **options}
    try:
        response = client.complete(model, messages, options)
    except ConfigError:
        raise
    except DynamoException as error:
        return ChatResult(model=model, request=request, error=f"POST /v1/chat/completions: {one_line(error)}")
    result = ChatResult(model=model, request=request, response=response)
    if not result.is_success:
        return ChatResult(model=model, request=request, response=response, error="the response has no choices")
    return result


def one_line(error: Exception) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())
