"""Events: publish the results of simulated steps as KV events, load, and the metrics of a vLLM server."""

import logging
import time
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.core.metrics import MetricsRegistry
from dynamo.mocker.native_events import NativeEvents, native
from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.step import StepResult
from dynamo.protocols.kv_events import KvEvent, Removed, Stored
from dynamo.protocols.load import WorkerLoad

logger = logging.getLogger(__name__)

HOST_TIER = "host_pinned"
LABELS = ("engine", "model_name")
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class EngineMetrics:
    """The `vllm:*` series of one rank."""

    def __init__(self, registry: MetricsRegistry, engine: str, model_name: str) -> None:
        labels = {"engine": engine, "model_name": model_name}
        self.running = registry.gauge("vllm:num_requests_running", "Requests in the batch", LABELS).labels(**labels)
        self.waiting = registry.gauge("vllm:num_requests_waiting", "Requests in the queue", LABELS).labels(**labels)
        self.cache_usage = registry.gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0-1", LABELS).labels(**labels)
        old_usage = registry.gauge("vllm:gpu_cache_usage_perc", "KV blocks in use, 0-1 (old name)", LABELS).labels(
            **labels
        )
        old_usage.follow(lambda: self.cache_usage.value)
        self.preemptions = registry.counter("vllm:num_preemptions_total", "Preemptions", LABELS).labels(**labels)
        self.ttft = registry.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", LABELS, TTFT_BUCKETS_S
        ).labels(**labels)
        self.itl = registry.histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens", LABELS, ITL_BUCKETS_S
        ).labels(**labels)
        self.latency = registry.histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", LABELS, LATENCY_BUCKETS_S
        ).labels(**labels)


class SimulatedStepReporter:
    """The publisher of step results to the host and the metrics."""

    def __init__(
        self,
        host: EngineHost,
        metrics: EngineMetrics,
        simulation: Batching[Any],
        *,
        publishes_cache: bool = True,
        native_events: NativeEvents | None = None,
        is_traced: bool = False,
    ) -> None:
        """`publishes_cache`: publish KV events. `is_traced`: log cache changes."""
        self._host = host
        self._tells_cache = publishes_cache
        self._native_events = native_events
        self._is_traced = is_traced
        if native_events is not None:
            simulation.tokens_of = {}
        self._metrics = metrics
        self._simulation = simulation
        self._published: WorkerLoad | None = None

    def report(self, result: StepResult[Any], now_ms: float, gap_s: float) -> None:
        """Publish a step that ended at `now_ms`; `gap_s` is the time in seconds since the previous step ended."""
        if result.changes or result.host_events:
            self._publish_cache(result.events, result.host_events)
        self._publish_load(result.load)
        self._host.publish_forward_pass(result.forward_pass, self._simulation.dp_rank)

        metrics = self._metrics
        metrics.preemptions.value = self._simulation.preemptions
        if further := len(result.tokens) + len(result.finished) - len(result.prefilled):
            metrics.itl.observe_many(gap_s, further)
        for sequence in result.prefilled:
            if sequence.generated == 1:  # A preempted sequence had its first token before.
                metrics.ttft.observe((now_ms - sequence.arrived_ms) / 1000)
        for sequence in result.finished:
            metrics.latency.observe((now_ms - sequence.arrived_ms) / 1000)

    def rest(self) -> None:
        """Publish the state of an idle rank: the last step's results do not include what was cancelled or released after it began."""
        events = self._simulation.pool.events()
        if events:
            self._publish_cache(events, [])
        load = self._simulation.load()
        if self._published is not None and self._published != load:
            self._publish_load(load)

    def _publish_cache(self, events: list[KvEvent], host_events: list[KvEvent]) -> None:
        rank = self._simulation.dp_rank
        if self._is_traced:
            _trace(events, rank, "device")
            _trace(host_events, rank, HOST_TIER)
        if self._tells_cache:
            for event in events:
                self._host.publish_kv_event(event, rank)
            for event in host_events:
                self._host.publish_kv_event(event, rank, HOST_TIER)
        if self._native_events is not None and events:
            tokens_of = self._simulation.tokens_of or {}
            block_tokens = self._simulation.limits.block_tokens
            published = [native(event, tokens_of, block_tokens) for event in events]
            tokens_of.clear()
            self._native_events.publish(published, time.time())

    def _publish_load(self, load: WorkerLoad) -> None:
        self._published = load
        self._host.publish_load(load)
        self._metrics.running.set(load.running_requests)
        self._metrics.waiting.set(load.waiting_requests)
        self._metrics.cache_usage.set(load.kv_used_blocks / load.kv_total_blocks)


def _trace(events: list[KvEvent], dp_rank: int, tier: str) -> None:
    """Log stored and evicted blocks (`DYN_MOCKER_KV_CACHE_TRACE`)."""
    for event in events:
        if isinstance(event, Stored):
            logger.info("kv cache: rank %d, %s: %d blocks stored", dp_rank, tier, len(event.blocks))
        elif isinstance(event, Removed):
            logger.info("kv cache: rank %d, %s: %d blocks evicted", dp_rank, tier, len(event.block_hashes))
