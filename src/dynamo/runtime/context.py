"""Context: identity, metadata, trace and cancellation of a request."""

import asyncio
import random
import re
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from dynamo.core import tracing
from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.tracing import Span, Value

TRACE_HEADERS = ("traceparent", "tracestate", "x-request-id", "request-id")

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
"""W3C trace context: version, trace id, parent span id, flags; later versions may append fields."""


STATUSES = ("ok", "error")


class ContextMetadata(dict[str, str]):
    """Metadata of a context. Its text form is JSON."""

    def __str__(self) -> str:
        return json_encode(self).decode()


class SpanProxy:
    """Handle on the request's span (`current_span`) or on a child span (`start_span`)."""

    def __init__(self, span: Span | None, *, is_ours: bool = False) -> None:
        """Wrap a span; with `is_ours` it ends with this handle, otherwise with its request."""
        self._span = span
        self._is_ours = is_ours

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute of the span."""
        if self._span is not None:
            self._span.set(key, _value(value))

    def add_event(self, name: str, attrs: Mapping[str, Any] | None = None) -> None:
        """Add an event with the current time."""
        if self._span is not None:
            self._span.event(name, {key: _value(value) for key, value in (attrs or {}).items()})

    def set_status(self, status: str, description: str | None = None) -> None:
        """Set the status, `ok` or `error`. Raise `InvalidArgument` for another value."""
        if status not in STATUSES:
            raise InvalidArgument(f"span status {status!r}: must be one of {', '.join(STATUSES)}", param="status")
        if self._span is not None:
            self._span.set_status(is_well=status == "ok", why=description or "")

    def close(self) -> None:
        """End a span that was started by `start_span`. Further calls do nothing."""
        if self._span is not None and self._is_ours:
            self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._is_ours and self._span is not None:
            self._span.end(error)
        self.close()

    def __del__(self) -> None:
        self.close()


def _value(value: Any) -> Value:
    return value if isinstance(value, str | int | float | bool) else str(value)


class Context:
    """Request context: a handler checks it for cancellation; the caller stops or kills the request through it.

    Requests sent under a context inherit its metadata and trace, and are cancelled with it.
    """

    def __init__(
        self,
        id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        span: Span | None = None,
    ) -> None:
        self._id = id or str(uuid.uuid4())
        self._metadata = ContextMetadata(metadata or {})
        self._headers = dict(headers or {})
        self._trace = _TRACEPARENT.fullmatch(self._headers.get("traceparent", ""))
        self._span = span
        self._span_id: str | None = None
        self._first_token_callbacks: list[Callable[[], None]] | None = []
        self._is_stopped = False
        self._is_killed = False
        self._ended: asyncio.Future[bool] | None = None
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._next_callback = 0

    def id(self) -> str:
        return self._id

    # Cancellation --------------------------------------------------------------------------------------------------

    def is_stopped(self) -> bool:
        """Return True once the request was stopped or killed."""
        return self._is_stopped

    def is_killed(self) -> bool:
        """Return True once the request was killed: the response has no receiver."""
        return self._is_killed

    def stop_generating(self) -> None:
        """Request a graceful end."""
        self._end(killed=False)

    def kill(self) -> None:
        """Cancel the request immediately."""
        self._end(killed=True)

    def on_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the context is stopped or killed, and again when a stopped one is killed.

        Call it immediately if the context has ended. Return a function that removes the callback.
        """
        if self._is_stopped:
            callback()
        if self._is_killed:
            return _nothing
        number = self._next_callback
        self._next_callback += 1
        self._callbacks[number] = callback

        def forget() -> None:
            self._callbacks.pop(number, None)

        return forget

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the request was stopped or killed; return True."""
        if self._is_stopped:
            return True
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._ended)

    def detached(self, id: str) -> "Context":
        """Return a context with the same metadata and trace that is cancelled independently."""
        return Context(id, self._metadata, self.propagated())

    def shadow(self, loop: asyncio.AbstractEventLoop) -> "Context":
        """Return a context for requests on another loop, with the same id, which ends with this one."""
        shadow = self.detached(self._id)

        def end() -> None:
            loop.call_soon_threadsafe(shadow.kill if self._is_killed else shadow.stop_generating)

        self.on_end(end)

        def begin() -> None:
            loop.call_soon_threadsafe(shadow.notify_first_token)

        self.on_first_token(begin)
        return shadow

    # First token ---------------------------------------------------------------------------------------------------

    def notify_first_token(self) -> None:
        """Run the first-token callbacks, once. The first response element calls it automatically."""
        callbacks, self._first_token_callbacks = self._first_token_callbacks, None
        for callback in callbacks or ():
            callback()

    def on_first_token(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the first token, immediately if it has been produced."""
        if self._first_token_callbacks is None:
            callback()
        else:
            self._first_token_callbacks.append(callback)

    # Spans ---------------------------------------------------------------------------------------------------------

    def current_span(self) -> SpanProxy:
        """Return the span of the request; a no-op span where tracing is off."""
        return SpanProxy(self._span)

    def start_span(self, name: str, attrs: Mapping[str, Any] | None = None) -> SpanProxy:
        """Start a child span of the request's span. `close()` or leaving the `with` block ends it."""
        tracer = tracing.tracer()
        if tracer is None:
            return SpanProxy(None)
        span = SpanProxy(tracer.start(name, self._headers), is_ours=True)
        for key, value in (attrs or {}).items():
            span.set_attribute(key, value)
        return span

    # Propagation ---------------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> ContextMetadata:
        """Return the live metadata: changes propagate to requests sent under this context."""
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: Mapping[str, str]) -> None:
        self._metadata = ContextMetadata(metadata)

    def metadata_to_send(self) -> dict[str, str]:
        """Return a copy of the metadata. Raise `InvalidArgument` for values that are not text."""
        for key, value in self._metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InvalidArgument(f"context metadata {key!r}: {value!r}: must be text")
        return dict(self._metadata)

    def trace_headers(self) -> dict[str, str] | None:
        """Return the trace headers for a nested request; None outside of a trace."""
        return self.propagated() if self._trace is not None else None

    def propagated(self) -> dict[str, str]:
        """Return the headers for a nested request, with trace headers where a trace exists."""
        headers = {name: self._headers[name] for name in TRACE_HEADERS if name in self._headers}
        if self._trace is not None:
            headers["traceparent"] = f"00-{self._trace[1]}-{self.span_id}-{self._trace[3]}"
        else:
            headers.pop("traceparent", None)
        return headers

    @property
    def trace_id(self) -> str | None:
        """Return the trace id of the request."""
        return self._trace[1] if self._trace is not None else None

    @property
    def parent_span_id(self) -> str | None:
        """Return the span id of the caller."""
        return self._trace[2] if self._trace is not None else None

    @property
    def span_id(self) -> str | None:
        """Return the span id of the request, the parent of requests sent under this context."""
        if self._trace is not None and self._span_id is None:
            self._span_id = f"{random.getrandbits(64) or 1:016x}"
        return self._span_id

    def _end(self, *, killed: bool) -> None:
        if self._is_killed or (self._is_stopped and not killed):
            return
        self._is_stopped = True
        self._is_killed = killed
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(True)
        callbacks = list(self._callbacks.values())
        if killed:
            self._callbacks.clear()
        for callback in callbacks:
            callback()


def _nothing() -> None:
    """Remove nothing: the callback was not registered."""
