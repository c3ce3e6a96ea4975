"""Surface: what one endpoint of the API has of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from dynamo.core.codec import msgpack_encode
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import ChatChunks, Chunks, CompletionChunks, chat_body, completion_body
from dynamo.serving.text_models import SHAPES
from dynamo.serving.text_surfaces import TextWriter

SERVICE_TIER = "default"
"""The only one there is, whichever a request asks for."""


@dataclass(frozen=True, slots=True)
class Surface:
    """What one endpoint of the API has of its own. One whose answers repeat the request is made for each of them."""

    endpoint: str
    """The `endpoint` label of the metrics."""
    model_type: str
    """The model type that serves it (serving-plane.md §2.3)."""
    response_id: Callable[[str], str]
    """The response's id, made of the request's, which is a UUID."""
    chunks: Callable[..., Chunks]
    """Makes the events of a stream from response id, model and creation time."""
    body: Callable[..., bytes]
    """Makes a whole response from the same, its choices and its usage; from its `nvext` too where `has_extras`."""
    error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
    """Writes an error that comes before the stream."""
    always_usage: bool = False
    """Whether a stream counts tokens without being asked."""
    has_extras: bool = False
    """Whether answers have a place for `nvext`."""


CHAT = Surface("chat_completions", "Chat", "chatcmpl-{}".format, ChatChunks, chat_body, has_extras=True)
COMPLETIONS = Surface(
    "completions", "Completions", "cmpl-{}".format, CompletionChunks, completion_body, has_extras=True
)


def tiered(surface: Surface) -> Surface:
    """The same for a request that names a service tier: its answer says which one served it."""
    return replace(
        surface,
        chunks=partial(surface.chunks, service_tier=SERVICE_TIER),
        body=partial(surface.body, service_tier=SERVICE_TIER),
    )


def rewritten(
    surface: Surface, request: ChatCompletionRequest | CompletionRequest, response_id: str, model: str, created: int
) -> tuple[bytes | None, TextWriter | None]:
    """What a text worker is asked, and who writes its answer, where the endpoint is not chat's or completions' own."""
    if surface.endpoint in SHAPES:
        return None, None
    asked = given(msgspec.to_builtins(request))
    if "messages" in asked:
        asked["messages"] = [given(message) for message in asked["messages"]]
    body = partial(surface.body, response_id, model, created)
    return msgpack_encode(asked), TextWriter(surface.chunks(response_id, model, created), body)


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """What a client has said of them."""
    return {name: value for name, value in fields.items() if value is not None}
