"""Head of an HTTP request: what its headers announce, its bytes, and the refusals of requests that are too long. Pure.

Headers are pairs of a lowercase name and a value, as the parser of uvicorn collects them.
"""

from collections.abc import Sequence

from dynamo.http.server.limits import HttpLimits
from dynamo.serving.errors import ErrorAnswer

Headers = Sequence[tuple[bytes, bytes]]

HEADER_FRAMING_BYTES = 4
"""Bytes of a header line besides its name and its value: colon, space and line end."""


def content_length(headers: Headers) -> int:
    """Return the length of the body in bytes; 0 if the head does not contain a valid one."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def has_body(headers: Headers) -> bool:
    """Return whether a body follows the head."""
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def is_head_too_long(url: bytes, headers: Headers, received_bytes: int, limits: HttpLimits) -> bool:
    """Return whether a head exceeds the limits; `received_bytes` is at least its size, and may include what follows it."""
    if len(headers) > limits.headers:
        return True
    if received_bytes <= limits.header_bytes:
        return False
    size = len(url) + sum(len(name) + len(value) + HEADER_FRAMING_BYTES for name, value in headers)
    return size > limits.header_bytes


def without_upgrade(method: bytes, url: bytes, headers: Headers) -> bytes:
    """Return the head of a request without the headers that offer another protocol."""
    kept = [(name, value) for name, value in headers if name not in (b"upgrade", b"connection")]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, url, as_lines(kept))


def as_lines(headers: Headers) -> bytes:
    """Return headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)


def head_too_long(limits: HttpLimits) -> ErrorAnswer:
    """Return the refusal of a request whose head exceeds the limits."""
    most = f"{limits.headers} headers, {limits.header_bytes >> 10} KB"
    return ErrorAnswer(431, f"The headers exceed the limit of {most}", code="headers_too_large")


def body_too_long(limits: HttpLimits) -> ErrorAnswer:
    """Return the refusal of a request whose body exceeds the limit."""
    message = f"Request body exceeds the limit of {limits.body_bytes >> 20} MB set by DYN_HTTP_BODY_LIMIT_MB"
    return ErrorAnswer(413, message, code="payload_too_large", label="validation")
