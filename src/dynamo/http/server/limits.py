"""Limits: how much one client may ask of the HTTP service before it is told so, or cut off."""

import resource
from dataclasses import dataclass
from typing import TypeVar

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError

Number = TypeVar("Number", int, float)

RESERVED_FILES = 256
"""Descriptors that are not for clients: workers, discovery, logs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of every connection; 0 switches off the one that allows it."""

    connections: int = 0
    """How many may be open. 0: as many as the process may have files, less a reserve."""
    requests_per_connection: int = 0
    """After so many answers a connection is closed, for a balancer to spread it anew. 0: never."""
    header_bytes: int = 64 << 10
    """The request line and the headers together."""
    headers: int = 128
    body_bytes: int = 192 << 20
    bodies_bytes: int = 1 << 30
    """Of all connections together; what is longer gets a 503. Bodies up to 64 KiB do not count. 0: any number."""
    arrival_s: float = 60.0
    """A request that has not arrived whole by then comes from a client that hangs or attacks. 0: however long."""
    keep_alive_s: float = 75.0
    """Longer than the usual load balancer's 60 s, so that it is never we who close a fresh request."""
    unsent_bytes: int = 4 << 20
    """A client this far behind is not reading: about 20,000 events."""
    stalled_s: float = 60.0
    """How long a client may let written bytes wait before it is cut off. 0: however long."""
    silence_s: float = 0.0
    """How long a worker may say nothing before its request ends with a 504. 0: however long."""
    request_s: float = 0.0
    """How long a request may take from its arrival to its end; then it ends with a 504. 0: however long."""
    comment_s: float = 0.0
    """After how long a comment is written into an idle stream, so that nobody takes it for dead. 0: never."""

    def connections_max(self) -> int:
        """How many connections may really be open."""
        if self.connections:
            return self.connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            return 1 << 20
        return max(files - RESERVED_FILES, files // 2)

    @classmethod
    def from_environment(cls) -> "Limits":
        """The limits that the environment sets. Raises `ConfigError`."""
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
            comment_s=_number("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", 0, int) / 1000,
        )


def _number(variable: str, default: Number, read: type[Number], least: int = 0) -> Number:
    value: Number = setting(variable, default, read)
    if not least <= value < float("inf"):
        raise ConfigError(f"{variable}={value}: expected a number from {least} up")
    return value
