"""API endpoints: the model type, chunk writer, body writer and error format of each generation endpoint."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace

from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import ChatChunks, Chunks, CompletionChunks, chat_body, completion_body

SERVICE_TIER = "default"
"""The only service tier, whichever one a request names."""


class Surface(Struct, frozen=True):
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
