"""Spans of a request for engines: attributes, events and child spans of `engine.generate`.

Without tracing (`OTEL_EXPORT_ENABLED`) every operation has no effect.
"""

from typing import Any

from dynamo.runtime.context import Context, SpanProxy


def current_span(context: Context) -> SpanProxy:
    """Return the request's span."""
    return context.current_span()


def start_span(context: Context, name: str, **attrs: Any) -> SpanProxy:
    """Start a child span of the request's span; it ends with the `with` block or `close()`."""
    return context.start_span(name, attrs or None)


def trace_headers(context: Context) -> dict[str, str] | None:
    """Return the trace headers for the inference engine; None outside of a trace."""
    return context.trace_headers()


def engine_trace_kwargs(
    context: Context, *, kwarg_name: str = "trace_headers", enabled: bool = True
) -> dict[str, dict[str, str]]:
    """Return the trace headers as a keyword argument for the inference engine; empty outside of a trace."""
    headers = trace_headers(context) if enabled else None
    return {} if headers is None else {kwarg_name: headers}
