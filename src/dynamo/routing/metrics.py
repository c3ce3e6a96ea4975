"""Metrics of KV routers: decisions, queue, registered workers, shared cache, and messages between replicas.

Names, labels and buckets are upstream's, so that its dashboards work with our metrics.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from dynamo.core.metrics import Gauge, Histogram, MetricsRegistry
from dynamo.kv_events.topic import Topic
from dynamo.kv_router.decision import Decision, Rank
from dynamo.kv_router.queue import REFUSALS
from dynamo.kv_router.router import Router
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.metric_labels import WORKER_LABELS, worker_labels

ROUTER_LABELS = (*WORKER_LABELS, "router_id")
PHASE_LABELS = (*ROUTER_LABELS, "model", "phase")
QUEUE_LABELS = ("model", "policy_class", "worker_type")
RANK_LABELS = ("dp_rank", "worker_id", "worker_type")

HASHING_BUCKETS_MS = tuple(0.001 * 2**step for step in range(15))
OVERHEAD_BUCKETS_MS = tuple(0.01 * 3**step for step in range(17))
BATCH = 64  # Decisions whose durations and hit rates are recorded at once, at the latest when the metrics are rendered.
RATE_BUCKETS = tuple(step * 0.05 for step in range(21))
LOST_BUCKETS = tuple(2.0**step for step in range(-2, 14))
BEYOND_BUCKETS = tuple(2.0**step for step in range(12))

REJECTIONS = ("due_time_passed", "predicted_miss")
"""Reasons of upstream's deadline admission; only the first one exists here: no decision predicts a miss."""
POLICIES = ("ttl", "lru", "disabled")


class OverheadMetrics:
    """Durations of the steps of a decision."""

    def __init__(self, registry: MetricsRegistry, router_id: str) -> None:
        def overhead(name: str, what: str, buckets: tuple[float, ...] = OVERHEAD_BUCKETS_MS) -> Any:
            family = registry.histogram(
                f"dynamo_router_overhead_{name}_ms", f"{what}, in milliseconds", ("router_id",), buckets
            )
            return family.labels(router_id=router_id)

        self.block_hashing = overhead("block_hashing", "Time to hash a prompt's blocks", HASHING_BUCKETS_MS)
        self.seq_hashing = overhead(
            "seq_hashing", "Time to hash a prompt's prefixes for router replicas", HASHING_BUCKETS_MS
        )
        self.indexer_find_matches = overhead("indexer_find_matches", "Time to look up a prompt's cached blocks")
        self.scheduling = overhead("scheduling", "Time to score, choose and book")
        self.total = overhead("total", "Total time of a routing decision")


class KvRouterMetrics:
    """Metrics of the router of one worker set."""

    def __init__(
        self,
        registry: MetricsRegistry,
        router_id: str,
        endpoint: EndpointId,
        instance_id: int,
        machine: Router,
        worker_type: str = "aggregated",
    ) -> None:
        """`worker_type`: type of the set's workers on their cards."""
        self._registry = registry
        self._machine = machine
        self._phase = worker_type if worker_type in {"prefill", "decode"} else "aggregated"
        self.worker_type = "prefill" if worker_type == "prefill" else "decode"
        self._worker = worker_labels(endpoint, instance_id)
        self._router = {**self._worker, "router_id": router_id}
        self._model = ""
        self._ranks: dict[Rank, tuple[Callable[[], float], Callable[[], float]]] = {}
        """Callbacks of the gauges of each rank. A worker with several models has a router of each, whose loads are added."""
        self.overhead = OverheadMetrics(registry, router_id)
        self._durations: list[tuple[float, float, float]] = []
        self._rates: list[float] = []
        """Durations and hit rates of the latest decisions. A batch is recorded at a fraction of the cost of single ones, after
        which the processor's caches hold other data."""
        self._declare_decisions(registry)
        for histogram in self._batched:
            histogram.add_source(self._record)
        self._declare_ranks(registry)
        self._declare_queue(registry)
        self.silent_workers = Gauge()
        """Workers that publish no KV events although events are expected."""

    def _declare_decisions(self, registry: MetricsRegistry) -> None:
        self._hit_rate = registry.histogram(
            "dynamo_component_router_kv_hit_rate",
            "Fraction of a prompt's blocks that are cached on the chosen worker",
            ROUTER_LABELS,
            RATE_BUCKETS,
        ).labels(**self._router)
        self._best = registry.counter(
            "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total",
            "Cached prompt tokens of the eligible worker that has most of them",
            PHASE_LABELS,
        )
        self._selected = registry.counter(
            "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
            "Cached prompt tokens of the chosen worker",
            PHASE_LABELS,
        )
        # Upstream observes both for prefill workers; the series of its label value exists from the start.
        by_type = [*ROUTER_LABELS, "worker_type"]
        lost = registry.histogram(
            "dynamo_component_router_overlap_blocks_lost",
            "Cached prompt blocks of the best worker beyond those of the chosen one",
            by_type,
            LOST_BUCKETS,
        )
        other = registry.counter(
            "dynamo_component_router_non_max_overlap_selections_total",
            "Requests placed on a worker with fewer cached blocks than another eligible one",
            by_type,
        )
        for kind in ("prefill", self.worker_type):
            self._lost = lost.labels(**self._router, worker_type=kind)
            self._other = other.labels(**self._router, worker_type=kind)

    def _declare_ranks(self, registry: MetricsRegistry) -> None:
        self._registered = registry.gauge(
            "dynamo_component_router_worker_registered",
            "1 while the rank is known to the router",
            (*WORKER_LABELS, "router_worker_id", "dp_rank", "worker_type"),
        )
        self._decode_blocks = registry.gauge(
            "dynamo_frontend_worker_active_decode_blocks", "KV blocks of the requests at a rank", RANK_LABELS
        )
        self._prefill_tokens = registry.gauge(
            "dynamo_frontend_worker_active_prefill_tokens", "Prompt tokens to be computed by a rank", RANK_LABELS
        )
        self._silent = registry.gauge(
            "dynamo_component_router_kv_event_source_mismatch_workers",
            "Workers that publish no KV events although events are expected",
            (*WORKER_LABELS, "model", "target_component", "target_endpoint", "target_namespace", "worker_type"),
        )
        configured = registry.gauge(
            "dynamo_component_router_approximate_cache_configured_policy",
            "1 for the configured policy of predicted caches",
            (*WORKER_LABELS, "policy"),
        )
        effective = registry.gauge(
            "dynamo_component_router_approximate_cache_effective_policy",
            "1 for the policy of predicted caches in force",
            (*WORKER_LABELS, "policy"),
        )
        for policy in POLICIES:
            is_configured = self._machine.config.approximate_policy == policy
            configured.labels(**self._worker, policy=policy).set(is_configured)
            effective.labels(**self._worker, policy=policy).set(is_configured)
        registry.counter(
            "dynamo_component_router_approximate_lru_evicted_blocks_total",
            "Predicted blocks dropped because a worker's cache was full",
            WORKER_LABELS,
        ).labels(**self._worker).follow(
            lambda: 0 if self._machine.predicted is None else self._machine.predicted.evicted
        )

    def _declare_queue(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_frontend_router_"
        self._received = registry.counter(
            prefix + "admission_received_total", "Requests received by the router, retries included", QUEUE_LABELS
        )
        self._rejected = registry.counter(
            prefix + "admission_rejected_total",
            "Requests rejected by the router because of a deadline",
            (*QUEUE_LABELS, "reason"),
        )
        self._refused = registry.counter(
            prefix + "queue_backpressure_total",
            "Requests rejected because a limit of the router's queue was reached",
            (*QUEUE_LABELS, "reason"),
        )
        self._pending = tuple(
            registry.gauge(prefix + name, what, QUEUE_LABELS)
            for name, what in (
                ("queue_pending_requests", "Requests in the router's queue"),
                ("queue_pending_isl_tokens", "Prompt tokens of the requests in the router's queue"),
                ("queue_pending_cached_tokens", "Cached prompt tokens of the requests in the router's queue"),
            )
        )

    # Workers.

    def set_model(self, model: str, endpoint: EndpointId) -> None:
        """Create the series of the model, once its name is known from a card."""
        if model == self._model:
            return
        self._model = model
        phase = {**self._router, "model": model, "phase": self._phase}
        self._best_tokens, self._selected_tokens = self._best.labels(**phase), self._selected.labels(**phase)
        target = {
            "target_component": endpoint.component,
            "target_endpoint": endpoint.name,
            "target_namespace": endpoint.namespace,
        }
        self._silent.labels(**self._worker, model=model, worker_type=self.worker_type, **target).follow(
            lambda: self.silent_workers.value
        )
        for name in self._machine.waiting.names:
            self._follow_class(name, {"model": model, "policy_class": name, "worker_type": self.worker_type})

    def _follow_class(self, name: str, labels: dict[str, str]) -> None:
        """Read the numbers of one policy class whenever the metrics are rendered."""
        queue = self._machine.waiting
        self._received.labels(**labels).follow(partial(self._machine.received.__getitem__, name))
        for reason in REJECTIONS:
            rejected = self._rejected.labels(**labels, reason=reason)
            if reason == "due_time_passed":
                rejected.follow(partial(queue.expired.__getitem__, name))
        for reason in REFUSALS.values():
            self._refused.labels(**labels, reason=reason).follow(partial(queue.refused.__getitem__, (name, reason)))
        for place, family in enumerate(self._pending):
            family.labels(**labels).follow(partial(self._pending_of, name, place))

    def _pending_of(self, name: str, place: int) -> float:
        return self._machine.waiting.pending(name)[place]

    def set_ranks(self, ranks: Collection[Rank]) -> None:
        """Create the series of new ranks and remove those of ranks that left."""
        for rank in self._ranks.keys() - set(ranks):
            self._remove_rank(rank)
        for rank in set(ranks) - self._ranks.keys():
            tokens, blocks = self._ranks[rank] = partial(self._load_of, rank, 0), partial(self._load_of, rank, 1)
            labels = self._rank_labels(rank)
            self._prefill_tokens.labels(**labels).add_source(tokens)
            self._decode_blocks.labels(**labels).add_source(blocks)
            self._registered.labels(**self._worker, **self._registered_labels(rank)).set(1)

    def _remove_rank(self, rank: Rank) -> None:
        (tokens, blocks), labels = self._ranks.pop(rank), self._rank_labels(rank)
        is_shared = self._prefill_tokens.labels(**labels).remove_source(tokens)
        self._decode_blocks.labels(**labels).remove_source(blocks)
        if is_shared:
            return  # The router of another model counts requests on the same worker.
        self._decode_blocks.remove(**labels)
        self._prefill_tokens.remove(**labels)
        self._registered.remove(**self._worker, **self._registered_labels(rank))

    def _load_of(self, rank: Rank, place: int) -> float:
        return self._machine.load_of(rank)[place]

    def _rank_labels(self, rank: Rank) -> dict[str, str]:
        return {"dp_rank": str(rank[1]), "worker_id": str(rank[0]), "worker_type": self.worker_type}

    def _registered_labels(self, rank: Rank) -> dict[str, str]:
        return {"dp_rank": str(rank[1]), "router_worker_id": str(rank[0]), "worker_type": self.worker_type}

    @property
    def _batched(self) -> tuple[Histogram, ...]:
        """Histograms that are recorded in batches."""
        overhead = self.overhead
        return (
            self._hit_rate,
            overhead.block_hashing,
            overhead.indexer_find_matches,
            overhead.scheduling,
            overhead.total,
        )

    def close(self) -> None:
        """Remove the series that describe present state; counters keep their last values."""
        self._record()
        for histogram in self._batched:
            histogram.remove_source(self._record)
        self.set_ranks(())
        if self._model:
            for family in self._pending:
                family.remove(model=self._model, worker_type=self.worker_type)
            self._silent.remove(model=self._model, **self._worker)

    # Decisions.

    def timed(self, hashing_s: float, lookup_s: float, total_s: float) -> None:
        """Record the durations of a decision that was made without waiting; `total_s` includes the other two."""
        self._durations.append((hashing_s, lookup_s, total_s))
        if len(self._durations) >= BATCH:
            self._record()

    def _record(self) -> None:
        """Record the durations and hit rates of the latest decisions."""
        overhead = self.overhead
        durations, self._durations = self._durations, []
        for hashing_s, lookup_s, total_s in durations:
            overhead.block_hashing.observe(hashing_s * 1e3)
            overhead.indexer_find_matches.observe(lookup_s * 1e3)
            overhead.scheduling.observe((total_s - hashing_s - lookup_s) * 1e3)
            overhead.total.observe(total_s * 1e3)
        rates, self._rates = self._rates, []
        for rate in rates:
            self._hit_rate.observe(rate)

    def decided(self, decision: Decision) -> None:
        """Record the result of a decision."""
        if decision.blocks:
            self._rates.append(decision.hit_rate)
            if len(self._rates) >= BATCH:
                self._record()
        if not self._model or not decision.snapshot.prompt.device:
            return
        size, chosen, most = decision.snapshot.block_size, decision.device_blocks, decision.snapshot.deepest()
        self._best_tokens.value += most * size
        self._selected_tokens.value += chosen * size
        self._lost.observe(most - chosen)
        if most > chosen:
            self._other.value += 1


class SharedCacheMetrics:
    """Lookup times and hit rates of a shared cache."""

    def __init__(self, registry: MetricsRegistry, router_id: str, worker: dict[str, str]) -> None:
        """`worker`: values of `WORKER_LABELS`."""
        self._lookups = registry.histogram(
            "dynamo_router_overhead_shared_cache_query_ms",
            "Time of a shared cache lookup, in milliseconds",
            ("router_id",),
            OVERHEAD_BUCKETS_MS,
        ).labels(router_id=router_id)
        self.errors = registry.counter(
            "dynamo_router_shared_cache_errors_total",
            "Messages of a shared cache that were unreadable or lost",
            ("router_id",),
        ).labels(router_id=router_id)
        self._rate = registry.histogram(
            "dynamo_component_router_shared_cache_hit_rate",
            "Fraction of a prompt's blocks in a shared cache",
            ROUTER_LABELS,
            RATE_BUCKETS,
        ).labels(**worker, router_id=router_id)
        self._beyond = registry.histogram(
            "dynamo_component_router_shared_cache_beyond_blocks",
            "Blocks in a shared cache that are not cached on the chosen worker",
            ROUTER_LABELS,
            BEYOND_BUCKETS,
        ).labels(**worker, router_id=router_id)

    def looked_up(self, milliseconds: float) -> None:
        """Record a lookup."""
        self._lookups.observe(milliseconds)

    def used(self, held: int, blocks: int, beyond: int) -> None:
        """Record a placed request."""
        if blocks:
            self._rate.observe(min(1.0, held / blocks))
        self._beyond.observe(beyond)


class SyncMetrics:
    """Numbers of events sent, received and unreadable."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        prefix = "dynamo_router_replica_sync_"
        self.sent = registry.counter(prefix + "events_sent_total", "Request events sent to other routers").labels()
        self.received = registry.counter(
            prefix + "events_received_total", "Request events received from other routers"
        ).labels()
        self.unreadable = registry.counter(
            prefix + "unreadable_total", "Unreadable messages from other routers"
        ).labels()
        self._worker: dict[str, str] = {}

    def follow_topic(self, topic: Topic, worker: dict[str, str]) -> None:
        """Read upstream's metrics of the subscription from it; `worker` are the values of `WORKER_LABELS`."""
        self._worker, registry = worker, self._registry
        prefix = "dynamo_component_router_active_sequence_zmq_ingress_"
        registry.counter(prefix + "sequence_gaps_total", "Lost messages from other routers", WORKER_LABELS).labels(
            **worker
        ).follow(lambda: topic.missed)
        registry.counter(
            prefix + "payload_decode_errors_total", "Unreadable messages from other routers", WORKER_LABELS
        ).labels(**worker).follow(lambda: self.unreadable.value)
        registry.gauge(prefix + "sources", "Routers from which messages arrived", WORKER_LABELS).labels(
            **worker
        ).follow(lambda: topic.senders)

    def set_model(self, model: str, worker_type: str, messages: Callable[[], int]) -> None:
        """Create the series of a model; `messages` returns the number of received messages."""
        prefix, registry = "dynamo_component_router_active_sequence_ingress_", self._registry
        names = (*WORKER_LABELS, "model", "routing_group", "worker_type")
        labels = {**self._worker, "model": model, "routing_group": "default", "worker_type": worker_type}
        registry.counter(prefix + "events_applied_total", "Request events of other routers applied", names).labels(
            **labels
        ).follow(lambda: self.received.value)
        registry.counter(prefix + "drain_batches_total", "Messages of other routers applied", names).labels(
            **labels
        ).follow(messages)


class AffinitySyncMetrics:
    """Numbers of bindings sent, received and unreadable."""

    def __init__(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_router_affinity_sync_"
        self.sent = registry.counter(prefix + "bindings_sent_total", "Session bindings sent to other routers").labels()
        self.received = registry.counter(
            prefix + "bindings_received_total", "Session bindings received from other routers"
        ).labels()
        self.unreadable = registry.counter(
            prefix + "unreadable_total", "Unreadable session bindings from other routers"
        ).labels()
