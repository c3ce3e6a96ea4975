"""Limits: maximum connections, sizes and times of clients' requests to the HTTP service, and counts of what exceeds them."""

import resource
from typing import Any, TypeVar

from msgspec import Struct

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry

Number = TypeVar("Number", int, float)

RESERVED_FILES = 256
"""File descriptors reserved for workers, discovery and logs."""


class HttpLimits(Struct, frozen=True):
    """Limits of all connections and of each; where stated, 0 disables a limit."""

    connections: int = 0
    """Maximum open connections. 0: the process's limit of open files, less a reserve."""
    requests_per_connection: int = 0
    """Responses after which a connection is closed, so that load balancers redistribute clients. 0: unlimited."""
    header_bytes: int = 64 << 10
    """Maximum size of the request line and the headers together."""
    headers: int = 128
    body_bytes: int = 192 << 20
    bodies_bytes: int = 1 << 30
    """Maximum size of all bodies together; a request beyond it gets a 503. Bodies up to 64 KiB do not count. 0: unlimited."""
    arrival_s: float = 60.0
    """Maximum time in which a request must arrive completely. 0: unlimited."""
    keep_alive_s: float = 75.0
    """Longer than the usual load balancer's 60 s, so that the server never closes a connection that the balancer reuses."""
    unsent_bytes: int = 4 << 20
    """Unsent bytes after which a client is considered not to read: about 20,000 events."""
    stalled_s: float = 60.0
    """Maximum time that written bytes wait for the client to read before the connection is cut. 0: unlimited."""
    silence_s: float = 0.0
    """Maximum silence of a worker before its request ends with a 504. 0: unlimited."""
    request_s: float = 0.0
    """Maximum time of a request from its arrival to its end, then it ends with a 504. 0: unlimited."""
    peek_s: float = 1.0
    """Time that the status of a stream waits for the worker's first event, so that an error has its own status."""
    comment_s: float = 0.0
    """Idle time after which a comment is written into a stream, so that proxies keep it open. 0: never."""

    def connections_max(self) -> int:
        """Return the effective maximum of open connections."""
        if self.connections:
            return self.connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            return 1 << 20
        return max(files - RESERVED_FILES, files // 2)

    @classmethod
    def from_environment(cls) -> "HttpLimits":
        """Return the limits that the environment sets. Raise `ConfigError`."""
        own = cls()
        return cls(
            connections=_number("DYN_HTTP_MAX_CONNECTIONS", own.connections, int),
            requests_per_connection=_number("DYN_HTTP_MAX_REQUESTS_PER_CONNECTION", own.requests_per_connection, int),
            header_bytes=_number("DYN_HTTP_HEADER_LIMIT_KB", own.header_bytes >> 10, int, least=1) << 10,
            headers=_number("DYN_HTTP_MAX_HEADERS", own.headers, int, least=1),
            body_bytes=_number("DYN_HTTP_BODY_LIMIT_MB", own.body_bytes >> 20, int) << 20,
            bodies_bytes=_number("DYN_HTTP_BODIES_LIMIT_MB", own.bodies_bytes >> 20, int) << 20,
            arrival_s=_number("DYN_HTTP_REQUEST_ARRIVAL_TIMEOUT_SECS", own.arrival_s, float),
            keep_alive_s=_number("DYN_HTTP_KEEP_ALIVE_TIMEOUT_SECS", own.keep_alive_s, float),
            unsent_bytes=_number("DYN_HTTP_UNSENT_LIMIT_KB", own.unsent_bytes >> 10, int, least=64) << 10,
            stalled_s=_number("DYN_HTTP_SLOW_READER_TIMEOUT_SECS", own.stalled_s, float),
            silence_s=_number("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", own.silence_s, float),
            request_s=_number("DYN_HTTP_REQUEST_TIMEOUT_SECS", own.request_s, float),
            peek_s=_number("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", round(own.peek_s * 1000), int) / 1000,
            comment_s=_number("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", 0, int) / 1000,
        )


class ConnectionCounts:
    """Metrics of connections."""

    def __init__(self, registry: MetricsRegistry, prefix: str) -> None:
        def counter(word: str, help: str) -> Any:
            return registry.counter(f"{prefix}_http_{word}_total", help).labels()

        self.open = registry.gauge(f"{prefix}_http_connections", "Open connections").labels()
        self.refused = counter("connections_refused", "Connections refused beyond DYN_HTTP_MAX_CONNECTIONS")
        self.late = counter("requests_late", "Requests that did not arrive completely in time")
        self.oversized = counter("requests_oversized", "Requests whose headers or body were too long")
        self.slow_readers = counter("slow_readers", "Connections cut because the client did not read")


def _number(variable: str, default: Number, read: type[Number], least: int = 0) -> Number:
    value: Number = setting(variable, default, read)
    if not least <= value < float("inf"):
        raise ConfigError(f"{variable}={value}: expected a number of at least {least}")
    return value
