"""Rows of the request trace as records for an OpenTelemetry collector; the exporter is in memory."""

import asyncio
import json
import threading
from collections.abc import Mapping

import pytest
from tests.settle import turns

from dynamo.serving.request_trace.otel import SEND_ROWS, WAITING_ROWS_MAX, OtelSink
from dynamo.serving.request_trace.rows import Payload, RequestEnd, TraceRow
from dynamo.serving.request_trace.sinks import Row

END = TraceRow(
    schema="dynamo.request.trace.v1",
    event_type="request_end",
    event_time_unix_ms=1000,
    request=RequestEnd(request_id="r", model="m", request_received_ms=900, total_time_ms=1.0),
)
WORDS = TraceRow(
    schema="dynamo.request.trace.v1",
    event_type="request_payload",
    event_time_unix_ms=1000,
    payload=Payload(
        request_id="p", endpoint="openai.chat_completion", model="m", request={"a": "x" * 500}, payload_complete=True
    ),
)


class Events:
    """Exporter that records each batch."""

    def __init__(self) -> None:
        self.records: list[tuple[int, str, Mapping[str, str | bool]]] = []
        self.sent: list[int] = []
        self.is_closed = False
        self.gate: threading.Event | None = None
        """Event that the collector awaits before it answers."""
        self.begun = threading.Event()

    def add(self, moment_ns: int, observed_ns: int, body: str, attributes: Mapping[str, str | bool]) -> None:
        assert observed_ns > moment_ns
        self.records.append((moment_ns, body, attributes))

    def send(self) -> None:
        self.begun.set()
        if self.gate is not None:
            self.gate.wait(10)
        self.sent.append(len(self.records))

    def close(self) -> None:
        self.is_closed = True


async def export(events: Events, rows: list[Row], **options: int) -> None:
    sink = OtelSink(events, **options)
    sink.start()
    await sink.write(rows)
    await sink.close()


async def test_otel_sink_sends_a_record_for_each_row() -> None:
    events = Events()
    await export(events, [Row(0, END), Row(1, WORDS)])
    (moment, body, first), (_, _, second) = events.records
    assert (moment, body, events.sent, events.is_closed) == (1_000_000_000, "request_end", [2], True)
    payload = json.loads(str(first["payload"]))
    assert payload["request"]["request_id"] == "r"
    assert {name: value for name, value in first.items() if name != "payload"} == {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "rid": "r",
        "model": "m",
        "payload_complete": True,
    }
    assert (second["rid"], second["endpoint"]) == ("p", "openai.chat_completion")


async def test_otel_sink_omits_the_payload_of_an_oversized_row() -> None:
    events = Events()
    await export(events, [Row(0, WORDS)], max_payload_bytes=300)
    ((_, _, record),) = events.records
    payload = json.loads(str(record["payload"]))["payload"]
    assert record["payload_complete"] is False
    assert record["payload_drop_reason"] == payload["payload_drop_reason"]
    assert str(payload["payload_drop_reason"]).startswith("otel_payload_too_large:max_bytes=300:actual_bytes=")
    assert "request" not in payload


async def test_otel_sink_drops_an_oversized_row_without_payload(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    await export(events, [Row(0, END)], max_payload_bytes=10)
    assert events.records == []
    assert "dropped a row of" in caplog.text


async def test_otel_sink_exports_before_the_queue_of_the_sdk_is_full() -> None:
    events = Events()
    await export(events, [Row(0, END)] * (SEND_ROWS + 1))
    assert events.sent == [SEND_ROWS, SEND_ROWS + 1]


async def test_otel_sink_does_not_block_writers_while_its_collector_is_slow() -> None:
    events, gate = Events(), threading.Event()
    events.gate = gate
    sink = OtelSink(events)
    sink.start()
    await sink.write([Row(0, END)])
    await asyncio.wait_for(asyncio.to_thread(events.begun.wait), 10)
    await sink.write([Row(1, END)] * WAITING_ROWS_MAX)
    with pytest.raises(OSError, match="too slow"):
        await sink.write([Row(2, END)])
    closing = asyncio.ensure_future(sink.close())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    gate.set()
