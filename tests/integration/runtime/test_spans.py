"""Child spans exported to an OTLP collector."""

import pytest
from tests.otlp_collector import Collector, facts_of

from dynamo.core import tracing
from dynamo.core.otel import OtelTracer
from dynamo.core.tracing import make_tracer
from dynamo.runtime.context import Context


def test_child_span_attributes_events_and_status_reach_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        tracer = make_tracer(collector.variables)
        assert isinstance(tracer, OtelTracer)
        monkeypatch.setattr(tracing, "tracer", lambda: tracer)
        span = tracer.start("handle_payload", {})
        context = Context("r", None, span.headers(), span)
        context.current_span().set_attribute("dp_rank", 3)
        context.current_span().close()
        with context.start_span("tokenize", {"batch": 8, "of": ["x"]}) as child:
            child.add_event("half", {"done": 4})
            child.set_status("error", "Late")
        with pytest.raises(ValueError, match="boom"), context.start_span("load"):
            raise ValueError("boom")
        dropped = context.start_span("dropped")
        del dropped
        span.end()
        tracer.close()
        (parent,) = collector.named("handle_payload")
        assert facts_of(parent) == {"dp_rank": 3}
        (tokenize,), (load,), (dropped_span,) = map(collector.named, ("tokenize", "load", "dropped"))
        assert {one.parent_span_id for one in (tokenize, load, dropped_span)} == {parent.span_id}
        assert facts_of(tokenize) == {"batch": 8, "of": "['x']"}
        assert [event.name for event in tokenize.events] == ["half"]
        assert (tokenize.status.code, tokenize.status.message) == (2, "Late")
        assert (load.status.code, load.status.message) == (2, "boom")
