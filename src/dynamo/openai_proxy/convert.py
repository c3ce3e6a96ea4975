"""Convert: a client's request into the server's, the server's chunks into ours, and its refusals into our errors. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.core.codec import UNREADABLE, json_decode
from dynamo.core.errors import DynamoException, HttpError, InvalidArgument, Unknown, WorkerUnavailable

OURS = ("nvext",)
"""Fields of a request that are for our frontend alone."""
GONE = frozenset({502, 503, 504})
"""What a server says that cannot answer now; another one may."""
ERROR_CHARS_MAX = 2000
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What the server is asked."""

    path: str
    """Below the API's beginning."""
    body: Mapping[str, Any]
    is_stream: bool
    drops_usage: bool = False
    """Whether the count of tokens is for us alone: the client did not ask for it."""


def text_request(given: Mapping[str, Any], model: str) -> TextRequest:
    """The client's request with the server's own name of the model. Raises `InvalidArgument` for what is none."""
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


class Chunks:
    """The chunks of one answer, on their way to the client."""

    __slots__ = ("_asked", "_name", "_unfinished")

    def __init__(self, asked: TextRequest, name: str) -> None:
        """`name` is what the model is called here."""
        self._asked = asked
        self._name = name
        self._unfinished = int(asked.body.get("n") or 1) if isinstance(asked.body.get("n"), int | None) else 1

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its end."""
        return self._unfinished <= 0

    def take(self, chunk: Any) -> dict[str, Any] | None:
        """One chunk as the frontend reads it; None for one that the client did not ask for. Raises its error."""
        if not isinstance(chunk, dict):
            raise Unknown(f"the server's chunk is {str(chunk)[:80]}: expected an object")
        if chunk.get("error"):
            raise refusal_in(chunk["error"])
        choices = chunk.get("choices")
        if not choices and self._asked.drops_usage:
            return None
        if "model" in chunk:
            chunk["model"] = self._name
        if self._asked.drops_usage:
            chunk.pop("usage", None)
        for choice in choices or ():
            self._mend(choice)
        return chunk

    def _mend(self, choice: Any) -> None:
        """Other names and whole messages, as the frontend reads them."""
        if not isinstance(choice, dict):
            return
        if choice.get("finish_reason"):
            self._unfinished -= 1
        if "messages" not in self._asked.body:
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
    """What a server's refusal is to us: its status and its words, or that another worker may try."""
    message = message_of(body) or f"the server answered with status {status}"
    if status in GONE:
        return WorkerUnavailable(f"the server answered with status {status}: {message}")
    return HttpError(status if 400 <= status < 600 else 502, message)


def refusal_in(error: Any) -> DynamoException:
    """The same for an error inside a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600 else 500
    message = _words(error) or "the server's stream ended in an error"
    return WorkerUnavailable(message) if status in GONE else HttpError(status, message)


def message_of(body: bytes) -> str:
    """The words of a refusal in whatever form: OpenAI's, FastAPI's, or plain text."""
    try:
        told = json_decode(body)
    except UNREADABLE:
        return body.decode("utf-8", "replace").strip()[:ERROR_CHARS_MAX]
    return _words(told)


def _words(told: Any) -> str:
    if isinstance(told, str):
        return told[:ERROR_CHARS_MAX]
    if isinstance(told, dict):
        for key in ("error", "message", "detail"):
            if told.get(key):
                return _words(told[key])
    return "" if told in (None, {}, []) else str(told)[:ERROR_CHARS_MAX]
