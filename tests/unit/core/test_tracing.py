"""Tracing: no effect when it is off; when it is on, spans reach a collector over OTLP, each under its parent."""

import importlib
import logging
import subprocess
import sys

import pytest

from dynamo.core import tracing
from dynamo.core.errors import ConfigError
from dynamo.core.tracing import LoggedTracer, make_tracer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00", "tracestate": "vendor=1"}
ON = {"DYN_LOGGING_SPAN_EVENTS": "1"}


def test_disabled_tracing_imports_no_package() -> None:
    assert make_tracer({}) is None
    assert make_tracer({"OTEL_EXPORT_ENABLED": "0"}) is None
    code = "import sys, dynamo.core.tracing as t; t.tracer(); print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_tracing_reports_a_missing_package_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install .*opentelemetry-sdk") as reported:
        make_tracer({"OTEL_EXPORT_ENABLED": "true"})
    assert "\n" not in str(reported.value)


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_SAMPLE_RATIO", "2"), ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")]
)
def test_tracing_error_names_an_invalid_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_"):
        make_tracer({"OTEL_EXPORT_ENABLED": "true", name: value})


def test_tracing_default_service_name_contains_the_component(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_component", "")
    assert tracing.service_name({}) == "dynamo"
    tracing.set_component("worker-prefill")
    assert tracing.service_name({}) == "dynamo-worker-prefill"
    assert tracing.service_name({"OTEL_SERVICE_NAME": "mine"}) == "mine"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "request_span")
    return caplog


def test_span_is_logged_at_its_start_and_once_at_its_end(log: pytest.LogCaptureFixture) -> None:
    tracer = make_tracer(ON)
    assert isinstance(tracer, LoggedTracer)
    span = tracer.start("handle_payload", UNSAMPLED, request_id="r", endpoint="ff/ns/back/generate")
    span.set("output_tokens", 7)
    span.end(ValueError("boom"))
    span.end()
    assert [(line.name, line.message) for line in log.records] == [
        ("request_span", "SPAN_FIRST_ENTRY"),
        ("request_span", "SPAN_CLOSED"),
    ]
    first, last = (vars(line) for line in log.records)
    for line in (first, last):
        assert (line["span_name"], line["trace_id"], line["request_id"]) == ("handle_payload", TRACE, "r")
        assert (line["namespace"], line["component"], line["endpoint"]) == ("ns", "back", "generate")
    assert first["span_id"] == last["span_id"] != PARENT
    assert (last["output_tokens"], last["error"]) == (7, "boom")
    assert last["time.duration_us"] >= 0


def test_span_headers_contain_its_trace_context(log: pytest.LogCaptureFixture) -> None:
    tracer = LoggedTracer(None)
    outer = tracer.start("http-request", UNSAMPLED, endpoint="chat")
    assert outer.headers()["tracestate"] == "vendor=1"
    assert outer.headers()["traceparent"].endswith("-00")
    inner = tracer.start("handle_payload", outer.headers())
    assert inner.headers()["traceparent"][:36] == outer.headers()["traceparent"][:36]
    assert inner.headers() != outer.headers()
    alone = tracer.start("http-request", {"traceparent": "nonsense", "tracestate": "x"})
    assert TRACE not in alone.headers()["traceparent"]
    assert "tracestate" not in alone.headers()
    assert vars(log.records[0])["endpoint"] == "chat"


def test_span_events_are_log_lines_and_status_is_a_field(log: pytest.LogCaptureFixture) -> None:
    span = LoggedTracer(None).start("http-request", {})
    span.event("first block", {"name": "b", "size": 3})
    span.set_status(is_well=False, why="too slow")
    span.end()
    _, event, last = (vars(line) for line in log.records)
    assert (event["message"], event["name_"], event["size"]) == ("first block", "b", 3)
    assert event["span_id"] == last["span_id"]
    assert last["error"] == "too slow"
