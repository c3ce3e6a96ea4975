"""Tracing: spans of a request, exported over OTLP when `OTEL_EXPORT_ENABLED` says so (serving-plane.md §3.6).

A trace travels in W3C headers (`traceparent`, `tracestate`). Whether there are spans at all is decided once: `tracer()`
is None when tracing is off, and then nobody pays for it. The OpenTelemetry packages (extra `otel`) are imported only
when it is on; they send from a thread of their own.
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
"""What a signal's exporter is called in the package of a protocol."""


class Span(Protocol):
    """A stretch of a request's life."""

    def headers(self) -> dict[str, str]:
        """The headers under which further work is part of this span."""

    def set(self, name: str, value: Value) -> None:
        """Notes a fact."""

    def event(self, name: str, facts: Mapping[str, Value]) -> None:
        """Notes that something happened now."""

    def judge(self, *, is_well: bool, why: str = "") -> None:
        """Notes how it went, before it ends."""

    def end(self, error: BaseException | None = None) -> None:
        """It is over. Further calls do nothing."""


class Tracer(Protocol):
    """Who begins spans."""

    def start(self, name: str, headers: Mapping[str, str], **facts: Value) -> Span:
        """Begins a span, within that of the headers where they name one."""


@functools.cache
def tracer() -> Tracer | None:
    """The process's tracer, None when tracing is off. Raises `ConfigError` when it is on and cannot be."""
    return make_tracer(environ())


_component = ""
"""Set once at start; empty in programs that use the runtime as a library, whose name is `dynamo` as in 1.6.1."""


def make_tracer(variables: Mapping[str, str]) -> Tracer | None:
    """A tracer as the environment asks for. Raises `ConfigError`."""
    exporting = _exporting_tracer(variables) if exports(variables) else None
    if not setting("DYN_LOGGING_SPAN_EVENTS", False, read_bool, variables):
        return exporting
    from dynamo.core.span_events import LoggedTracer

    return LoggedTracer(exporting)


def exports(variables: Mapping[str, str]) -> bool:
    """Whether anything is to be sent over OTLP."""
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

    Raises `ConfigError` that names `setting_name`, the setting that asks for it, where a package is missing.
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
