"""Client: the command line's requests to a running server, over its HTTP API with the standard library only."""

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.core.config import setting
from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, HttpError, ResponseTimeout

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


class Client:
    """Client of the server at one URL."""

    def __init__(self, url: str, timeout_s: float = SILENCE_S, *, verify: bool = True, key: str | None = None) -> None:
        """Set `verify=False` for our own server; `key` is the API key to send. Raises `ConfigError` for a bad URL."""
        self._key = key
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ConfigError(f"--url {url!r}: expected something like http://localhost:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._verify = verify

    def models(self) -> list[str]:
        """Return the names of the served models."""
        return [str(model["id"]) for model in self._get("/v1/models").get("data", [])]

    def health(self) -> Health:
        """Return the served models and the number of workers."""
        instances = self._get("/health").get("instances", [])
        generating = sum(instance.get("endpoint") == "generate" for instance in instances)
        return Health(tuple(self.models()) if generating else (), generating)

    def decisions(self, **query: str | int | None) -> list[dict[str, Any]]:
        """Return the KV routers' last decisions, by model."""
        given = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
        found: list[dict[str, Any]] = self._get(f"/routing/decisions?{given}").get("models", [])
        return found

    def router_state(self) -> list[dict[str, Any]]:
        """Return the KV routers' state of their workers."""
        found: list[dict[str, Any]] = self._get("/routing/state").get("routers", [])
        return found

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None
    ) -> Iterator[Delta]:
        """Stream the response to a conversation. Leaving the iteration closes the connection."""
        body = {"model": model, "messages": list(messages), "stream": True, **(options or {})}
        connection = self._connect()
        try:
            response = self._send(connection, "POST", "/v1/chat/completions", json.dumps(body).encode())
            for data in _events(response):
                chunk = json.loads(data)
                if "choices" not in chunk:
                    raise HttpError(500, error_message(data))
                for choice in chunk["choices"]:
                    delta = choice.get("delta") or {}
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                    yield Delta(delta.get("content") or "", reasoning or "")
        except TimeoutError:
            raise ResponseTimeout(f"{self.url}: no data for {self._timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Disconnected(f"{self.url}: connection lost ({error})") from None
        finally:
            connection.close()

    def _get(self, path: str) -> dict[str, Any]:
        connection = self._connect()
        try:
            answer = json.loads(self._send(connection, "GET", path).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Disconnected(f"{self.url}{path}: {error}") from None
        finally:
            connection.close()
        return answer if isinstance(answer, dict) else {}

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._connection()
        try:
            connection.connect()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotConnect(f"no server at {self.url} ({reason}); start one with: dynamo serve") from None
        return connection

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        import ssl

        context = ssl.create_default_context() if self._verify else ssl._create_unverified_context()  # noqa: S323
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection.request(method, self._path + path, body=body, headers=headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise HttpError(response.status, error_message(response.read().decode(errors="replace")))
        return response


def environment_key() -> str | None:
    """Return the API key of `DYN_API_KEY`, None where it is not set."""
    return setting("DYN_API_KEY", "", str).strip() or None


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of each server-sent event up to `[DONE]`; skip comments and event names."""
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield data
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
