"""Wire errors: encoding of the error tree in Dynamo's format, and decoding.

`named` maps the Python exceptions of handlers to a class of the tree.

The format is Dynamo's (`error_type`, `class`, `reason`, `message`, `diagnostic`); `param` is an extension, written only
when it is set.
"""

import asyncio
from typing import Any

import msgspec

from dynamo.core import errors
from dynamo.core.codec import json_encode
from dynamo.core.errors import DynamoException, HttpError, InvalidArgument

MESSAGE_CHARS_MAX = 8192

UNKNOWN = ({"Backend": "Unknown"}, "Internal", "backend.unknown")

# Most specific class first; the first match is written.
_KINDS: tuple[tuple[type[DynamoException], Any, str, str], ...] = (
    (errors.InvalidArgument, {"Backend": "InvalidArgument"}, "InvalidRequest", "backend.invalid_argument"),
    (errors.CannotConnect, {"Backend": "CannotConnect"}, "Unavailable", "backend.cannot_connect"),
    (errors.Disconnected, {"Backend": "Disconnected"}, "Unavailable", "backend.disconnected"),
    (errors.ConnectionTimeout, {"Backend": "ConnectionTimeout"}, "DeadlineExceeded", "backend.connection_timeout"),
    (errors.ResponseTimeout, {"Backend": "ResponseTimeout"}, "DeadlineExceeded", "backend.response_timeout"),
    (errors.StreamIncomplete, {"Backend": "StreamIncomplete"}, "Unavailable", "backend.stream_incomplete"),
    (errors.EngineShutdown, {"Backend": "EngineShutdown"}, "Unavailable", "backend.engine_shutdown"),
    (errors.WorkerOverloaded, "WorkerOverloaded", "CapacityExhausted", "capacity.worker_overloaded"),
    (errors.WorkerUnavailable, "WorkerUnavailable", "Unavailable", "backend.worker_unavailable"),
    (errors.Overloaded, "ResourceExhausted", "RateLimited", "request.rate_limited"),
    (errors.Cancelled, {"Backend": "Cancelled"}, "Cancelled", "backend.cancelled"),
    (errors.NotFound, "NotFound", "NotFound", "request.not_found"),
)

_BY_NAME: dict[str, type[DynamoException]] = {
    **{kind.__name__: kind for kind, *_ in _KINDS},
    "Unknown": errors.Unknown,
    "ResourceExhausted": errors.Overloaded,
}


# Python exceptions as classified by Dynamo.
_NAMED: tuple[tuple[type[BaseException], type[DynamoException]], ...] = (
    (ConnectionError, errors.Disconnected),
    (TimeoutError, errors.ConnectionTimeout),
    (asyncio.CancelledError, errors.Cancelled),
)
_BLAMED = (ValueError, TypeError)
"""Exceptions by which a Python handler rejects a request, as in Dynamo; their messages are not for clients."""
_BLAMED_PREFIXES = tuple(f"{kind.__name__}: " for kind in _BLAMED)

# HTTP statuses with their own error type in Dynamo; all others map by their class (4xx, 5xx).
_HTTP: dict[int, tuple[str, str, str]] = {
    401: ("Unknown", "Unauthenticated", "request.unauthenticated"),
    404: ("Unknown", "NotFound", "request.not_found"),
    408: ("ResponseTimeout", "DeadlineExceeded", "request.deadline_exceeded"),
    409: ("Unknown", "Conflict", "request.conflict"),
    413: ("InvalidArgument", "PayloadTooLarge", "request.payload_too_large"),
    429: ("ResourceExhausted", "RateLimited", "request.rate_limited"),
    499: ("Cancelled", "Cancelled", "request.cancelled"),
    501: ("Unknown", "NotImplemented", "runtime.not_implemented"),
    502: ("Unknown", "BackendProtocol", "backend.protocol"),
    503: ("Unavailable", "Unavailable", "backend.unavailable"),
    504: ("ResponseTimeout", "DeadlineExceeded", "request.deadline_exceeded"),
    529: ("ResourceExhausted", "CapacityExhausted", "capacity.exhausted"),
}
_HTTP_CALLER = ("InvalidArgument", "InvalidRequest", "request.invalid")
_HTTP_OTHER = ("Unknown", "Internal", "runtime.internal")


class HttpErrorMessage(msgspec.Struct):
    """Encoding of an `HttpError` as a message, as in Dynamo."""

    message: str
    code: int


def refused(error: ValueError | TypeError) -> InvalidArgument:
    """Return the error for a request that a Python handler rejected by raising one of these classes.

    The message begins with the name of the base class, not of a subclass: callers recognise it by that prefix.
    """
    kind = next(kind for kind in _BLAMED if isinstance(error, kind))
    return InvalidArgument(f"{kind.__name__}: {error}", is_public=False)


def named(error: BaseException) -> DynamoException:
    """Return the error-tree class of an exception; exceptions of an engine are not the client's fault."""
    if isinstance(error, DynamoException):
        return error
    if (chosen := _status_of(error)) is not None:
        return chosen
    message = f"{type(error).__name__}: {error}"
    for kind, tree in _NAMED:
        if isinstance(error, kind):
            return tree(message)
    return errors.Unknown(message)


def _status_of(error: BaseException) -> HttpError | None:
    """Return the status that an exception of another library carries: `status` or `code` (4xx, 5xx) and `message`."""
    message = getattr(error, "message", None)
    for status in (getattr(error, "status", None), getattr(error, "code", None)):
        if isinstance(message, str) and isinstance(status, int) and 400 <= status <= 599:
            return HttpError(int(status), message)
    return None


def to_wire(error: BaseException) -> dict[str, Any]:
    """Encode an error as Dynamo's error object."""
    error = named(error)
    message = str(error)[:MESSAGE_CHARS_MAX]
    if isinstance(error, HttpError):
        text = json_encode(HttpErrorMessage(message, error.code)).decode()
        return _object(*_HTTP.get(error.code, _HTTP_CALLER if 400 <= error.code < 500 else _HTTP_OTHER), text)
    for kind, error_type, error_class, reason in _KINDS:
        if isinstance(error, kind):
            wire = _object(error_type, error_class, reason, message)
            if isinstance(error, InvalidArgument):
                if error.is_public:
                    wire["public"] = {"type": "message", "message": message}
                if error.param is not None:
                    wire["param"] = error.param
            return wire
    return _object(*UNKNOWN, message)


def from_wire(wire: Any) -> DynamoException:
    """Decode an error object; return `Unknown` for an unknown type."""
    if not isinstance(wire, dict):
        return errors.Unknown(str(wire))
    message = str(wire.get("message") or wire.get("diagnostic") or "worker failed without an error message")
    name = wire.get("error_type")
    if isinstance(name, str) and (chosen := _http_error(message)) is not None:
        return chosen
    if isinstance(name, dict):
        name = next(iter(name.values()), None)
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is InvalidArgument:
        param = wire.get("param")
        is_public = "public" in wire or not message.startswith(_BLAMED_PREFIXES)
        return InvalidArgument(message, param=param if isinstance(param, str) else None, is_public=is_public)
    return (kind or errors.Unknown)(message)


def _http_error(message: str) -> HttpError | None:
    """Decode the HTTP status that a handler chose, None if the message contains none."""
    if not message.startswith("{"):
        return None
    try:
        chosen = msgspec.json.decode(message, type=HttpErrorMessage)
        return HttpError(chosen.code, chosen.message)
    except ValueError:
        return None


def _object(error_type: Any, error_class: str, reason: str, message: str) -> dict[str, Any]:
    return {
        "error_type": error_type,
        "class": error_class,
        "reason": reason,
        "message": message,
        "diagnostic": message,
    }
