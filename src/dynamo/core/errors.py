"""The error tree: each class says whose fault it was, and whether another worker may try.

    DynamoException
    ├── InvalidArgument            the caller's fault: never retried, its message reaches the client
    │   └── ConfigError            a flag, a variable or a file is wrong: one line, exit status 2
    │       └── StartupError       the settings are valid, this machine refuses them now: one line, exit status 1
    ├── NotFound                   no such model, endpoint or route
    ├── HttpError                  a handler chose the HTTP status itself
    ├── StorageError               a file could not be written or read; the disk may be full
    ├── Unknown                    the engine failed and did not say why
    ├── Cancelled                  the client left, or asked to stop
    ├── Overloaded                 every worker is busy: the caller should come back later
    │   └── RouterQueueLimitExceeded   the router's queue for this class of requests is full
    ├── SelectionServiceError      a selection service chose no worker, and says why
    └── WorkerUnavailable          this worker cannot answer; another one may
        ├── CannotConnect          nobody listens at the worker's address
        ├── Disconnected           the connection broke
        ├── ConnectionTimeout      the worker did not acknowledge in time
        ├── ResponseTimeout        the stream fell silent for too long
        ├── StreamIncomplete       the stream ended without its final marker
        ├── NotReady               the model is known, but no worker serves it at the moment
        ├── CannotResume           the stream broke, and its request cannot continue on another worker
        ├── EngineShutdown         the worker is draining or its engine stopped
        └── WorkerOverloaded       this worker's slots and queue are full

The names below `DynamoException` are those of upstream's `dynamo.llm.exceptions`
(serving-plane.md §3.1); which HTTP status each one becomes is decided in `dynamo.serving.errors` alone.
"""

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write for which there is no room."""
HTTP_ERROR_MESSAGE_CHARS_MAX = 8192  # Upstream cuts the message of an HttpError here.


class DynamoException(Exception):
    """Any failure that this system names."""

    retry_elsewhere = False
    """True when the same request may succeed on another worker."""


class InvalidArgument(DynamoException):
    """The request or the setting is wrong; the message says what was seen and what was expected."""

    def __init__(self, message: str, *, param: str | None = None, is_public: bool = True) -> None:
        super().__init__(message)
        self.param = param
        """The field of the request that is wrong, where one can be named."""
        self.is_public = is_public
        """False where the words are an engine's own, which a client is not to see."""


class ConfigError(InvalidArgument):
    """A flag, an environment variable or a configuration file is wrong."""


class StartupError(ConfigError):
    """The settings are valid, but cannot be had on this machine now: a port is in use, a directory is not usable."""


class NotFound(DynamoException):
    """There is no such model, endpoint or route; `param` and `code` are what a client is told beside the message."""

    def __init__(self, message: str = "", *, param: str = "model", code: str = "model_not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class HttpError(DynamoException):
    """A handler chose the HTTP status itself. Raises `ValueError` for what is no status or no text."""

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
    """The engine failed and did not say why."""


class Cancelled(DynamoException):
    """The client left, or asked to stop."""


class Overloaded(DynamoException):
    """Every worker is busy."""


class RouterQueueLimitExceeded(Overloaded):
    """The router's queue for this class of requests is full: policy class, kind of limit, what is held, the limit."""


class SelectionServiceError(DynamoException):
    """A selection service chose no worker: a stable word for the reason, and the HTTP status that it amounts to."""

    def __init__(self, message: str = "", kind: str = "internal", status_code: int = 500) -> None:
        self.kind = kind
        self.status_code = status_code
        super().__init__(message)


class WorkerUnavailable(DynamoException):
    """The chosen worker cannot answer."""

    retry_elsewhere = True


class CannotConnect(WorkerUnavailable):
    """Nobody listens at the worker's address."""


class Disconnected(WorkerUnavailable):
    """The connection to the worker broke."""


class ConnectionTimeout(WorkerUnavailable):
    """The worker did not acknowledge the request in time."""


class ResponseTimeout(WorkerUnavailable):
    """The response stream fell silent for too long."""


class StreamIncomplete(WorkerUnavailable):
    """The response stream ended without its final marker."""


class NotReady(WorkerUnavailable):
    """The model is known, but no worker serves it at the moment; the message reaches the client."""

    retry_elsewhere = False


class CannotResume(WorkerUnavailable):
    """The stream broke after its first token, and cannot continue elsewhere; the message reaches the client."""

    retry_elsewhere = False


class EngineShutdown(WorkerUnavailable):
    """The worker is draining, or its engine stopped."""


class WorkerOverloaded(WorkerUnavailable):
    """The chosen worker's slots and queue are full."""
