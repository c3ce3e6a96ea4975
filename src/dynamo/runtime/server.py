"""Dispatcher: handlers of one process, their running requests, and draining."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dynamo.core import tracing
from dynamo.core.errors import DynamoException, EngineShutdown, WorkerOverloaded, WorkerUnavailable
from dynamo.core.logging import RequestScope, current_request, lifecycle, scope_fields
from dynamo.core.metrics import Counter, MetricsRegistry, log_buckets
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.request_plane.base import Handler, Request
from dynamo.runtime.request_plane.reply import ReplyBase

logger = logging.getLogger(__name__)

INFLIGHT_MAX = 100_000  # Far above the queue of any engine; bounds memory when an engine hangs.

EngineRoute = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Handler of `/engine/NAME` of the system server: from a JSON object to a JSON object."""


DURATION_BUCKETS = log_buckets(0.001, 600.0, 20)
"""From a short lookup to the longest response that callers wait for."""


class EndpointMetrics:
    """`dynamo_component_*` metrics of one endpoint."""

    def __init__(
        self, registry: MetricsRegistry, endpoint: EndpointId, instance_id: int, more: Sequence[tuple[str, str]] = ()
    ) -> None:
        names = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")
        values = dict(zip(names, (*msgspec.structs.astuple(endpoint), f"{instance_id:x}"), strict=True))
        prefix = "dynamo_component_"
        self.requests = registry.counter(prefix + "requests_total", "Requests received", names).labels_and(
            more, **values
        )
        self.response_bytes = registry.counter(
            prefix + "response_bytes_total", "Bytes of responses sent to callers", names
        ).labels_and(more, **values)
        self._errors = registry.counter(
            prefix + "errors_total", "Requests that ended in an error", (*names, "error_type")
        )
        self._values = values
        self._more = more
        self.cancellations = registry.counter(
            prefix + "cancellation_total", "Requests stopped, killed or disconnected by the caller", names
        ).labels_and(more, **values)
        self.request_bytes = registry.counter(
            prefix + "request_bytes_total", "Bytes of request bodies received", names
        ).labels_and(more, **values)
        self.duration = registry.histogram(
            prefix + "request_duration_seconds",
            "Time from the arrival of a request to the end of its response",
            names,
            DURATION_BUCKETS,
        ).labels_and(more, **values)
        self.inflight = registry.gauge(
            prefix + "inflight_requests", "Requests with an incomplete response", names
        ).labels_and(more, **values)

    def error(self, error_type: str) -> None:
        """Count a request that ended in an error."""
        self._errors.labels_and(self._more, **self._values, error_type=error_type).inc()


class ServeOptions(Struct, frozen=True):
    """Behaviour of an endpoint under load and at shutdown."""

    graceful_shutdown: bool = True
    """Whether running requests finish at shutdown; otherwise they are aborted, so that callers migrate them."""
    inflight_max: int = INFLIGHT_MAX
    """Maximum number of running requests; further requests are refused with `WorkerOverloaded`."""
    health_check_payload: Any = None
    """Payload of health checks of the idle endpoint; None disables them."""
    is_internal: bool = False
    """Whether the endpoint only serves internal callers and is ignored by the readiness of the process."""
    metrics_labels: tuple[tuple[str, str], ...] = ()
    """Additional labels of the endpoint's metrics."""


class Served:
    """One served endpoint."""

    def __init__(self, path: str, handler: Handler, options: ServeOptions, metrics: EndpointMetrics | None) -> None:
        self.path = path
        self.options = options
        self.is_draining = False
        self._handler = handler
        self._metrics = metrics
        self._bytes_sent = Counter() if metrics is None else metrics.response_bytes
        self._running: dict[ReplyBase, float] = {}
        self._tracer = tracing.tracer()
        self._spans: dict[ReplyBase, tracing.Span] = {}
        self._scopes: dict[ReplyBase, RequestScope] = {}
        """Identities of running requests whose steps are logged."""
        self.alive_s = time.monotonic()
        """Time of the last sign of life: a successful response or a reported engine step."""
        self._idle: asyncio.Future[None] | None = None
        if metrics is not None:
            metrics.inflight.follow(lambda: len(self._running))

    @property
    def inflight(self) -> int:
        return len(self._running)

    def admit(self) -> None:
        """Raise `EngineShutdown` or `WorkerOverloaded` when no request can be accepted."""
        if self.is_draining:
            raise EngineShutdown(f"endpoint {self.path} is draining")
        if len(self._running) >= self.options.inflight_max:
            raise WorkerOverloaded("worker at capacity")

    def start(self, request: Request, reply: ReplyBase) -> None:
        """Pass the request to the handler; an exception becomes the response."""
        self._running[reply] = time.monotonic()
        reply.on_done(self._ended)
        reply.bytes_sent = self._bytes_sent
        if self._metrics is not None:
            self._metrics.requests.inc()
            self._metrics.request_bytes.inc(len(request.body))
        # Polls of the console and of routers are no part of a client's request: they would fill traces and logs.
        is_traced = not self.options.is_internal or "traceparent" in request.headers
        if self._tracer is not None and is_traced:
            self._trace(self._tracer, request, reply)
        identities = (request.id, request.headers, "handle_payload", self.path)
        scope = current_request.set(identities)
        if is_traced and lifecycle.isEnabledFor(logging.INFO):
            self._scopes[reply] = identities
            lifecycle.info("request received")
        try:
            self._handler(request, reply)
        except DynamoException as error:
            reply.fail(error)
        except Exception as error:  # Request boundary: the caller gets the error.
            logger.exception("handler of %s failed on request %s", self.path, request.id)
            reply.fail(error)
        finally:
            current_request.reset(scope)

    def _trace(self, tracer: tracing.Tracer, request: Request, reply: ReplyBase) -> None:
        """Start a span for the request; spans of the handler are its children."""
        span = tracer.start("handle_payload", request.headers, request_id=request.id, endpoint=self.path)
        request.headers = {**request.headers, **span.headers()}
        request.span = span
        self._spans[reply] = span

    def alive(self) -> None:
        """Record a step of the engine as a sign of life."""
        self.alive_s = time.monotonic()

    def cut(self) -> None:
        """Abort all running requests with an error that permits migration."""
        for reply in list(self._running):
            reply.fail(EngineShutdown("the worker is shutting down"))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; return False if some still run after the timeout."""
        self.is_draining = True
        if not self.options.graceful_shutdown:
            self.cut()
        if not self._running:
            return True
        self._idle = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._idle], timeout=timeout_s)
        return bool(done)

    def _ended(self, reply: ReplyBase, error: BaseException | None) -> None:
        started, now = self._running.pop(reply), time.monotonic()
        if (scope := self._scopes.pop(reply, None)) is not None:
            fields = {"status": "success" if error is None else "error", **scope_fields(scope)}
            lifecycle.info("request completed", extra=fields | {"elapsed_ms": round((now - started) * 1e3, 1)})
        if error is None:
            self.alive_s = now
        if self._spans:
            span = self._spans.pop(reply, None)
            if span is not None:
                span.end(error)
        if self._metrics is not None:
            self._metrics.duration.observe(now - started)
            if reply.is_cancelled:
                self._metrics.cancellations.inc()
            elif error is not None:
                self._metrics.error("generate")
        if not self._running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


class Dispatcher:
    """Endpoints that this process serves, by handler path."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}

    def add(
        self, path: str, handler: Handler, options: ServeOptions | None = None, metrics: EndpointMetrics | None = None
    ) -> Served:
        served = self._served[path] = Served(path, handler, options or ServeOptions(), metrics)
        return served

    def remove(self, path: str) -> None:
        self._served.pop(path, None)

    def admit(self, path: str) -> Served:
        """Return the endpoint of that path if it accepts a request. Raise a `WorkerUnavailable` otherwise."""
        served = self._served.get(path)
        if served is None:
            raise WorkerUnavailable(f"unknown endpoint {path}")
        served.admit()
        return served

    @property
    def inflight(self) -> int:
        return sum(served.inflight for served in self._served.values())
