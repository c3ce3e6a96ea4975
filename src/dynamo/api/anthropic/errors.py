"""Errors in Anthropic's format: `{"type": "error", "error": {"type": …, "message": …}}`.

`serving/errors.py` maps exceptions to statuses; this module formats the body.
"""

from dynamo.core.codec import json_encode
from dynamo.protocols.anthropic import ErrorDetails, ErrorMessage
from dynamo.serving.errors import ErrorAnswer

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_details(error: ErrorAnswer) -> ErrorDetails:
    """Return the inner object. Overload is detected by its code, because its status is configurable."""
    if error.code == "overloaded":
        kind = TYPES[529]
    else:
        kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return ErrorDetails(kind, error.message)


def error_body(error: ErrorAnswer) -> bytes:
    """Return the JSON of an error before the stream."""
    return json_encode(ErrorMessage(error_details(error)))
