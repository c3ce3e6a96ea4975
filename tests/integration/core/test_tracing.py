"""Spans exported to an OTLP collector."""

from collections.abc import Iterator

import pytest
from tests.otlp_collector import Collector, facts_of
from tests.unit.core.test_tracing import CLIENT, PARENT, TRACE

from dynamo.core.otel import OtelTracer
from dynamo.core.tracing import make_tracer


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def tracer_to(collector: Collector, monkeypatch: pytest.MonkeyPatch, **more: str) -> OtelTracer:
    for name, value in collector.variables.items():
        monkeypatch.setenv(name, value)  # The SDK reads the environment of the process.
    tracer = make_tracer({**collector.variables, **more})
    assert isinstance(tracer, OtelTracer)
    return tracer


def test_tracing_exports_spans_with_their_parents(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_to(collector, monkeypatch, OTEL_SERVICE_NAME="front")
    outer = tracer.start("http-request", CLIENT, request_id="r")
    inner = tracer.start("handle_payload", outer.headers())
    inner.set("output_tokens", 7)
    inner.end()
    inner.end()
    outer.end(ValueError("boom"))
    tracer.close()
    assert collector.paths == {"/v1/traces"}
    assert collector.services == {"front"}
    (first,), (second,) = collector.named("http-request"), collector.named("handle_payload")
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert (second.trace_id.hex(), second.parent_span_id) == (TRACE, first.span_id)
    assert second.trace_state == "vendor=1"
    assert facts_of(second) == {"output_tokens": 7}
    assert facts_of(first) == {"request_id": "r", "error.type": "ValueError"}
    assert (first.status.code, first.status.message) == (2, "boom")


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"])
def test_tracing_starts_a_new_trace_without_a_valid_parent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    tracer = tracer_to(collector, monkeypatch)
    span = tracer.start("http-request", {"traceparent": header} if header else {})
    version, trace, own, flags = span.headers()["traceparent"].split("-")
    assert (version, len(trace), len(own), int(flags, 16) & 1) == ("00", 32, 16, 1)
    assert trace != TRACE
    span.end()
    tracer.close()
    (received,) = collector.spans
    assert (received.trace_id.hex(), received.span_id.hex(), received.parent_span_id) == (trace, own, b"")


def test_tracing_samples_once_per_trace(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_to(collector, monkeypatch, OTEL_TRACES_SAMPLE_RATIO="0")
    span = tracer.start("http-request", {})
    assert int(span.headers()["traceparent"][-2:], 16) & 1 == 0
    tracer.start("handle_payload", span.headers()).end()
    span.end()
    tracer.start("http-request", CLIENT).end()  # The client has already decided about sampling.
    tracer.close()
    assert [received.trace_id.hex() for received in collector.spans] == [TRACE]
