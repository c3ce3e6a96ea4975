"""Identity: who a request is to everybody it meets: its id, its trace, its metadata."""

import logging
import random
import uuid

from dynamo.core import tracing
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.answers import BaseAnswer
from dynamo.serving.metrics import RequestRecord
from dynamo.serving.response_stream import ResponseStream

logger = logging.getLogger(__name__)

TRACE_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")
SPAN_HEADERS = (b"traceparent", b"tracestate")
META_HEADER = b"x-dynamo-meta-"


def identify(exchange: ResponseStream) -> str:
    """The request's id: the client's `x-dynamo-request-id` if it is a UUID, else a new one. `x-request-id` is echoed."""
    echoed = exchange.header(b"x-request-id")
    if echoed is not None:
        exchange.header_bytes += b"x-request-id: %b\r\n" % echoed
    chosen = exchange.header(b"x-dynamo-request-id")
    if chosen is not None:
        try:
            return str(uuid.UUID(chosen.decode("ascii")))
        except ValueError:
            logger.debug("x-dynamo-request-id is no UUID and was not used")
    return new_id()


def new_id() -> str:
    """A random UUID (version 4). It names a request and guards nothing, so no system call is spent on it."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def trace_headers(exchange: ResponseStream) -> dict[str, str]:
    """What of the client's headers travels to the worker."""
    return {name.decode("ascii"): value.decode("latin-1") for name, value in exchange.headers if name in TRACE_HEADERS}


def metadata_of(exchange: ResponseStream) -> dict[str, str]:
    """The context metadata of the worker's request: the client's headers `x-dynamo-meta-<key>`."""
    return {
        name[len(META_HEADER) :].decode("ascii"): value.decode("latin-1")
        for name, value in exchange.headers
        if name.startswith(META_HEADER)
    }


def begin_span(tracer: tracing.Tracer, exchange: ResponseStream, record: RequestRecord) -> None:
    """Begins the request's span; from here on its headers are those that continue it."""
    facts: dict[str, tracing.Value] = {
        "request_id": record.request_id,
        "model": record.model,
        "endpoint": record.endpoint,
    }
    span = record.span = tracer.start("http-request", trace_headers(exchange), **facts)
    mine = [(name.encode(), value.encode()) for name, value in span.headers().items()]
    exchange.headers = [pair for pair in exchange.headers if pair[0] not in SPAN_HEADERS] + mine


def end_span(span: tracing.Span, answer: BaseAnswer, error: Exception | None, usage: CompletionUsage | None) -> None:
    """The request's span is over, with what is known of its tokens, and so are its ways to workers."""
    for route in answer.record.routes:
        route.end(error)
    if usage is not None:
        span.set("input_tokens", usage.prompt_tokens)
        span.set("output_tokens", usage.completion_tokens)
    span.end(error)


def begin_route(tracer: tracing.Tracer, answer: BaseAnswer, request_id: str) -> tracing.Span:
    """Begins the span of a generation's way to a worker and back."""
    span = tracer.start("router.route_request", trace_headers(answer.exchange), request_id=request_id)
    answer.record.routes.append(span)
    return span
