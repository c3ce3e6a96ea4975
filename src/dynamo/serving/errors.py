"""HTTP errors: the only place that maps an exception to an HTTP status and formats the error body.

A body has OpenAI's nested object and also upstream's flat keys, so that clients of either form can read it (with the flat
keys alone, the OpenAI SDK shows "status code (no body)").
"""

import functools
import http

from msgspec import Struct

from dynamo.core.codec import json_encode
from dynamo.core.config import setting
from dynamo.core.errors import (
    Cancelled,
    CannotResume,
    ConnectionTimeout,
    HttpError,
    InvalidArgument,
    NoMatchingWorker,
    NotFound,
    NotReady,
    Overloaded,
    ResponseTimeout,
    StorageError,
    Unknown,
    WorkerOverloaded,
    WorkerUnavailable,
)

OVERLOADED = 529
CLIENT_CLOSED_REQUEST = 499

REASONS = {OVERLOADED: "Overloaded", CLIENT_CLOSED_REQUEST: "Client Closed Request"}
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable",
    504: "timeout_error",
    529: "overloaded_error",
}


class ErrorAnswer(Struct, frozen=True):
    """Error response for a client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    label: str = "internal"
    """`error_type` label of the request counters."""
    retry_after_s: int | None = None
    backend_status: int | None = None
    """Status of a worker's failure that has none of its own; upstream's clients find it in `details`."""

    def body(self) -> bytes:
        """Return the JSON body of a unary error."""
        return json_encode({"error": self.nested(), **self.flat()})

    def flat_body(self) -> bytes:
        """Return the JSON body of a unary error with upstream's keys alone."""
        return json_encode(self.flat())

    def flat(self) -> dict[str, object]:
        """Return upstream's error object."""
        keys: dict[str, object] = {"message": self.message, "type": reason(self.status), "code": self.status}
        if self.backend_status is not None:
            keys["details"] = {"backend_status": self.backend_status}
        return keys

    def event(self) -> bytes:
        """Return the server-sent event of an error after the stream began."""
        return b"data: " + json_encode({"error": self.nested()}) + b"\n\n"

    def nested(self) -> dict[str, object]:
        """Return OpenAI's error object; `code` is the error's code name if it has one, else the status."""
        kind = OPENAI_TYPES.get(self.status, "internal_server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}


def reason(status: int) -> str:
    """Return the reason phrase of a status, including upstream's non-standard statuses."""
    if status in REASONS:
        return REASONS[status]
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


@functools.cache
def overload_status() -> int:
    """Return `DYN_HTTP_OVERLOAD_STATUS_CODE`, read once: 200 to 999; any other value is 529."""
    text = setting("DYN_HTTP_OVERLOAD_STATUS_CODE", "", str)
    return int(text) if text.isdigit() and 200 <= int(text) <= 999 else OVERLOADED


def answer_to(error: BaseException) -> ErrorAnswer:
    """Return the response to a failed request. Engine text is hidden from clients, except in a public `InvalidArgument`."""
    match error:
        case NotFound():
            return ErrorAnswer(404, str(error), param=error.param, code=error.code, label="not_found")
        case InvalidArgument():
            message = str(error) if error.is_public else "Invalid request"
            return ErrorAnswer(400, message, param=error.param, label="validation")
        case HttpError():
            return _chosen(error)
        case StorageError(is_full=True):
            return ErrorAnswer(507, str(error), code="insufficient_storage", label="storage")
        case StorageError():
            return ErrorAnswer(503, str(error), code="storage_unavailable", label="storage", retry_after_s=5)
        case Cancelled():
            return ErrorAnswer(CLIENT_CLOSED_REQUEST, "Request cancelled", label="cancelled")
        case Overloaded() | WorkerOverloaded():
            message = str(error) or "Service temporarily overloaded"
            return ErrorAnswer(overload_status(), message, code="overloaded", label="overload", retry_after_s=1)
        case ConnectionTimeout() | ResponseTimeout():
            return ErrorAnswer(504, "Request deadline exceeded", code="timeout", label="response_timeout")
        case NoMatchingWorker():  # The status is Dynamo's.
            return ErrorAnswer(500, str(error), param="nvext", code="no_matching_worker")
        case NotReady():
            return ErrorAnswer(503, str(error), code="not_ready", label="unavailable", retry_after_s=1)
        case CannotResume():
            return ErrorAnswer(503, str(error), code="unavailable", label="unavailable", retry_after_s=1)
        case OverflowError():  # A number that no message to a worker can represent.
            return ErrorAnswer(400, f"A number of the request is out of range: {error}", label="validation")
        case WorkerUnavailable():
            return ErrorAnswer(
                503, "Service temporarily unavailable", code="unavailable", label="unavailable", retry_after_s=1
            )
        case Unknown():
            return ErrorAnswer(500, "Internal server error", backend_status=500)
        case _:
            return ErrorAnswer(500, "Internal server error")


def _chosen(error: HttpError) -> ErrorAnswer:
    status = error.code if 400 <= error.code <= 599 else 500
    if status == 501:
        return ErrorAnswer(status, str(error), label="not_implemented")  # The message names the missing feature.
    label = "validation" if status < 500 else "internal"
    text = str(error) if status < 500 else reason(status)
    if error.code == 500:
        return ErrorAnswer(status, "Internal server error", label=label, backend_status=status)
    return ErrorAnswer(status, text, label=label)
