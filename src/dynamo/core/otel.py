"""OtelTracer: spans of the OpenTelemetry SDK behind `core.tracing`. Imported only when tracing is on."""

from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dynamo.core.tracing import Value

PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan:
    """A span of the OpenTelemetry SDK, and the headers that propagate it."""

    __slots__ = ("_span",)

    def __init__(self, span: SdkSpan) -> None:
        self._span = span

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        return carrier

    def set(self, name: str, value: Value) -> None:
        self._span.set_attribute(name, value)

    def event(self, name: str, facts: Mapping[str, Value]) -> None:
        self._span.add_event(name, facts)

    def set_status(self, *, is_well: bool, why: str = "") -> None:
        self._span.set_status(StatusCode.OK if is_well else StatusCode.ERROR, None if is_well else why)

    def end(self, error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_status(StatusCode.ERROR, str(error) or type(error).__name__)
            self._span.set_attribute("error.type", type(error).__name__)
        self._span.end()


class OtelTracer:
    """Tracer of the OpenTelemetry SDK; the SDK's bounded queue and thread export the spans to the collector."""

    def __init__(self, exporter: SpanExporter, service: str, ratio: float) -> None:
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create({"service.name": service})
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider = provider
        self._tracer = provider.get_tracer("dynamo")

    def start(self, name: str, headers: Mapping[str, str], **facts: Value) -> OtelSpan:
        context = PROPAGATOR.extract(headers) if "traceparent" in headers else None
        return OtelSpan(self._tracer.start_span(name, context, attributes=facts))

    def close(self) -> None:
        """Export the remaining spans. The SDK does so itself at the interpreter's exit."""
        self._provider.shutdown()
