"""OtelLogHandler: export of log lines to an OpenTelemetry collector. Imported only when logs are exported."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

OWN_LOGGERS = ("opentelemetry", "urllib3")
"""Loggers used while logs are exported; exporting their lines too would never end."""
SEVERITIES = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
    (logging.DEBUG, SeverityNumber.DEBUG),
)

Fields = Callable[[logging.LogRecord], Mapping[str, Any]]


class OtelLogHandler(logging.Handler):
    """Exports lines that pass the filters, through the SDK's bounded queue and thread."""

    def __init__(self, exporter: LogRecordExporter, service: str, fields: Fields) -> None:
        """`fields` returns the attributes of a record in addition to its message."""
        super().__init__()
        self._fields = fields
        self._provider = LoggerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._logger = self._provider.get_logger("dynamo")
        self.addFilter(lambda record: not record.name.startswith(OWN_LOGGERS))

    def emit(self, record: logging.LogRecord) -> None:
        fields = dict(self._fields(record))
        moment = int(record.created * 1e9)
        context = _context(fields.pop("trace_id", ""), fields.pop("span_id", ""))
        attributes = {name: value if isinstance(value, str | int | float | bool) else str(value)
                      for name, value in fields.items()}  # fmt: skip
        self._logger.emit(
            LogRecord(
                timestamp=moment,
                observed_timestamp=moment,
                context=context,
                severity_text=record.levelname,
                severity_number=_severity(record.levelno),
                body=record.getMessage(),
                attributes={"target": record.name, **attributes},
                exception=record.exc_info[1] if record.exc_info else None,
            )
        )

    def close(self) -> None:
        """Export the remaining lines."""
        self._provider.shutdown()
        super().close()


class OtelEvents:
    """Structured events as log records of their own, exported when `send` is called."""

    def __init__(self, exporter: LogRecordExporter, service: str, scope: str) -> None:
        """`scope` names the records' instrumentation scope. A process that exits without `close` does not wait."""
        self._provider = LoggerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._logger = self._provider.get_logger(scope)

    def add(self, moment_ns: int, observed_ns: int, body: str, attributes: Mapping[str, str | bool]) -> None:
        """Add a record. `send` must follow before the SDK's queue of 2,048 records is full."""
        self._logger.emit(
            LogRecord(
                timestamp=moment_ns,
                observed_timestamp=observed_ns,
                context=Context(),  # The record belongs to no span, whichever thread adds it.
                severity_text="INFO",
                severity_number=SeverityNumber.INFO,
                body=body,
                attributes=attributes,
            )
        )

    def send(self) -> None:
        """Export what was added. Blocks; the exporter logs its own failures."""
        self._provider.force_flush()

    def close(self) -> None:
        """Export the rest and stop."""
        self._provider.shutdown()


def _severity(level: int) -> SeverityNumber:
    return next((severity for least, severity in SEVERITIES if level >= least), SeverityNumber.TRACE)


def _context(trace_id: str, span_id: str) -> Any:
    """Return the context of the span that a line belongs to; None if there is none."""
    if not trace_id or not span_id:
        return None
    known = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(1))
    return set_span_in_context(NonRecordingSpan(known))
