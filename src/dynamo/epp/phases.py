"""RequestPhases: one HTTP request on its ext_proc stream, from its headers to the end of its response. Pure.

    request headers ─▶ request body … ─▶ request trailers ─▶ response headers ─▶ response body … ─▶ response trailers

The gateway may leave out any phase, and a response may begin before the request is complete. How a body is sent is in
the stream's first message (`protocol_config`); gateways without it use FULL_DUPLEX_STREAMED, as the endpoint picker
protocol requires. With FULL_DUPLEX_STREAMED the headers are answered when the body is complete, and the body is returned
in chunks. With BUFFERED the headers are answered at once, and the destination is set with the body.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.epp import replies
from dynamo.epp.messages import BODY_MODES, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
TAIL_BYTES = 16 << 10
"""End of a response that is kept for its usage, which is in the last event of a stream."""
CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,18})')


class PickEvent(Enum):
    """Progress of a request that the picker counts."""

    PICK = "pick"
    """The request is complete: choose its worker."""
    FIRST_OUTPUT = "first output"
    END = "end"


@dataclass(slots=True)
class PickRequest:
    """Request whose worker is chosen."""

    method: str = "POST"
    path: str = "/"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Names in lower case, without pseudo headers."""
    body: bytearray = field(default_factory=bytearray)
    subset: frozenset[str] | None = None
    """Addresses (`ip:port` or `ip`) among which the worker must be; None for any."""


class RequestPhases:
    """Phases of one HTTP request."""

    def __init__(self, body_bytes_max: int) -> None:
        self.request = PickRequest()
        self.awaits_body = False
        """Whether the rest of the request is awaited before its worker can be chosen."""
        self._body_bytes_max = body_bytes_max
        self._request_mode: int | None = None
        self._response_mode: int | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._is_picked = False
        self._pending: str | None = None
        """Phase whose message completed the request, until its worker is chosen."""
        self._has_output = False
        self._tail = b""

    def receive(self, message: Any) -> tuple[list[Any], PickEvent | None]:
        """Return the responses to a message, and what it means for the request.

        With `PickEvent.PICK` the responses follow from `picked`. Raises `InvalidArgument` and `HttpError` for a request or a
        configuration of the gateway that cannot be served.
        """
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._request_mode, self._response_mode = config.request_body_mode, config.response_body_mode
        phase = message.WhichOneof("request")
        match phase:
            case "request_headers":
                return self._request_headers(message)
            case "request_body":
                return self._request_body(message.request_body)
            case "request_trailers":
                return self._request_trailers()
            case "response_headers":
                return self._response_headers(message.response_headers)
            case "response_body":
                return self._response_body(message.response_body)
            case "response_trailers":
                return [replies.unchanged(phase)], PickEvent.END
        raise InvalidArgument("ext_proc message without a phase")

    def picked(self, destination: str, headers: Mapping[str, str]) -> list[Any]:
        """Return the responses that send the request to a worker."""
        self._is_picked = True
        body, self.request.body = bytes(self.request.body), bytearray()
        phase, self._pending = self._pending, None
        if phase == "request_body" and self._is_buffered:
            return [replies.with_destination("request_body", destination, headers)]
        made = [replies.with_destination("request_headers", destination, headers)]
        if phase == "request_body":
            made += replies.chunks("request_body", body, ends=True)
        elif phase == "request_trailers":
            made += replies.chunks("request_body", body, ends=False) if body else ()
            made.append(replies.unchanged("request_trailers"))
        return made

    @property
    def cached_tokens(self) -> int | None:
        """Cached prompt tokens that the response reports in its usage."""
        found = CACHED_TOKENS.findall(self._tail)
        return int(found[-1]) if found else None

    @property
    def _is_buffered(self) -> bool:
        return self._request_mode in (BUFFERED, BUFFERED_PARTIAL)

    # The request.

    def _request_headers(self, message: Any) -> tuple[list[Any], PickEvent | None]:
        self.request.subset = subset_of(message)
        for name, value in pairs_of(message.request_headers.headers.headers):
            if name == b":path":
                self.request.path = value.decode("latin-1")
            elif name == b":method":
                self.request.method = value.decode("latin-1")
            elif not name.startswith(b":"):
                self.request.headers.append((name, value))
                if name == b"content-length" and value.isdigit():
                    self._check_size(int(value))
                elif name == b"content-encoding" and value.lower() != b"identity":
                    encoding = value.decode("latin-1")
                    raise HttpError(415, f"content-encoding {encoding}: workers do not decompress request bodies")
        if message.request_headers.end_of_stream:
            return self._complete("request_headers")
        if self._request_mode not in (None, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED):
            mode = dict(enumerate(BODY_MODES)).get(self._request_mode, str(self._request_mode))
            raise HttpError(
                501, f"ext_proc request_body_mode {mode}: the endpoint picker requires FULL_DUPLEX_STREAMED or BUFFERED"
            )
        self.awaits_body = True
        return ([replies.unchanged("request_headers")] if self._is_buffered else []), None

    def _request_body(self, body: Any) -> tuple[list[Any], PickEvent | None]:
        if self._is_picked or self._pending is not None:
            raise InvalidArgument("ext_proc: request body after the end of the request")
        self._check_size(self._size + len(body.body))
        self._parts.append(body.body)
        self._size += len(body.body)
        if body.end_of_stream or self._is_buffered:
            return self._complete("request_body")
        return [], None

    def _request_trailers(self) -> tuple[list[Any], PickEvent | None]:
        if self._is_picked:  # A buffered body was complete before.
            return [replies.unchanged("request_trailers")], None
        if self._is_buffered:
            raise InvalidArgument("the request has no body")
        return self._complete("request_trailers")

    def _complete(self, phase: str) -> tuple[list[Any], PickEvent]:
        self.awaits_body = False
        self._pending = phase
        self.request.body = bytearray().join(self._parts)
        self._parts.clear()
        return [], PickEvent.PICK

    def _check_size(self, size: int) -> None:
        if size > self._body_bytes_max:
            raise HttpError(413, f"request body of {size} bytes: at most {self._body_bytes_max} are accepted")

    # The response.

    def _response_headers(self, headers: Any) -> tuple[list[Any], PickEvent | None]:
        self.awaits_body = False  # A response that begins early ends the wait: no worker is chosen any more.
        return [replies.unchanged("response_headers")], PickEvent.END if headers.end_of_stream else None

    def _response_body(self, body: Any) -> tuple[list[Any], PickEvent | None]:
        event = None
        if body.body:
            self._tail = (self._tail + body.body)[-TAIL_BYTES:]
            if not self._has_output:
                self._has_output, event = True, PickEvent.FIRST_OUTPUT
        if body.end_of_stream:
            event = PickEvent.END
        if self._response_mode in (None, FULL_DUPLEX_STREAMED):
            return list(replies.chunks("response_body", body.body, ends=body.end_of_stream)), event
        return [replies.unchanged("response_body")], event


def pairs_of(headers: Iterable[Any]) -> Iterable[tuple[bytes, bytes]]:
    """Yield names in lower case and values; gateways fill one of two fields of a value."""
    for header in headers:
        yield header.key.lower().encode("latin-1", "replace"), header.raw_value or header.value.encode()


def subset_of(message: Any) -> frozenset[str] | None:
    """Return the addresses to which the gateway restricts the choice, None if it does not."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    value = fields[SUBSET_KEY]
    texts = [value.string_value] if value.WhichOneof("kind") == "string_value" else [
        one.string_value for one in value.list_value.values
    ]  # fmt: skip
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())
