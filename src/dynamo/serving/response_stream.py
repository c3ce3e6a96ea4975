"""ResponseStream: the interface through which a handler reads one request and writes its response.

The HTTP server's exchange implements it, and so do the local requests of batches (`local_requests`). Serving code depends
on this protocol only, so that it can be called without an HTTP server. A completion call (`completion_calls`) is an
`IncomingRequest` whose response is not written as bytes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.serving.choice import Frame
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.request_trace.payload import Capture


class RequestAccount(Protocol):
    """The authenticated caller of one request, with its quotas."""

    @property
    def name(self) -> str:
        """The caller's name in metrics and logs."""

    @property
    def owner(self) -> str:
        """The owner that is stored with the caller's files, batches and responses."""

    def may_use(self, model: str) -> bool:
        """Return whether this caller may use a model."""

    def require(self, model: str) -> None:
        """Raise `HttpError` (403) for a model that this caller may not use."""

    def spend(self, tokens: int) -> None:
        """Count tokens against the caller's quota."""

    def close(self) -> None:
        """End the request. Further calls do nothing."""


class IncomingRequest(Protocol):
    """One request: its headers, its caller, and its state."""

    body: bytearray
    """The request's body; empty if it was made as an object."""
    headers: list[tuple[bytes, bytes]]
    """The request's headers; names are lower case."""
    header_bytes: bytes
    """Rendered response header lines, sent with the response's head."""
    error_body: Callable[[ErrorAnswer], bytes]
    """Renders an error in the dialect of the endpoint."""
    on_disconnect: Callable[[], None] | None
    """Called once when the client disconnects before the response is complete."""
    response_started: bool
    response_complete: bool
    status: int
    """Status that was sent; 0 before."""
    disconnected: bool

    @property
    def account(self) -> RequestAccount | None:
        """The authenticated caller; None where no API key is configured."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first request header of that (lower-case) name."""

    def refuse(self, error: ErrorAnswer) -> None:
        """Send an error response; after the response started, end the stream with an error event."""

    def begin(self) -> None:
        """Send the status of a streamed response before its first event; further calls do nothing."""

    def comment(self) -> None:
        """Write a comment to a client that waits for the next event, so that its connection is not closed as idle."""

    def capture(self) -> Capture:
        """Keep a copy of everything that is written from now on."""

    def drop_body(self) -> None:
        """Free the request's body."""


class ResponseStream(IncomingRequest, Protocol):
    """One request and the response that is written to it."""

    def respond(self, status: int, body: bytes, content_type: bytes = ...) -> None:
        """Send a complete response."""

    def open(self, content_type: bytes) -> None:
        """Begin a streamed response."""

    def write(self, data: bytes) -> None:
        """Send server-sent event data; begins the response if needed."""

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """Send server-sent event data that is in parts, which need not be whole events and may be long."""

    def write_framed(self, frame: Frame, text: bytes) -> None:
        """Send the events that are `text` between the head and the tail of the frame, to a stream that has begun."""

    def end(self, data: bytes = ...) -> None:
        """Send the last data and complete the response."""

    def abort(self) -> None:
        """Close the connection: a response that has begun cannot be completed."""


RequestHandler = Callable[[ResponseStream], None]
"""Called on the event loop with a complete request; it responds now or later, and always ends the response."""
