"""Frontend metrics: request, latency, token, model and migration metrics under upstream's names."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import Counter, Gauge, Histogram, MetricsRegistry, spread_buckets

BUCKETS = {
    "REQUEST_DURATION": (1.0, 512.0, 10),
    "INPUT_SEQUENCE": (50.0, 128000.0, 12),
    "OUTPUT_SEQUENCE": (50.0, 32000.0, 10),
    "TTFT": (0.001, 480.0, 18),
    "ITL": (0.001, 80.0, 20),
    "EMBEDDING_LATENCY": (0.001, 10.0, 14),
}
"""Minimum, maximum and count of each histogram's buckets; `DYN_METRICS_<X>_{MIN,MAX,COUNT}` override them."""

STAGE_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0)
TEMPLATE_BUCKETS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)
TOKENIZE_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
LATENCY_MS_BUCKETS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
PARTS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 20.0, 30.0, 40.0, 50.0, 100.0)
"""Upstream's buckets, so that its dashboards work with our metrics."""

NO_MODEL = "unknown_model"
"""`model` label for unknown models: the requested name comes from clients and may be anything."""
FAILURES = {
    "validation": ("InvalidRequest", "request.invalid"),
    "not_found": ("NotFound", "request.not_found"),
    "overload": ("CapacityExhausted", "capacity.pool_exhausted"),
    "unavailable": ("WorkerUnavailable", "backend.worker_unavailable"),
    "cancelled": ("Cancelled", "request.cancelled"),
    "response_timeout": ("ResponseTimeout", "backend.response_timeout"),
    "internal": ("Unknown", "runtime.unclassified"),
}
"""Class and reason of each `error_type`."""

LOOP_PERIOD_S = 0.1  # Ten wakeups a second cost little; a longer period would miss most stalls.
LOOP_STALL_S = 0.05
LOOP_DELAY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

BY_MODEL = ["model"]


class ModelMetrics:
    """Metric series of one model, looked up once."""

    __slots__ = (
        "active",
        "cached_tokens",
        "duration",
        "inflight",
        "input_tokens",
        "itl",
        "media",
        "output_tokens",
        "output_tokens_total",
        "queued",
        "ttft",
    )

    def __init__(self, families: "FrontendMetrics", model: str) -> None:
        self.active: Gauge = families.active.labels(model=model)
        self.inflight: Gauge = families.inflight.labels(model=model)
        self.queued: Gauge = families.queued.labels(model=model)
        self.ttft: Histogram = families.ttft.labels(model=model)
        self.itl: Histogram = families.itl.labels(model=model)
        self.duration: Histogram = families.duration.labels(model=model)
        self.input_tokens: Histogram = families.input_tokens.labels(model=model)
        self.output_tokens: Histogram = families.output_tokens.labels(model=model)
        self.cached_tokens: Histogram = families.cached_tokens.labels(model=model)
        self.media: list[tuple[str, Histogram]] = [
            (word, family.labels(model=model)) for word, family in families.media.items()
        ]
        self.output_tokens_total: Counter = families.output_tokens_total.labels(model=model)


class PhaseGauges(NamedTuple):
    """Requests in the stages of one phase: whose worker is being chosen, and that are being sent or, as prefills, computed."""

    route: Gauge
    dispatch: Gauge


class StagedRequest(Protocol):
    """Request in progress, as far as the gauges of the stages need it."""

    prepared_s: float
    """Time at which the prompt was tokenized; 0 before."""
    sent_s: float
    """Time at which the request had been sent to a worker; 0 before."""
    phase: PhaseGauges | None
    """Gauges of the phase in which its response is generated; None before its workers are known."""


class FrontendMetrics:
    """All metric families of the frontend in one registry."""

    def __init__(self, registry: MetricsRegistry, prefix: str = "dynamo_frontend", *, migration_limit: int = 0) -> None:
        self.registry = registry
        self.prefix = prefix
        self.open_requests: set[StagedRequest] = set()
        """Requests in progress."""
        self._migration_limit = migration_limit
        self._buckets = {name: read_buckets(name) for name in BUCKETS}
        self._workers: dict[tuple[int, int | None, int], Gauge] = {}
        """Gauges of the last request, by worker, rank and place in `_last`."""
        self._models: dict[str, ModelMetrics] = {}
        self._phases: dict[str, PhaseGauges] = {}
        self._series: dict[tuple[str, ...], Counter] = {}
        self._declare_requests(registry, prefix)
        self._declare_tokens(registry, prefix)
        self._declare_models(registry, prefix)
        self._declare_stages(registry, prefix)
        self._declare_workers(registry, prefix)

    def _declare_requests(self, registry: MetricsRegistry, prefix: str) -> None:
        """Declare requests in progress, their durations and their ends."""
        name = f"{prefix}_{{}}".format
        self.active = registry.gauge(name("active_requests"), "Requests in progress", BY_MODEL)
        self.inflight = registry.gauge(name("inflight_requests"), "Requests in progress", BY_MODEL)
        self.queued = registry.gauge(name("queued_requests"), "Requests without a first token yet", BY_MODEL)
        self.disconnected = registry.gauge(
            name("disconnected_clients"), "Clients that disconnected before the end of the response"
        ).labels()
        self.ttft = registry.histogram(
            name("time_to_first_token_seconds"), "Time to first token", BY_MODEL, self._buckets["TTFT"]
        )
        self.itl = registry.histogram(
            name("inter_token_latency_seconds"), "Time between output tokens", BY_MODEL, self._buckets["ITL"]
        )
        self.duration = registry.histogram(
            name("request_duration_seconds"), "Whole requests", BY_MODEL, self._buckets["REQUEST_DURATION"]
        )
        self.started = registry.counter(
            name("requests_started_total"), "Requests accepted", ["endpoint", "model", "request_type"]
        )
        self.requests = registry.counter(
            name("requests_total"),
            "Requests ended",
            ["endpoint", "error_type", "model", "request_type", "status"],
        )
        self.cancellations = registry.counter(
            name("model_cancellation_total"),
            "Requests whose client disconnected",
            ["model", "endpoint", "request_type"],
        )
        self.rejections = registry.counter(
            name("model_rejection_total"), "Requests refused because all workers were busy", ["model", "endpoint"]
        )
        self.failures = registry.counter(name("failures_total"), "Requests that failed", ["class", "reason"])

    def _declare_tokens(self, registry: MetricsRegistry, prefix: str) -> None:
        """Declare tokens, cached words and media parts."""
        name = f"{prefix}_{{}}".format
        self.input_tokens = registry.histogram(
            name("input_sequence_tokens"), "Prompt tokens of a request", BY_MODEL, self._buckets["INPUT_SEQUENCE"]
        )
        self.output_tokens = registry.histogram(
            name("output_sequence_tokens"),
            "Output tokens of a request",
            BY_MODEL,
            self._buckets["OUTPUT_SEQUENCE"],
        )
        self.cached_tokens = registry.histogram(
            name("cached_tokens"),
            "Prompt tokens found in a worker's cache",
            BY_MODEL,
            self._buckets["INPUT_SEQUENCE"],
        )
        self.output_tokens_total = registry.counter(name("output_tokens_total"), "Output tokens", BY_MODEL)
        self.detokenized = registry.counter(name("detokenize_token_count"), "Detokenized tokens").labels()
        self.media = {
            word: registry.histogram(
                name(f"{plural}_per_request"), f"Number of {plural} in a request", BY_MODEL, PARTS_BUCKETS
            )
            for word, plural in (("image", "images"), ("video", "videos"), ("audio", "audio"))
        }
        self.tokenizer_cache_hits = registry.counter(
            name("tokenizer_cache_hits_total"), "Words whose tokens were cached"
        )
        self.tokenizer_cache_misses = registry.counter(
            name("tokenizer_cache_misses_total"), "Words that had to be tokenized"
        )

    def _declare_models(self, registry: MetricsRegistry, prefix: str) -> None:
        """Declare the values of model cards, and migrations between the workers of a model."""
        name = f"{prefix}_{{}}".format
        self.model_ready = registry.gauge(name("model_ready"), "1 when a worker serves the model", BY_MODEL)
        self.model_gauges = {
            word: registry.gauge(name(f"model_{word}"), f"{word} of the model card", BY_MODEL)
            for word in (
                "context_length",
                "kv_cache_block_size",
                "max_num_batched_tokens",
                "max_num_seqs",
                "total_kv_blocks",
            )
        }
        self.migrations = registry.counter(
            name("model_migration_total"),
            "Requests sent to another worker after one failed",
            ["model", "migration_type"],
        )
        self.migrations_too_long = registry.counter(
            name("model_migration_max_seq_len_exceeded_total"), "Streams too long to be migrated", BY_MODEL
        )
        self.migration_duration = registry.histogram(
            name("model_migration_duration_seconds"),
            "Time to move a request to another worker",
            ["model", "outcome"],
        )
        self._migration_limits = registry.gauge(
            name("model_migration_limit"), "Maximum number of migrations of a stream", BY_MODEL
        )

    def _declare_stages(self, registry: MetricsRegistry, prefix: str) -> None:
        """Declare the durations of a request's stages, and the requests in each."""
        name = f"{prefix}_{{}}".format
        self._template = registry.histogram(
            name("template_seconds"), "Time to render a conversation with the chat template", (), TEMPLATE_BUCKETS
        ).labels()
        self._tokenize = registry.histogram(
            name("tokenize_seconds"), "Time to tokenize a prompt", (), TOKENIZE_BUCKETS
        ).labels()
        self._tokenize_ms = registry.histogram(
            name("tokenizer_latency_ms"), "Time to tokenize a prompt", ["operation"], LATENCY_MS_BUCKETS
        ).labels(operation="tokenize")
        stages = registry.histogram(
            name("stage_duration_seconds"), "Time in one stage of a request", ["stage"], STAGE_BUCKETS
        )
        self.preprocess = stages.labels(stage="preprocess")
        self.queue = stages.labels(stage="queue")
        self.route = stages.labels(stage="route")
        self.dispatch = stages.labels(stage="dispatch")
        self.roundtrip = stages.labels(stage="transport_roundtrip")
        self._in_stage = registry.gauge(name("stage_requests"), "Requests in each stage", ["phase", "stage"])
        self._in_stage.labels(phase="", stage="preprocess").follow(self._preprocessing)

    def phase(self, name: str) -> PhaseGauges:
        """Return the gauges of a phase: aggregated, prefill or decode."""
        gauges = self._phases.get(name)
        if gauges is None:
            labels = self._in_stage.labels
            gauges = PhaseGauges(labels(phase=name, stage="route"), labels(phase=name, stage="dispatch"))
            self._phases[name] = gauges
            if name != "prefill":  # Prefills are counted one by one: a request may have several.
                gauges.dispatch.follow(partial(self._dispatching, gauges))
        return gauges

    def _declare_workers(self, registry: MetricsRegistry, prefix: str) -> None:
        """Declare the last request of each worker."""
        name = f"{prefix}_{{}}".format
        by_worker = ["dp_rank", "worker_id", "worker_type"]
        self._last = tuple(
            registry.gauge(name(f"worker_last_{word}"), f"Last request of each worker: {help_text}", by_worker)
            for word, help_text in (
                ("input_sequence_tokens", "prompt tokens"),
                ("time_to_first_token_seconds", "time to first token"),
                ("inter_token_latency_seconds", "time between tokens"),
            )
        )

    def prepared(self, template_s: float, tokenize_s: float) -> None:
        """Record the durations of template and tokenizer; called on the loop's thread."""
        self._template.observe(template_s)
        self._tokenize.observe(tokenize_s)
        self._tokenize_ms.observe(tokenize_s * 1e3)

    def model(self, model: str) -> ModelMetrics:
        """Return the series of one model."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics(self, model)
        return metrics

    def models(self) -> Mapping[str, ModelMetrics]:
        """Return the series of every model that has had a request."""
        return self._models

    def ended(self) -> dict[str, tuple[float, float]]:
        """Return the numbers of successful and failed requests by model; refused ones count for `NO_MODEL`."""
        found: dict[str, tuple[float, float]] = {}
        for key, counter in self._series.items():
            if len(key) == 4:  # Ended requests: endpoint, model, request type, error type.
                good, bad = found.get(key[1], (0.0, 0.0))
                found[key[1]] = (good, bad + counter.value) if key[3] else (good + counter.value, bad)
        return found

    def show_model(self, model: str, values: Mapping[str, int | None]) -> None:
        """Publish the model card's values."""
        self.model_ready.labels(model=model).set(1)
        self._migration_limits.labels(model=model).set(self._migration_limit)
        for word, value in values.items():
            if value is not None:
                self.model_gauges[word].labels(model=model).set(value)

    def hide_model(self, model: str) -> None:
        """Remove the series of a model whose last worker left."""
        self._migration_limits.remove(model=model)
        self.model_ready.labels(model=model).set(0)
        for family in self.model_gauges.values():
            family.remove(model=model)

    def note_worker(
        self,
        worker_id: int,
        worker_type: str,
        dp_rank: int | None,
        *,
        prompt_tokens: int | None = None,
        ttft_s: float | None = None,
        itl_s: float | None = None,
    ) -> None:
        """Record a worker's last request, as far as the worker computed it; `dp_rank` is known to a KV router only."""
        for place, value in enumerate((prompt_tokens, ttft_s, itl_s)):
            if value is None:
                continue
            gauge = self._workers.get((worker_id, dp_rank, place))
            if gauge is None:
                rank = "none" if dp_rank is None else str(dp_rank)
                gauge = self._last[place].labels(dp_rank=rank, worker_id=str(worker_id), worker_type=worker_type)
                self._workers[worker_id, dp_rank, place] = gauge
            gauge.value = value

    def keep_workers(self, present: Collection[int]) -> None:
        """Remove the series of workers that left."""
        for key in [key for key in self._workers if key[0] not in present]:
            del self._workers[key]
            for family in self._last:
                family.remove(worker_id=str(key[0]))

    def _preprocessing(self) -> int:
        return sum(not one.prepared_s for one in self.open_requests)

    def _dispatching(self, phase: PhaseGauges) -> int:
        return sum(one.phase is phase and bool(one.prepared_s) and not one.sent_s for one in self.open_requests)

    def count_start(self, endpoint: str, model: str, request_type: str) -> None:
        """Count an accepted request."""
        key = (endpoint, model, request_type)
        self._get(key, lambda: self.started.labels(endpoint=endpoint, model=model, request_type=request_type)).inc()

    def count_end(self, endpoint: str, model: str, request_type: str, error_type: str) -> None:
        """Count a finished request; `error_type` is empty for a success."""
        status = "error" if error_type else "success"
        model = model or NO_MODEL
        key = (endpoint, model, request_type, error_type)
        self._get(
            key,
            lambda: self.requests.labels(
                endpoint=endpoint, error_type=error_type, model=model, request_type=request_type, status=status
            ),
        ).inc()
        if error_type:
            kind, why = FAILURES.get(error_type, FAILURES["internal"])
            self.failures.labels(**{"class": kind, "reason": why}).inc()
        if error_type == "cancelled":
            self.cancellations.labels(model=model, endpoint=endpoint, request_type=request_type).inc()
        elif error_type == "overload":
            self.rejections.labels(model=model, endpoint=endpoint).inc()

    def _get(self, key: tuple[str, ...], make: Callable[[], Counter]) -> Counter:
        counter = self._series.get(key)
        if counter is None:
            counter = self._series[key] = make()
        return counter


def read_buckets(name: str) -> tuple[float, ...]:
    """Return the buckets of one histogram, from the environment or upstream's defaults. Raise `ConfigError`."""
    low, high, count = BUCKETS[name]
    variable = f"DYN_METRICS_{name}"
    low = setting(f"{variable}_MIN", low, float)
    high = setting(f"{variable}_MAX", high, float)
    count = setting(f"{variable}_COUNT", count, int)
    try:
        return spread_buckets(low, high, count)
    except ValueError as error:
        raise ConfigError(f"{variable}_{{MIN,MAX,COUNT}}: {error}") from None


class LoopDelay:
    """Delay of the running event loop, measured by a timer that should fire every tenth of a second, until it is closed.

    A late loop delays tokens, health checks and heartbeats. A delay beyond `LOOP_STALL_S` counts as a stall: a callback has
    blocked the loop.
    """

    def __init__(self, registry: MetricsRegistry, prefix: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._delay: Histogram = registry.histogram(
            f"{prefix}_event_loop_delay_seconds", "Delay of a timer of the event loop", (), LOOP_DELAY_BUCKETS
        ).labels()
        self._stalls: Counter = registry.counter(
            f"{prefix}_event_loop_stall_total", f"Timers that fired more than {LOOP_STALL_S * 1e3:g} ms late"
        ).labels()
        self._clock = clock  # Not the loop's own time, which does not advance while a callback runs.
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring."""
        self._due_s = self._clock() + LOOP_PERIOD_S
        self._timer = self._loop.call_later(LOOP_PERIOD_S, self._fire)

    def close(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, late_s: float) -> None:
        """Record that the timer fired `late_s` late."""
        self._delay.observe(max(late_s, 0.0))
        if late_s > LOOP_STALL_S:
            self._stalls.inc()

    def _fire(self) -> None:
        self.observe(self._clock() - self._due_s)
        self.start()
