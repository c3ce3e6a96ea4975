"""The error tree: each class defines who is at fault and whether another worker may retry.

    DynamoException
    ├── InvalidArgument            the caller is at fault: never retried, the message is returned to the client
    │   └── ConfigError            a flag, a variable or a file is wrong: one line, exit status 2
    │       └── StartupError       valid settings that cannot be applied on this machine now: one line, exit status 1
    ├── NotFound                   no such model, endpoint or route
    ├── HttpError                  a handler chose the HTTP status itself
    ├── StorageError               a file could not be written or read; the disk may be full
    ├── Unknown                    the engine failed without a reason
    ├── Cancelled                  the client disconnected or cancelled the request
    ├── Overloaded                 every worker is busy: the caller should retry later
    │   └── RouterQueueLimitExceeded   the router's queue for this class of requests is full
    ├── SelectionServiceError      a selection service chose no worker; carries its reason
    └── WorkerUnavailable          this worker cannot serve the request; another one may
        ├── CannotConnect          nothing listens at the worker's address
        ├── Disconnected           the connection broke
        ├── ConnectionTimeout      the worker did not acknowledge in time
        ├── ResponseTimeout        no response item arrived within the timeout
        ├── StreamIncomplete       the stream ended without its final marker
        ├── InstanceTimeout        no instance registered within the caller's timeout
        ├── NotReady               the model is registered, but no worker serves it at the moment
        ├── CannotResume           the stream broke, and its request cannot continue on another worker
        ├── EngineShutdown         the worker is draining or its engine stopped
        └── WorkerOverloaded       this worker's slots and queue are full

The names below `DynamoException` are those of upstream's `dynamo.llm.exceptions`. The HTTP status of each one is
decided in `dynamo.serving.errors` alone.
"""

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write for which there is no space."""
HTTP_ERROR_MESSAGE_CHARS_MAX = 8192  # Upstream truncates the message of an HttpError here.


class DynamoException(Exception):
    """Base class of all errors with a defined meaning in this system."""

    retry_elsewhere = False
    """True when the same request may succeed on another worker."""


class InvalidArgument(DynamoException, ValueError):
    """The request or the setting is wrong; the message contains the value and the expected one.

    A `ValueError`, because upstream's bindings raise one for a wrong argument.
    """

    def __init__(self, message: str, *, param: str | None = None, is_public: bool = True) -> None:
        super().__init__(message)
        self.param = param
        """The field of the request that is wrong, if one can be named."""
        self.is_public = is_public
        """False if the message is an engine's own, which is not shown to clients."""


class ConfigError(InvalidArgument):
    """A flag, an environment variable or a configuration file is wrong."""


class StartupError(ConfigError):
    """The settings are valid but cannot be applied on this machine now: a port is in use, a directory is not usable."""


class NotFound(DynamoException):
    """There is no such model, endpoint or route; `param` and `code` are sent to the client with the message."""

    def __init__(self, message: str = "", *, param: str = "model", code: str = "model_not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class HttpError(DynamoException):
    """An HTTP status chosen by a handler. Raises `ValueError` for an invalid status or a message that is not text."""

    def __init__(self, code: int, message: str) -> None:
        if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code < 600:
            raise ValueError(f"HTTP status {code!r}: expected a whole number from 0 to 599")
        if not isinstance(message, str):
            raise ValueError(f"the message of an HttpError is {message!r}: expected text")  # noqa: TRY004
        self.code = code
        self.message = message[:HTTP_ERROR_MESSAGE_CHARS_MAX]
        super().__init__(self.message)


class StorageError(DynamoException):
    """A file could not be written or read; the message reaches the client. A full disk is an error of its own."""

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        self.is_full = is_full
        super().__init__(message)

    @classmethod
    def of(cls, error: OSError, what: str) -> "StorageError":
        """Return the error for an `OSError` of `what`, without the path: clients are not shown where files are."""
        reason = error.strerror or type(error).__name__
        return cls(f"{what}: {reason}", is_full=error.errno in FULL)


class Unknown(DynamoException):
    """The engine failed without a reason."""


class Cancelled(DynamoException):
    """The client disconnected or cancelled the request."""


class Overloaded(DynamoException):
    """Every worker is busy."""


class RouterQueueLimitExceeded(Overloaded):
    """The router's queue for this class of requests is full: policy class, kind of limit, current value, the limit."""


class SelectionServiceError(DynamoException):
    """A selection service chose no worker: an identifier of the reason, and the matching HTTP status."""

    def __init__(self, message: str = "", kind: str = "internal", status_code: int = 500) -> None:
        self.kind = kind
        self.status_code = status_code
        super().__init__(message)


class WorkerUnavailable(DynamoException):
    """The chosen worker cannot serve the request."""

    retry_elsewhere = True


class CannotConnect(WorkerUnavailable):
    """Nothing listens at the worker's address."""


class Disconnected(WorkerUnavailable):
    """The connection to the worker broke."""


class ConnectionTimeout(WorkerUnavailable):
    """The worker did not acknowledge the request in time."""


class ResponseTimeout(WorkerUnavailable):
    """No response item arrived within the timeout."""


class StreamIncomplete(WorkerUnavailable):
    """The response stream ended without its final marker."""


class InstanceTimeout(WorkerUnavailable, TimeoutError):
    """No instance registered within the caller's timeout; a `TimeoutError`, as in upstream's bindings."""


class NotReady(WorkerUnavailable):
    """The model is registered, but no worker serves it at the moment; the message is returned to the client."""

    retry_elsewhere = False


class NoMatchingWorker(NotReady):
    """Workers serve the model, but none has the taints that the request requires; the message is returned to the client."""


class CannotResume(WorkerUnavailable):
    """The stream broke after its first token and cannot continue elsewhere; the message is returned to the client."""

    retry_elsewhere = False


class EngineShutdown(WorkerUnavailable):
    """The worker is draining, or its engine stopped."""


class WorkerOverloaded(WorkerUnavailable):
    """The chosen worker's slots and queue are full."""
