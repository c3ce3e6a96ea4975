"""Response form: how the output of a worker becomes the response of one endpoint, without connections.

`relay.RelayAnswer` writes it.
"""

import abc
from typing import Any

import msgspec
from msgspec import Struct

from dynamo.core.errors import Unknown
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import DONE


class Whole(Struct, frozen=True):
    """Response that is sent at once."""

    body: bytes
    content_type: bytes = b"application/json"
    status: int = 200
    headers: bytes = b""
    """Header lines, each `name: value\\r\\n`."""


class Form(abc.ABC):
    """Response format of an endpoint. Every method raises `Unknown` for output that no worker of its kind sends."""

    media = b"text/event-stream"
    """Content type of a streamed response; final when the first piece is written."""
    usage: CompletionUsage | None = None
    """Usage reported by the worker."""
    tokens = 0
    """Output tokens so far, if the worker generates tokens."""
    is_heavy = False
    """Whether `end` takes too long for the loop, and runs in a thread."""
    refusal: Whole | None = None
    """Response sent instead of the output, once a worker has reported a failure in a form of its own."""

    def token(self, token_id: int) -> bytes:
        """Return the bytes to write for a bare token."""
        raise Unknown(f"the worker answered token {token_id}: expected an object")

    @abc.abstractmethod
    def add(self, value: Any) -> bytes:
        """Return the bytes to write for an item; empty if the response is sent at the end."""

    @abc.abstractmethod
    def end(self) -> Whole | bytes:
        """Return the whole response, or the end of a streamed one."""

    def failure(self, error: ErrorAnswer) -> bytes | None:
        """Return the end of a streamed response that failed; None if the connection must be aborted."""
        return error.event() + DONE


def converted(value: Any, kind: Any) -> Any:
    """Return the value converted to that type. Raise `Unknown`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Unknown(f"the worker's answer cannot be read: {error}") from None
