"""Helpers of chat processors that prepare requests in Python: constraints, chat templates, media, and engine errors."""

import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dynamo.core.errors import HttpError, InvalidArgument

ChatProcessorBackend = Literal["vllm", "sglang"]

MEDIA_PART_TYPES = ("image_url", "audio_url", "video_url")
"""Types of message parts that refer to media; also the fields with the reference."""
MEDIA_ROLES = ("user", "tool")
ID_MASK = (1 << 64) - 1
BACKEND_INVALID_ARGUMENT = "BackendInvalidArgument: "
"""Prefix of a worker's rejection in the text of an exception; JSON with message and status follows."""
LEGACY_CONSTRAINTS = ("json", "regex", "grammar", "choice")


class PreprocessError(Exception):
    """A request that a preprocessing process rejects; the message is for the client."""


# Constraints


def validate_legacy_guided_decoding_constraints(request: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for more than one `guided_*` constraint, or choices that are not a list."""
    given = list(_legacy_constraints(request))
    if len(given) > 1:
        raise InvalidArgument("Only one guided-decoding constraint can be set; received: " + ", ".join(given))


def legacy_guided_decoding(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `guided_*` constraint of a request with its whitespace pattern. Raises `InvalidArgument`."""
    validate_legacy_guided_decoding_constraints(request)
    for name in _legacy_constraints(request):
        pattern = request.get("guided_whitespace_pattern")
        return {name: request[f"guided_{name}"]} | ({} if pattern is None else {"whitespace_pattern": pattern})
    return None


def _legacy_constraints(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the constraints that a request has; an empty list of choices is no constraint."""
    choices = request.get("guided_choice")
    if choices is not None and not isinstance(choices, list):
        raise InvalidArgument(f"guided_choice must be a list of strings; received {type(choices).__name__}")
    for name in LEGACY_CONSTRAINTS:
        value = request.get(f"guided_{name}")
        if value is not None and value != []:
            yield name


# Chat templates


def read_jinja_chat_template(template_path: str, *, backend: ChatProcessorBackend) -> str:
    """Return the text of a template as the engine reads it: SGLang strips newlines and unescapes others."""
    text = Path(template_path).read_text(encoding="utf-8")
    return text.strip("\n").replace("\\n", "\n") if backend == "sglang" else text


def resolve_chat_template(source_path: str, *, backend: ChatProcessorBackend = "vllm") -> str | None:
    """Return the template in a file of its own in a model's directory, if there is one.

    Raises `ValueError` for a `chat_template.json` that cannot be read.
    """
    folder = Path(source_path)
    jinja, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.exists():
        return read_jinja_chat_template(str(jinja), backend=backend)
    if not wrapped.exists():
        return None
    try:
        template = json.loads(wrapped.read_text(encoding="utf-8")).get("chat_template")
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"Malformed JSON in {wrapped}: {error}") from error
    return None if template is None else str(template)


# Ids


def random_uuid() -> str:
    """Return 16 random hexadecimal digits."""
    return f"{uuid.uuid4().int & ID_MASK:016x}"


def random_call_id() -> str:
    """Return a random id of a tool call, in OpenAI's form."""
    return f"call_{random_uuid()}"


def worker_warmup() -> bool:
    """Return true: a task that shows that a process of a pool has started."""
    return True


# Requests


def nvext_extra_field_requested(request: Mapping[str, Any], field: str) -> bool:
    """Return whether a request names an extra field of the response's `nvext`."""
    nvext = request.get("nvext")
    fields = nvext.get("extra_fields") if isinstance(nvext, Mapping) else None
    return isinstance(fields, list) and field in fields


def extract_mm_urls(
    messages: Iterable[Any],
) -> tuple[dict[str, list[dict[str, str]]] | None, dict[str, list[str | None]] | None]:
    """Return the media of chat messages by type, and the cache ids of the same parts if one has such an id.

    A part has a URL, `{"Url": …}`; an image may instead have only the id of a cached item, `{"UuidOnly": …}`. Raises
    `ValueError` for a part with neither.
    """
    references: dict[str, list[dict[str, str]]] = {}
    ids: dict[str, list[str | None]] = {}
    for part in _media_parts(messages):
        kind, cache_id = part["type"], part.get("uuid")
        references.setdefault(kind, []).append(_reference(part))
        ids.setdefault(kind, []).append(cache_id)
    has_id = any(one is not None for some in ids.values() for one in some)
    return references or None, ids if has_id else None


def _media_parts(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of users' and tools' messages that refer to media."""
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in MEDIA_ROLES:
            continue
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in MEDIA_PART_TYPES:
                yield part


def _reference(part: Mapping[str, Any]) -> dict[str, str]:
    """Return where the media of a part is. Raises `InvalidArgument`."""
    kind, cache_id = part["type"], part.get("uuid")
    if cache_id is not None and (not isinstance(cache_id, str) or not cache_id):
        raise InvalidArgument(f"{kind} uuid must be a non-empty string, got {cache_id!r}")
    media = part.get(kind)
    url = media.get("url") if isinstance(media, Mapping) else None
    if isinstance(url, str) and url:
        return {"Url": url}
    if cache_id is None:
        raise InvalidArgument(f"{kind} part must contain a non-empty URL or uuid")
    if kind != "image_url":
        raise InvalidArgument(
            f"UUID-only cache reuse is not supported for media modality `{kind}`; provide a media URL"
        )
    return {"UuidOnly": cache_id}


# Errors


def make_backend_error(engine_response: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenAI error with the engine's message."""
    return {"error": {"message": engine_response.get("message") or "unknown backend error", "type": "backend_error"}}


def make_internal_error(request_id: str, detail: str | None = None) -> dict[str, Any]:
    """Return an OpenAI error for a response that cannot be read."""
    message = detail or f"Invalid engine response for request {request_id}"
    return {"error": {"message": message, "type": "internal_error"}}


def as_error_envelope(error_payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenAI error in the envelope in which a handler's element fails the stream."""
    message = (error_payload.get("error") or {}).get("message") or "unknown error"
    return {"_dynamo_annotated": True, "event": "error", "comment": [message]}


def backend_invalid_argument_to_http_error(exc: BaseException) -> HttpError | None:
    """Return a worker's rejection with its status, 400 by default; `None` for other exceptions and statuses."""
    _, prefix, text = str(exc).partition(BACKEND_INVALID_ARGUMENT)  # Other errors may wrap it.
    if not prefix:
        return None
    try:
        rejection = json.loads(text)
    except ValueError:
        rejection = None
    if not isinstance(rejection, dict):
        return HttpError(400, text)
    code, message = rejection.get("code"), rejection.get("message")
    if not isinstance(code, int) or isinstance(code, bool):
        code = 400
    if not 100 <= code < 600:
        return None
    return HttpError(code, message if isinstance(message, str) else text)


def handle_engine_error(engine_response: Any, request_id: str, logger: logging.Logger) -> dict[str, Any]:
    """Log an engine's response without tokens and return it as an OpenAI error."""
    if isinstance(engine_response, Mapping) and engine_response.get("status") == "error":
        error = make_backend_error(engine_response)
        logger.error("request %s failed in the engine: %s", request_id, error["error"]["message"])
        return error
    logger.error("request %s: the engine returned no output: %s", request_id, engine_response)
    return make_internal_error(request_id)
