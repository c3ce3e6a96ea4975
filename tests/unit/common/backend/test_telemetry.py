"""Spans and trace headers for engines."""

from dynamo.common.backend import telemetry
from dynamo.runtime.context import Context


def test_trace_headers_are_an_argument_of_the_inference_engine() -> None:
    assert telemetry.engine_trace_kwargs(Context("r")) == {}
    traced = Context("r", headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    (headers,) = telemetry.engine_trace_kwargs(traced, kwarg_name="trace").values()
    assert headers["traceparent"].startswith(f"00-{'1' * 32}-")
    assert telemetry.engine_trace_kwargs(traced, enabled=False) == {}
