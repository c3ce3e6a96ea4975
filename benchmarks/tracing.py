"""Cost of request ids in the log and of tracing for a request, with tracing off and on.

    python -m benchmarks.tracing

Printed are microseconds per request for the parts that every request passes on the frontend and on the worker, best of
five. With tracing on, spans are begun and continued over headers, and ended; their export is not included.
"""

import sys
import timeit
from collections.abc import Callable, Mapping

from benchmarks.report import write_result
from dynamo.core.logging import current_request, scope_fields
from dynamo.core.tracing import Value

REQUESTS = 20_000
REPEATS = 5

CLIENT_HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"accept", b"application/json"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"application/json"),
    (b"authorization", b"Bearer none"),
    (b"user-agent", b"OpenAI/Python 1.50.0"),
    (b"content-length", b"312"),
]
"""Headers of the openai package, without its statistics."""


class Exchange:
    """Exchange with the members that header parsing needs."""

    headers = CLIENT_HEADERS


def frontend_off() -> None:
    """Process the request's ids: read from its headers, set for the log, written to its last line."""
    from dynamo.serving.request_headers import trace_headers

    scope = ("request", trace_headers(Exchange), "http-request", "")  # type: ignore[arg-type]
    current_request.set(scope)
    scope_fields(scope)


def worker_off() -> None:
    """Do the same on a worker, around the handler's call."""
    token = current_request.set(("request", {}, "handle_payload", "1/ns/comp/ep"))
    current_request.reset(token)


def spans(start: Callable[..., "object"]) -> Callable[[], None]:
    """Create the four spans of a request."""

    def run() -> None:
        headers: Mapping[str, str] = {}
        begun = []
        for name in ("http-request", "router.route_request", "handle_payload", "engine.generate"):
            facts: dict[str, Value] = {"request_id": "request"}
            span = start(name, headers, **facts)
            headers = span.headers()  # type: ignore[attr-defined]
            begun.append(span)
        for span in reversed(begun):
            span.end()  # type: ignore[attr-defined]

    return run


def measure(work: Callable[[], None]) -> float:
    """Microseconds a call."""
    repeats = 1 if "--quick" in sys.argv else REPEATS
    return min(timeit.repeat(work, number=REQUESTS, repeat=repeats)) / REQUESTS * 1e6


def main() -> None:
    """Print the table."""
    frontend, worker = measure(frontend_off), measure(worker_off)
    found = {"off_us": frontend + worker, "frontend_us": frontend, "worker_us": worker}
    print(f"tracing off: {frontend + worker:.2f} us a request (frontend {frontend:.2f}, worker {worker:.2f})")
    try:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from dynamo.core.otel import OtelTracer
    except ImportError:
        print("tracing on: not measured, the extra `otel` is not installed")
        print(write_result("tracing", found, is_whole=False))
        return
    tracer = OtelTracer(InMemorySpanExporter(), "benchmark", 1.0)
    found["on_us"] = measure(spans(tracer.start))
    print(f"tracing on: {found['on_us']:.0f} us a request for its four spans")
    tracer.close()
    print(write_result("tracing", found, is_whole="--quick" not in sys.argv))


if __name__ == "__main__":
    main()
