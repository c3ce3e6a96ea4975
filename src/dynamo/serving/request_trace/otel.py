"""OpenTelemetry sink of the request trace: a row as a log record over OTLP, with the released frontend's attributes."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from dynamo.core.codec import json_encode
from dynamo.core.tasks import TaskOwner
from dynamo.core.threads import in_daemon_thread
from dynamo.core.tracing import make_exporter, service_name
from dynamo.serving.request_trace.sinks import Row

logger = logging.getLogger(__name__)

SCOPE = "dynamo.request_trace"
MAX_PAYLOAD_BYTES = 4 << 20  # The released frontend's default; collectors refuse much larger messages.
WAITING_ROWS_MAX = 2048  # More than two traces of the default capacity: the collector is too slow.
CLOSE_S = 30.0
CANCEL_S = 0.5  # A cancelled export continues in its thread, and the process does not wait for it.
SEND_ROWS = 64  # Rows between two exports: the SDK's queue holds 2,048 records of any size.
MODULE = "dynamo.core.otel_logs"


class Exporter(Protocol):
    """Required interface of `core.otel_logs.OtelEvents`."""

    def add(self, moment_ns: int, observed_ns: int, body: str, attributes: Mapping[str, str | bool]) -> None: ...
    def send(self) -> None: ...
    def close(self) -> None: ...


class OtelSink:
    """A log record for each row, its JSON in the attribute `payload`."""

    name = "otel"

    def __init__(self, events: Exporter, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._events = events
        self._max_payload_bytes = max_payload_bytes
        self._waiting: list[Row] = []
        self._wake = asyncio.Event()
        self._is_closing = False
        self._tasks = TaskOwner("request trace otel")

    def start(self) -> None:
        """Start to export in a separate task: a slow collector delays no other sink."""
        self._tasks.start(self._export(), "export")

    async def write(self, rows: Sequence[Row]) -> None:
        """Accept rows. Raise `OSError` if too many wait for the collector."""
        if len(self._waiting) + len(rows) > WAITING_ROWS_MAX:
            raise OSError(0, f"the collector is too slow: {len(self._waiting)} rows wait to be exported")
        self._waiting += rows
        self._wake.set()

    async def flush(self) -> None:
        """Do nothing: rows are exported as soon as the collector has accepted those before them."""

    async def close(self) -> None:
        """Export the rest. The caller limits the time."""
        try:
            self._is_closing = True
            self._wake.set()
            await self._tasks.wait(CLOSE_S)
            await in_daemon_thread(self._events.close, "request-trace-otel")
        finally:
            await self._tasks.cancel_and_wait(CANCEL_S)

    async def _export(self) -> None:
        while self._waiting or not self._is_closing:
            await self._wake.wait()
            self._wake.clear()
            rows, self._waiting = self._waiting, []
            if rows:
                await in_daemon_thread(partial(self._write, rows), "request-trace-otel")
            if self._is_closing:
                self._wake.set()

    def _write(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows, 1):
            attributes = attributes_of(row.event, self._max_payload_bytes)
            if attributes is not None:
                moment_ns = row.event.event_time_unix_ms * 1_000_000
                self._events.add(moment_ns, time.time_ns(), row.event.event_type, attributes)
            if number % SEND_ROWS == 0:
                self._events.send()
        self._events.send()


def attributes_of(event: Any, max_payload_bytes: int) -> dict[str, str | bool] | None:
    """Return a record's attributes; None for a row that is too large and has no payload to omit."""
    written = json_encode(event)
    reason = ""
    if len(written) > max_payload_bytes:
        reason = f"otel_payload_too_large:max_bytes={max_payload_bytes}:actual_bytes={len(written)}"
        if event.payload is None:
            logger.warning("request trace: otel: dropped a row of %d bytes", len(written))
            return None
        payload = replace(
            event.payload, request=None, response=None, payload_complete=False, payload_drop_reason=reason
        )
        written = json_encode(replace(event, payload=payload))
    subject = event.request or event.payload
    found: dict[str, str | bool | None] = {
        "schema": event.schema,
        "event_type": event.event_type,
        "rid": None if subject is None else subject.request_id,
        "model": None if subject is None else subject.model,
        "endpoint": None if event.payload is None else event.payload.endpoint,
        "payload_complete": not reason,
        "payload_drop_reason": reason or None,
        "payload": written.decode(),
    }
    return {name: value for name, value in found.items() if value is not None}


def make_otel_sink(max_payload_bytes: int, variables: Mapping[str, str]) -> OtelSink:
    """Return the sink of the collector that the `OTEL_EXPORTER_OTLP_*` variables name. Raise `ConfigError`."""
    exporter, module = make_exporter("LOGS", MODULE, variables, "DYN_REQUEST_TRACE_SINKS=otel")
    return OtelSink(module.OtelEvents(exporter, service_name(variables), SCOPE), max_payload_bytes)
