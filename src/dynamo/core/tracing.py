"""Tracing: spans of a request, exported over OTLP when `OTEL_EXPORT_ENABLED` is true.

A trace is propagated in W3C headers (`traceparent`, `tracestate`). Whether there are spans is decided once: `tracer()`
is None when tracing is off, which then costs nothing. The OpenTelemetry packages (extra `otel`) are imported only
when it is on; they export from their own thread.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command

Value = str | int | float | bool

PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
EXPORTERS = {"TRACES": ("trace_exporter", "OTLPSpanExporter"), "LOGS": ("_log_exporter", "OTLPLogExporter")}
"""Module and class name of each signal's exporter in a protocol's package."""


class Span(Protocol):
    """One timed operation of a request."""

    def headers(self) -> dict[str, str]:
        """Return the headers that make further spans children of this one."""

    def set(self, name: str, value: Value) -> None:
        """Set an attribute."""

    def event(self, name: str, facts: Mapping[str, Value]) -> None:
        """Add an event with the current time."""

    def judge(self, *, is_well: bool, why: str = "") -> None:
        """Set the status, before the span ends."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span. Further calls have no effect."""


class Tracer(Protocol):
    """Factory of spans."""

    def start(self, name: str, headers: Mapping[str, str], **facts: Value) -> Span:
        """Start a span, as a child of the headers' span if they contain one."""


@functools.cache
def tracer() -> Tracer | None:
    """Return the process's tracer, None when tracing is off. Raises `ConfigError` if tracing is on and unavailable."""
    return make_tracer(environ())


_component = ""
"""Set once at start; empty if the runtime is used as a library: then the service name is `dynamo`, as in 1.6.1."""


def make_tracer(variables: Mapping[str, str]) -> Tracer | None:
    """Return a tracer configured by the environment, or None. Raises `ConfigError`."""
    exporting = _exporting_tracer(variables) if exports(variables) else None
    if not setting("DYN_LOGGING_SPAN_EVENTS", False, read_bool, variables):
        return exporting
    from dynamo.core.span_events import LoggedTracer

    return LoggedTracer(exporting)


def exports(variables: Mapping[str, str]) -> bool:
    """Return whether spans are exported over OTLP."""
    return setting("OTEL_EXPORT_ENABLED", False, read_bool, variables)


def _exporting_tracer(variables: Mapping[str, str]) -> Tracer:
    ratio = setting("OTEL_TRACES_SAMPLE_RATIO", 1.0, float, variables)
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLE_RATIO={ratio:g}: expected 0 to 1")
    exporter, otel = make_exporter("TRACES", "dynamo.core.otel", variables)
    made: Any = otel.OtelTracer(exporter, service_name(variables), ratio)
    return made  # type: ignore[no-any-return]


def set_component(component: str) -> None:
    """Set the component of this process (`frontend`, `worker-prefill`), from which its default service name is made."""
    global _component  # noqa: PLW0603 - one process, one component
    _component = component


def service_name(variables: Mapping[str, str]) -> str:
    """Return the `service.name` of this process's spans and logs: `OTEL_SERVICE_NAME`, else `dynamo-<component>`."""
    return setting("OTEL_SERVICE_NAME", f"dynamo-{_component}" if _component else "dynamo", str, variables)


def make_exporter(
    signal: str, module: str, variables: Mapping[str, str], setting_name: str = "OTEL_EXPORT_ENABLED"
) -> tuple[Any, Any]:
    """Return the SDK's exporter of a signal, `TRACES` or `LOGS`, and our module that uses it.

    Raises `ConfigError` that names `setting_name`, the setting that enables the export, if a package is missing.
    """
    general = setting("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", str, variables)
    protocol = setting(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", general, str, variables)
    if protocol not in PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: expected one of {', '.join(PROTOCOLS)}")
    submodule, name = EXPORTERS[signal]
    try:
        exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{PROTOCOLS[protocol]}.{submodule}")
        user = importlib.import_module(module)
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{PROTOCOLS[protocol]}"
        raise ConfigError(
            f"{setting_name}: {error.name or error} is missing; install it: {install_command('otel', package)}"
        ) from None
    return getattr(exporters, name)(), user
