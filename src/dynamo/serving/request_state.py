"""RequestState: everything that the steps of one request share, from its headers to the end of its response.

Every step of a request reads it; its attributes are changed by its methods only.
"""

import time
from collections.abc import Mapping, Sequence

from dynamo.core.logging import RequestScope
from dynamo.core.tracing import Span, Tracer
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.metrics import FrontendMetrics, PhaseGauges
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.request_trace.payload import Capture
from dynamo.serving.request_trace.rows import AgentContext
from dynamo.serving.routed_requests import RoutedRequests

SPAN = "http-request"
"""Name of a request's span."""
SPAN_HEADERS = ("traceparent", "tracestate")
"""Tracing headers that a span replaces."""
NO_MEDIA: Mapping[str, int] = {}
NO_HEADERS: Mapping[str, str] = {}


class RequestState:
    """State of one request: its identity, timings, workers, spans and trace data; its metrics are closed exactly once."""

    __slots__ = (
        "agent_context",
        "capture",
        "commented_s",
        "dp_rank",
        "endpoint",
        "first_s",
        "frontend",
        "headers",
        "is_closed",
        "kv_block_size",
        "last_s",
        "media",
        "metadata",
        "metrics",
        "model",
        "phase",
        "prefill",
        "prepared_s",
        "request_id",
        "request_type",
        "routed",
        "routes",
        "scope",
        "sent_s",
        "span",
        "started_s",
        "traced_body",
        "workers",
    )

    def __init__(
        self,
        frontend: FrontendMetrics,
        endpoint: str,
        model: str,
        *,
        stream: bool,
        started_s: float,
        request_id: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
        metadata: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """Start the request's metrics. `headers`: the client's tracing headers; `metadata`: see `request_headers`."""
        self.request_id = request_id
        self.headers = headers
        """Tracing headers for the worker."""
        self.metadata = metadata
        """Context metadata for the worker."""
        self.scope: RequestScope = (request_id, headers, SPAN, "")
        """Identities under which the request is logged."""
        self.routes: list[Span] = []
        """Spans of its generations' dispatch to workers."""
        self.span: Span | None = None
        """Span of the request, if tracing is enabled."""
        self.first_s = 0.0
        """Time at which the first token was written; 0 before."""
        self.frontend = frontend
        self.metrics = metrics = frontend.model(model)
        self.endpoint = endpoint
        self.model = model
        self.request_type = "stream" if stream else "unary"
        self.started_s = started_s
        self.prepared_s = 0.0
        """Time at which the prompt was tokenized; 0 before."""
        self.sent_s = 0.0
        """Time at which the request had been sent to a worker; 0 before."""
        self.last_s = 0.0
        """Time at which the latest token was written; 0 before the first."""
        self.commented_s = 0.0
        """Time of the last comment written to keep an idle stream's connection alive."""
        self.media: Mapping[str, int] = NO_MEDIA
        """Number of images, videos and audio parts of the request."""
        self.agent_context: AgentContext | None = None
        """The agent's session, if the request trace records requests."""
        self.capture: Capture | None = None
        """Copy of the response, if the request trace records payloads."""
        self.traced_body = b""
        """Request body, if the request trace records payloads."""
        self.kv_block_size = 0
        """Tokens per KV cache block of the model; set if requests are traced."""
        self.workers: list[int] = []
        """First worker of each of its engine requests."""
        self.dp_rank: int | None = None
        """Rank of the worker of the last engine request, where a KV router chose it."""
        self.phase: PhaseGauges | None = None
        """Gauges of the phase in which the response is generated."""
        self.prefill: tuple[int, float, int | None] | None = None
        """Prefill worker, if separate, the time at which the prompt was computed (0: not yet), and the worker's rank."""
        self.routed: RoutedRequests | None = None
        """Metrics of the worker set to which the request is sent."""
        self.is_closed = False
        frontend.count_start(endpoint, model, self.request_type)
        frontend.open_requests.add(self)
        metrics.active.value += 1
        metrics.inflight.value += 1
        metrics.queued.value += 1

    # Steps of the request.

    def prepared(self, media: object) -> None:
        """Record that the prompt is tokenized; `media` are the request's media parts by kind, if any."""
        self.prepared_s = time.perf_counter()
        if isinstance(media, dict):
            self.count_media(media)

    def route_through(self, routed: RoutedRequests | None, phase: PhaseGauges) -> None:
        """Set the metrics of the worker set to which the request is sent, and of its phase."""
        self.routed = routed
        self.phase = phase

    def sent(self) -> None:
        """Record that every engine request was sent to a worker."""
        self.sent_s = time.perf_counter()

    def sent_to(self, worker_id: int, part: int, dp_rank: int | None = None) -> None:
        """Record the first worker of one of the engine requests, and its rank where a KV router chose it."""
        self.workers.append(worker_id)
        self.dp_rank = dp_rank
        if self.routes:
            self.routes[part].set("worker_id", f"{worker_id:x}")

    def prefilled_by(self, phase: PrefillPhase) -> None:
        """Record the prefill worker."""
        self.prefill = phase.instance_id, phase.done_s, phase.dp_rank

    def tokens(self, count: int, now_s: float) -> None:
        """Record `count` tokens that became visible together."""
        last, self.last_s = self.last_s, now_s
        if last:
            self.metrics.itl.observe_many((now_s - last) / count, count)
            return
        self.first_s = now_s
        self.metrics.queued.value -= 1
        self.metrics.ttft.observe(now_s - self.started_s)
        if count > 1:
            self.metrics.itl.observe_many(0.0, count - 1)

    def written(self, now_s: float) -> float:
        """Record a write of tokens that are timed by the caller; return the time of the write before it."""
        last_s, self.last_s = self.last_s, now_s
        return last_s

    def commented(self, now_s: float) -> None:
        """Record a comment written to an idle stream."""
        self.commented_s = now_s

    def count_media(self, parts: Mapping[str, Sequence[object]]) -> None:
        """Record the number of media parts: `image_url`, `video_url`, `audio_url`."""
        self.media = {kind.removesuffix("_url"): len(found) for kind, found in parts.items()}

    # Spans and trace.

    def begin_span(self, tracer: Tracer) -> None:
        """Begin the request's span, which continues the client's trace; the worker's spans continue this one."""
        self.span = tracer.start(
            SPAN, self.headers, request_id=self.request_id, model=self.model, endpoint=self.endpoint
        )
        kept = {name: value for name, value in self.headers.items() if name not in SPAN_HEADERS}
        self.headers = kept | self.span.headers()
        self.scope = (self.request_id, self.headers, SPAN, "")

    def begin_route(self, tracer: Tracer, part_id: str) -> Span:
        """Begin the span of an engine request's dispatch to a worker and its response."""
        route = tracer.start("router.route_request", self.headers, request_id=part_id)
        self.routes.append(route)
        return route

    def moved(self, part: int, worker_id: int | None, error: Exception, tokens: int) -> None:
        """Add an event to the span of an engine request that is sent to another worker."""
        if part < len(self.routes):
            worker = {} if worker_id is None else {"worker_id": f"{worker_id:x}"}
            self.routes[part].event("migration", {**worker, "error": str(error), "output_tokens": tokens})

    def end_spans(self, error: Exception | None, usage: CompletionUsage | None) -> None:
        """End the request's span, with its token counts, and the spans of its dispatch to workers."""
        if self.span is None:
            return
        for route in self.routes:
            route.end(error)
        if usage is not None:
            self.span.set("input_tokens", usage.prompt_tokens)
            self.span.set("output_tokens", usage.completion_tokens)
        self.span.end(error)

    def trace(self, kv_block_size: int, agent_context: AgentContext | None) -> None:
        """Keep what the request trace needs at the end."""
        self.kv_block_size = kv_block_size
        self.agent_context = agent_context

    def keep_payload(self, capture: Capture, body: bytes) -> None:
        """Keep the request body and a copy of the response for the request trace."""
        self.capture = capture
        self.traced_body = body

    # The end.

    def summary(self, outcome: str, usage: CompletionUsage | None, now_s: float) -> dict[str, object]:
        """Return the log fields of a finished request, under upstream's names."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "model": self.model,
            "endpoint": self.endpoint,
            "request.outcome": outcome or "success",
            "status": "error" if outcome not in ("", "cancelled") else outcome or "success",
            **({"error_type": outcome} if outcome else {}),
            "elapsed_ms": round((now_s - self.started_s) * 1e3),
            "total_ms": round((now_s - self.started_s) * 1e3, 1),
        }
        if usage is not None:
            fields["input_tokens"] = usage.prompt_tokens
            fields["output_tokens"] = usage.completion_tokens
        if self.first_s:
            fields["ttft_ms"] = round((self.first_s - self.started_s) * 1e3, 1)
            if usage is not None and usage.completion_tokens > 1 and self.request_type == "stream":
                gaps = usage.completion_tokens - 1
                fields["avg_itl_ms"] = round((self.last_s - self.first_s) * 1e3 / gaps, 2)
        return fields

    def _close_stages(self) -> None:
        """Observe the durations of completed stages."""
        if not self.prepared_s:
            return
        self.frontend.preprocess.observe(self.prepared_s - self.started_s)
        if self.sent_s:
            self.frontend.dispatch.observe(self.sent_s - self.prepared_s)
            if self.first_s:
                self.frontend.roundtrip.observe(max(0.0, self.first_s - self.sent_s))

    def discard(self) -> None:
        """Return the request's share of the gauges without counting its end. Further calls do nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self.frontend.open_requests.discard(self)
        metrics = self.metrics
        metrics.active.value -= 1
        metrics.inflight.value -= 1
        if not self.last_s:
            metrics.queued.value -= 1

    def close(self, error_type: str, usage: CompletionUsage | None, now_s: float) -> None:
        """Count the end of the request. Further calls do nothing."""
        if self.is_closed:
            return
        self.discard()
        metrics = self.metrics
        metrics.duration.observe(now_s - self.started_s)
        self._close_stages()
        if usage is not None:
            metrics.input_tokens.observe(usage.prompt_tokens)
            metrics.output_tokens.observe(usage.completion_tokens)
            metrics.output_tokens_total.inc(usage.completion_tokens)
            self.frontend.detokenized.inc(usage.completion_tokens)
            for word, histogram in metrics.media:
                histogram.observe(self.media.get(word, 0))
            if self.workers and self.first_s:
                self._note_worker(usage)
            if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
                metrics.cached_tokens.observe(usage.prompt_tokens_details.cached_tokens)
        if self.routed is not None and self.workers:
            self._note_routed(self.routed, usage)
        self.frontend.count_end(self.endpoint, self.model, self.request_type, error_type)

    def _note_routed(self, routed: RoutedRequests, usage: CompletionUsage | None) -> None:
        """Record the end of the request in the metrics of the worker set."""
        tokens, reused = 0, 0
        if usage is not None:
            tokens, details = usage.completion_tokens, usage.prompt_tokens_details
            reused = 0 if details is None else details.cached_tokens or 0
        ttft_s = self.first_s - self.prepared_s if self.first_s else None
        itl_s = (self.last_s - self.first_s) / (tokens - 1) if tokens > 1 else None
        routed.ended(tokens, ttft_s, itl_s, reused, len(self.workers))
        if self.prefill is not None and self.first_s:
            routed.transferred(max(0.0, self.first_s - (self.prefill[1] or self.first_s)))

    def _note_worker(self, usage: CompletionUsage) -> None:
        """Record the worker's last request; with a prefill worker, prompt tokens and time to first token are its values."""
        note, ttft_s = self.frontend.note_worker, self.first_s - self.started_s
        prompt, itl_s = usage.prompt_tokens, None
        if usage.completion_tokens > 1:
            itl_s = (self.last_s - self.first_s) / (usage.completion_tokens - 1)
        if self.prefill is None:
            note(self.workers[-1], "decode", self.dp_rank, prompt_tokens=prompt, ttft_s=ttft_s, itl_s=itl_s)
        else:
            note(self.workers[-1], "decode", self.dp_rank, itl_s=itl_s)
            note(self.prefill[0], "prefill", self.prefill[2], prompt_tokens=prompt, ttft_s=ttft_s)
