"""Request identity: id, trace headers, metadata and spans of a request."""

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
    """Return the request id: the client's `x-dynamo-request-id` if it is a UUID, else a new one. Echo `x-request-id`."""
    echoed = exchange.header(b"x-request-id")
    if echoed is not None:
        exchange.header_bytes += b"x-request-id: %b\r\n" % echoed
    chosen = exchange.header(b"x-dynamo-request-id")
    if chosen is not None:
        try:
            return str(uuid.UUID(chosen.decode("ascii")))
        except ValueError:
            logger.debug("ignored x-dynamo-request-id: not a UUID")
    return new_id()


def new_id() -> str:
    """Return a random UUID (version 4), generated without a system call: it is an identifier, not a secret."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def trace_headers(exchange: ResponseStream) -> dict[str, str]:
    """Return the client's tracing headers for the worker."""
    return {name.decode("ascii"): value.decode("latin-1") for name, value in exchange.headers if name in TRACE_HEADERS}


def metadata_of(exchange: ResponseStream) -> dict[str, str]:
    """Return the context metadata of the worker's request: the client's headers `x-dynamo-meta-<key>`."""
    return {
        name[len(META_HEADER) :].decode("ascii"): value.decode("latin-1")
        for name, value in exchange.headers
        if name.startswith(META_HEADER)
    }


def begin_span(tracer: tracing.Tracer, exchange: ResponseStream, record: RequestRecord) -> None:
    """Begin the request's span; its headers are then replaced by those that continue it."""
    facts: dict[str, tracing.Value] = {
        "request_id": record.request_id,
        "model": record.model,
        "endpoint": record.endpoint,
    }
    span = record.span = tracer.start("http-request", trace_headers(exchange), **facts)
    mine = [(name.encode(), value.encode()) for name, value in span.headers().items()]
    exchange.headers = [pair for pair in exchange.headers if pair[0] not in SPAN_HEADERS] + mine


def end_span(span: tracing.Span, answer: BaseAnswer, error: Exception | None, usage: CompletionUsage | None) -> None:
    """End the request's span, with its token counts, and the spans of its dispatch to workers."""
    for route in answer.record.routes:
        route.end(error)
    if usage is not None:
        span.set("input_tokens", usage.prompt_tokens)
        span.set("output_tokens", usage.completion_tokens)
    span.end(error)


def begin_route(tracer: tracing.Tracer, answer: BaseAnswer, request_id: str) -> tracing.Span:
    """Begin the span of a generation's dispatch to a worker and its response."""
    span = tracer.start("router.route_request", trace_headers(answer.exchange), request_id=request_id)
    answer.record.routes.append(span)
    return span
