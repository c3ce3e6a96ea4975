"""ChatClient: the command line's requests to a running server, over its HTTP API."""

import json
import ssl
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo.core.config import setting
from dynamo.core.errors import CannotConnect, Disconnected, HttpError, ResponseTimeout
from dynamo.core.http_client import BlockingHttpClient, BlockingResponse, Deadlines

SILENCE_S = 300.0  # A long prompt on a slow machine takes minutes until its first token.


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed response: text, or reasoning."""

    content: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """A server's report about its workers."""

    models: tuple[str, ...]
    generate_instances: int


class ChatClient:
    """ChatClient of the server at one URL."""

    def __init__(self, url: str, timeout_s: float = SILENCE_S, *, verify: bool = True, key: str | None = None) -> None:
        """Set `verify=False` for our own server; `key` is the API key to send. Raises `ConfigError` for a bad URL."""
        deadlines = Deadlines(timeout_s, timeout_s, timeout_s)
        tls: ssl.SSLContext | None = None
        if not verify:
            tls = ssl.create_default_context()
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = BlockingHttpClient(url, deadlines, headers=headers, tls=tls)
        self.url = self._http.url

    def models(self) -> list[str]:
        """Return the names of the served models."""
        return [str(model["id"]) for model in self._get("/v1/models").get("data", [])]

    def health(self) -> Health:
        """Return the served models and the number of workers."""
        instances = self._get("/health").get("instances", [])
        generating = sum(instance.get("endpoint") == "generate" for instance in instances)
        return Health(tuple(self.models()) if generating else (), generating)

    def instances(self) -> list[dict[str, Any]]:
        """Return the registered endpoints of all workers."""
        found: list[dict[str, Any]] = self._get("/health").get("instances", [])
        return found

    def decisions(self, **query: str | int | None) -> list[dict[str, Any]]:
        """Return the KV routers' last decisions, by model."""
        given = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
        found: list[dict[str, Any]] = self._get(f"/routing/decisions?{given}").get("models", [])
        return found

    def planners(self) -> list[dict[str, Any]]:
        """Return the planners' states and last decisions; none without a planner."""
        try:
            found: list[dict[str, Any]] = self._get("/v1/planner").get("planners", [])
        except HttpError as error:
            if error.code == 404:
                return []
            raise
        return found

    def overview(self, samples: int = 1) -> dict[str, Any]:
        """Return the models, the workers and the last samples of the console. Raise `HttpError` (404) without a console."""
        return self._get(f"/console/api/overview?samples={samples}")

    def requests(self, **query: str | int) -> list[dict[str, Any]]:
        """Return the console's requests in flight and recent ones, with their stages. Raise `HttpError` (404) without a console."""
        found: list[dict[str, Any]] = self._get(f"/console/api/requests?{urllib.parse.urlencode(query)}")["requests"]
        return found

    def router_state(self) -> list[dict[str, Any]]:
        """Return the KV routers' state of their workers."""
        found: list[dict[str, Any]] = self._get("/routing/state").get("routers", [])
        return found

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
    ) -> Iterator[Delta]:
        """Stream the response to a conversation. Leaving the iteration closes the connection."""
        for chunk in self.chunks(model, messages, options):
            for choice in chunk["choices"]:
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                yield Delta(delta.get("content") or "", reasoning or "")

    def chunks(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
    ) -> Generator[dict[str, Any]]:
        """Stream the chunks of the response to a conversation. Leaving the iteration closes the connection."""
        body = {"model": model, "messages": list(messages), "stream": True, **(options or {})}
        with self._request("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            for data in _events(response):
                chunk = json.loads(data)
                if "choices" not in chunk:
                    raise HttpError(500, error_message(data))
                yield chunk

    def complete(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the whole response to a conversation."""
        body = {"model": model, "messages": list(messages), **(options or {})}
        with self._request("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            return self._object("/v1/chat/completions", response)

    def _get(self, path: str) -> dict[str, Any]:
        with self._request("GET", path) as response:
            return self._object(path, response)

    def _object(self, path: str, response: BlockingResponse) -> dict[str, Any]:
        try:
            answer = json.loads(response.read())
        except ValueError as error:
            raise Disconnected(f"{self.url}{path}: {error}") from None
        return answer if isinstance(answer, dict) else {}

    @contextmanager
    def _request(self, method: str, path: str, body: bytes = b"") -> Iterator[BlockingResponse]:
        """Send a request. Raise `HttpError` for an error status, and the client's errors with the server's URL."""
        try:
            with self._http.request(method, path, body) as response:
                if response.status >= 400:
                    raise HttpError(response.status, error_message(response.read().decode(errors="replace")))
                yield response
        except CannotConnect as error:
            raise CannotConnect(f"no server at {self.url} ({error}); start one with: dynamo serve") from None
        except (Disconnected, ResponseTimeout) as error:
            raise type(error)(f"{self.url}: {error}") from None


def environment_key() -> str | None:
    """Return the API key of `DYN_API_KEY`, None where it is not set."""
    return setting("DYN_API_KEY", "", str).strip() or None


def _events(response: BlockingResponse) -> Iterator[str]:
    """Yield the data of each server-sent event up to `[DONE]`."""
    while (events := response.events()) is not None:
        for event in events:
            if event == b"[DONE]":
                return
            yield event.decode()
    raise Disconnected("the response ended early")


def error_message(text: str) -> str:
    """Return the message of an error body in OpenAI's nested or the flat form; otherwise the text itself."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip() or "no reason given"
    nested = body.get("error") if isinstance(body, dict) else None
    for candidate in (nested, body):
        if isinstance(candidate, dict) and isinstance(candidate.get("message"), str):
            return str(candidate["message"])
    return nested if isinstance(nested, str) else text.strip()
