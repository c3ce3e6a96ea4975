"""SpanProxy: public handle on a tracing span; a no-op where there is no span."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from dynamo.core.errors import InvalidArgument
from dynamo.core.tracing import Span, Value

STATUSES = ("ok", "error")


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
