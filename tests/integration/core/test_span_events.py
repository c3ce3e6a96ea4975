"""Spans that are both exported and logged."""

import pytest
from tests.otlp_collector import Collector
from tests.unit.core.test_tracing import ON

from dynamo.core.otel import OtelTracer
from dynamo.core.tracing import LoggedTracer, make_tracer


def test_exported_span_is_logged_with_the_same_ids(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    with Collector() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        tracer = make_tracer({**collector.variables, **ON})
        assert isinstance(tracer, LoggedTracer)
        assert isinstance(tracer._inner, OtelTracer)
        span = tracer.start("http-request", {}, request_id="r")
        span.end()
        tracer._inner.close()
        (received,) = collector.spans
        assert {vars(line)["span_id"] for line in log.records} == {received.span_id.hex()}
        assert {vars(line)["trace_id"] for line in log.records} == {received.trace_id.hex()}
