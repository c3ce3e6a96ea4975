"""Tracing: spans of a request, exported over OTLP when `OTEL_EXPORT_ENABLED` is true.

A trace is propagated in W3C headers (`traceparent`, `tracestate`). Whether there are spans is decided once: `tracer()`
is None when tracing is off, which then costs nothing. The OpenTelemetry packages (extra `otel`) are imported only
when it is on; they export from their own thread. `DYN_LOGGING_SPAN_EVENTS` logs the beginning and the end of every span.
"""

import functools
import importlib
import logging
import random
import re
import time
from collections.abc import Mapping
from typing import Any, Protocol

from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command

logger = logging.getLogger("request_span")
"""Logger of span events, named as upstream's target; set its level in `DYN_LOG` to suppress them."""

TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
TAKEN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
"""Attribute names that every log record has already."""
PATH = ("instance_id", "namespace", "component", "endpoint")
"""Names of the parts of a handler's path."""

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

    def set_status(self, *, is_well: bool, why: str = "") -> None:
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
    general = setting("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", str, variables)
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


class OwnSpan:
    """A span that is not exported; its id becomes the parent of further spans."""

    __slots__ = ("_headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        parent = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        trace, flags = (parent[1], parent[3]) if parent else (f"{random.getrandbits(128) or 1:032x}", "01")
        self._headers = {"traceparent": f"00-{trace}-{random.getrandbits(64) or 1:016x}-{flags}"}
        if parent and "tracestate" in headers:
            self._headers["tracestate"] = headers["tracestate"]

    def headers(self) -> dict[str, str]:
        return self._headers

    def set(self, name: str, value: Value) -> None:
        """Do nothing: the span is not exported."""

    def event(self, name: str, facts: Mapping[str, Value]) -> None:
        """Do nothing: the span is not exported."""

    def set_status(self, *, is_well: bool, why: str = "") -> None:
        """Do nothing: the span is not exported."""

    def end(self, error: BaseException | None = None) -> None:
        """Do nothing: the span is not exported."""


class LoggedSpan:
    """A span whose beginning and end are logged."""

    __slots__ = ("_began_s", "_fields", "_is_over", "_span")

    def __init__(self, span: Span, name: str, facts: Mapping[str, Value]) -> None:
        self._span = span
        self._is_over = False
        _, trace, own, *_ = span.headers()["traceparent"].split("-")
        self._fields: dict[str, Any] = {"span_name": name, "trace_id": trace, "span_id": own, **_named(facts)}
        self._began_s = time.monotonic()
        logger.info("SPAN_FIRST_ENTRY", extra=self._fields)

    def headers(self) -> dict[str, str]:
        return self._span.headers()

    def set(self, name: str, value: Value) -> None:
        self._fields.update(_named({name: value}))
        self._span.set(name, value)

    def event(self, name: str, facts: Mapping[str, Value]) -> None:
        self._span.event(name, facts)
        identity = {key: self._fields[key] for key in ("span_name", "trace_id", "span_id")}
        logger.info(name, extra={**_named(facts), **identity})

    def set_status(self, *, is_well: bool, why: str = "") -> None:
        self._span.set_status(is_well=is_well, why=why)
        if not is_well:
            self._fields["error"] = why

    def end(self, error: BaseException | None = None) -> None:
        self._span.end(error)
        if self._is_over:
            return
        self._is_over = True
        if error is not None:
            self._fields["error"] = str(error) or type(error).__name__
        self._fields["time.duration_us"] = int((time.monotonic() - self._began_s) * 1e6)
        logger.info("SPAN_CLOSED", extra=self._fields)


class LoggedTracer:
    """Tracer whose spans are logged, and also exported if there is an inner tracer."""

    def __init__(self, inner: Tracer | None) -> None:
        self._inner = inner

    def start(self, name: str, headers: Mapping[str, str], **facts: Value) -> LoggedSpan:
        span = OwnSpan(headers) if self._inner is None else self._inner.start(name, headers, **facts)
        return LoggedSpan(span, name, facts)


def _named(facts: Mapping[str, Value]) -> dict[str, Value]:
    """Return the fields of a log line: names of record attributes get a suffix, a handler's path is split in four."""
    named = {f"{name}_" if name in TAKEN else name: value for name, value in facts.items()}
    path = str(facts.get("endpoint", "")).split("/")
    return {**named, **dict(zip(PATH, path, strict=True))} if len(path) == len(PATH) else named
