"""Convert: client requests to the server's form, its chunks to the frontend's, its errors to exceptions. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.core.codec import UNREADABLE, json_decode
from dynamo.core.errors import DynamoException, HttpError, InvalidArgument, Unknown, WorkerUnavailable

OURS = ("nvext",)
"""Request fields that only the frontend uses."""
GONE = frozenset({502, 503, 504})
"""Statuses of a server that is unavailable; the request may succeed on another one."""
ERROR_CHARS_MAX = 2000
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request to the server."""

    path: str
    """Path below the API's path."""
    body: Mapping[str, Any]
    is_stream: bool
    drops_usage: bool = False
    """Whether the token counts are for this worker only, because the client did not request them."""


def text_request(given: Mapping[str, Any], model: str) -> TextRequest:
    """Return the client's request with the server's model name. Raises `InvalidArgument` for a malformed one."""
    body = {name: value for name, value in given.items() if name not in OURS}
    body["model"] = model
    if "input" in body and "messages" not in body and "prompt" not in body:
        return TextRequest("/embeddings", body, is_stream=False)
    if "messages" not in body and "prompt" not in body:
        raise InvalidArgument("the request has neither messages nor a prompt", param="messages")
    streams = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise InvalidArgument("stream_options must be an object", param="stream_options")
    body["stream"] = True
    body["stream_options"] = {**options, "include_usage": True}
    path = "/chat/completions" if "messages" in body else "/completions"
    return TextRequest(path, body, is_stream=True, drops_usage=streams and not options.get("include_usage"))


class ChunkConverter:
    """Converter of the chunks of one response for the client."""

    __slots__ = ("_name", "_request", "_unfinished")

    def __init__(self, server_request: TextRequest, name: str) -> None:
        """`name` is the model's name in this deployment."""
        self._request = server_request
        self._name = name
        self._unfinished = (
            int(server_request.body.get("n") or 1) if isinstance(server_request.body.get("n"), int | None) else 1
        )

    @property
    def is_finished(self) -> bool:
        """Return whether every choice has finished."""
        return self._unfinished <= 0

    def take(self, chunk: Any) -> dict[str, Any] | None:
        """Return a chunk in the frontend's form; None for one that the client did not request. Raises its error."""
        if not isinstance(chunk, dict):
            raise Unknown(f"malformed chunk from the server: {str(chunk)[:80]}: expected an object")
        if chunk.get("error"):
            raise refusal_in(chunk["error"])
        choices = chunk.get("choices")
        if not choices and self._request.drops_usage:
            return None
        if "model" in chunk:
            chunk["model"] = self._name
        if self._request.drops_usage:
            chunk.pop("usage", None)
        for choice in choices or ():
            self._normalize(choice)
        return chunk

    def _normalize(self, choice: Any) -> None:
        """Convert alternative field names and complete messages to the frontend's form."""
        if not isinstance(choice, dict):
            return
        if choice.get("finish_reason"):
            self._unfinished -= 1
        if "messages" not in self._request.body:
            if choice.get("text") is None:
                choice["text"] = ""
            return
        delta = choice.get("delta")
        if delta is None:
            delta = choice["delta"] = choice.pop("message", None) or {}
            for index, call in enumerate(delta.get("tool_calls") or ()):
                call.setdefault("index", index)
        if isinstance(delta, dict) and delta.get("reasoning") and not delta.get("reasoning_content"):
            delta["reasoning_content"] = delta.pop("reasoning")


def refusal(status: int, body: bytes) -> DynamoException:
    """Return the exception for an error response: the server's status and message, or `WorkerUnavailable`."""
    message = message_of(body) or f"the server responded with status {status}"
    if status in GONE:
        return WorkerUnavailable(f"the server responded with status {status}: {message}")
    return HttpError(status if 400 <= status < 600 else 502, message)


def refusal_in(error: Any) -> DynamoException:
    """Return the exception for an error inside a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600 else 500
    message = _error_text(error) or "the server's stream ended with an error"
    return WorkerUnavailable(message) if status in GONE else HttpError(status, message)


def message_of(body: bytes) -> str:
    """Return the message of an error body in OpenAI's or FastAPI's form, or plain text."""
    try:
        decoded = json_decode(body)
    except UNREADABLE:
        return body.decode("utf-8", "replace").strip()[:ERROR_CHARS_MAX]
    return _error_text(decoded)


def _error_text(decoded: Any) -> str:
    if isinstance(decoded, str):
        return decoded[:ERROR_CHARS_MAX]
    if isinstance(decoded, dict):
        for key in ("error", "message", "detail"):
            if decoded.get(key):
                return _error_text(decoded[key])
    return "" if decoded in (None, {}, []) else str(decoded)[:ERROR_CHARS_MAX]
