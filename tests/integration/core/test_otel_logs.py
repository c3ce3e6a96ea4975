"""Log records reach a collector with their level, fields and span."""

import io
import logging
from collections.abc import Iterator

import pytest
from tests.otlp_collector import Collector, facts_of

from dynamo.core.errors import ConfigError
from dynamo.core.logging import TRACE, current_request, setup
from dynamo.core.otel_logs import OtelLogHandler

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.addLevelName(logging.WARNING, "WARNING")
    logging.getLogger("t.quiet").setLevel(logging.NOTSET)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as made:
        for name, value in made.variables.items():
            monkeypatch.setenv(name, value)  # The SDK reads the environment of the process.
        yield made


def begin(collector: Collector, **more: str) -> OtelLogHandler:
    setup({**collector.variables, "OTEL_EXPORT_LOGS_ENABLED": "true", **more}, io.StringIO())
    (handler,) = [one for one in logging.getLogger().handlers if isinstance(one, OtelLogHandler)]
    return handler


def test_otel_log_export_sends_lines_that_pass_the_filters(collector: Collector) -> None:
    handler = begin(collector, OTEL_SERVICE_NAME="front", DYN_LOG="trace,t.quiet=error")
    logging.getLogger("t.quiet").warning("no")
    logging.getLogger("urllib3.connectionpool").error("how this very line is sent")
    logging.getLogger("t.other").warning("full: %d", 3, extra={"port": 8000, "who": ["a"]})
    logging.getLogger("t.other").log(TRACE, "deep")
    logging.getLogger("t.other").error("failed", exc_info=ValueError("boom"))
    handler.close()
    assert collector.paths == {"/v1/logs"}
    assert collector.services == {"front"}
    first, second, third = collector.logs
    assert (first.body.string_value, first.severity_text, first.severity_number) == ("full: 3", "WARN", 13)
    assert facts_of(first) == {"target": "t.other", "port": 8000, "who": "['a']"}
    assert (second.severity_text, second.severity_number) == ("TRACE", 1)
    assert (third.severity_number, facts_of(third)["exception.type"]) == (17, "ValueError")
    assert first.trace_id == b""


def test_otel_log_record_names_its_span(collector: Collector) -> None:
    handler = begin(collector)
    headers = {"traceparent": f"00-{ID}-{SPAN}-01"}
    scope = current_request.set(("r", headers, "handle_payload", "ff/ns/back/generate"))
    logging.getLogger("t.other").info("working")
    current_request.reset(scope)
    handler.close()
    (received,) = collector.logs
    assert (received.trace_id.hex(), received.span_id.hex()) == (ID, SPAN)
    assert facts_of(received) == {
        "target": "t.other",
        "request_id": "r",
        "span_name": "handle_payload",
        "component": "back",
        "endpoint": "generate",
    }


def test_otel_log_export_needs_both_switches(collector: Collector) -> None:
    for variables in ({**collector.variables}, {"OTEL_EXPORT_LOGS_ENABLED": "true"}):
        setup(variables, io.StringIO())
        assert not [one for one in logging.getLogger().handlers if isinstance(one, OtelLogHandler)]


def test_otel_log_setup_flushes_before_it_starts_again(collector: Collector) -> None:
    begin(collector)
    logging.getLogger("t.other").info("first")
    begin(collector).close()
    assert [record.body.string_value for record in collector.logs] == ["first"]


def test_otel_log_error_names_a_wrong_protocol(collector: Collector) -> None:
    with pytest.raises(ConfigError, match="http/json"):
        begin(collector, OTEL_EXPORTER_OTLP_LOGS_PROTOCOL="http/json")
