"""API endpoints: the model type, chunk writer, body writer and error format of each generation endpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import msgspec

from dynamo.core.codec import msgpack_encode
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import ChatChunks, Chunks, CompletionChunks, chat_body, completion_body
from dynamo.serving.text_models import SHAPES, TextWriter

SERVICE_TIER = "default"
"""The only service tier, whichever one a request names."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Description of one API endpoint. An endpoint whose responses repeat request fields has one per request."""

    endpoint: str
    """The `endpoint` label of the metrics."""
    model_type: str
    """Model type that serves the endpoint."""
    response_id: Callable[[str], str]
    """Builds the response id from the request id, which is a UUID."""
    chunks: Callable[..., Chunks]
    """Makes the event writer of a stream from response id, model and creation time."""
    body: Callable[..., bytes]
    """Builds a whole response from response id, model, creation time, choices, usage and, if `has_extras`, `nvext`."""
    error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
    """Formats an error that is sent before the stream starts."""
    always_usage: bool = False
    """Whether a stream reports usage without being requested to."""
    has_extras: bool = False
    """Whether responses have an `nvext` field."""


CHAT = Surface("chat_completions", "Chat", "chatcmpl-{}".format, ChatChunks, chat_body, has_extras=True)
COMPLETIONS = Surface(
    "completions", "Completions", "cmpl-{}".format, CompletionChunks, completion_body, has_extras=True
)


def never(*_: object) -> NoReturn:
    """Placeholder for the response factories of a surface: a relayed response has no chunks."""
    raise AssertionError("a relayed response has no chunks")


def relayed(endpoint: str, model_type: str, error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body) -> Surface:
    """Return the surface of a relayed endpoint: its label, the type of its models, and the form of its errors."""
    return Surface(endpoint, model_type, response_id=str, chunks=never, body=never, error_body=error_body)


def tiered(surface: Surface) -> Surface:
    """Return the endpoint for a request with a service tier: its response reports the tier that served it."""
    return replace(
        surface,
        chunks=partial(surface.chunks, service_tier=SERVICE_TIER),
        body=partial(surface.body, service_tier=SERVICE_TIER),
    )


def rewritten(
    surface: Surface, request: ChatCompletionRequest | CompletionRequest, response_id: str, model: str, created: int
) -> tuple[bytes | None, TextWriter | None]:
    """Return body and response writer for a text worker, if the endpoint is neither chat nor completions."""
    if surface.endpoint in SHAPES:
        return None, None
    fields_set = given(msgspec.to_builtins(request))
    if "messages" in fields_set:
        fields_set["messages"] = [given(message) for message in fields_set["messages"]]
    body = partial(surface.body, response_id, model, created)
    return msgpack_encode(fields_set), TextWriter(surface.chunks(response_id, model, created), body)


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}
