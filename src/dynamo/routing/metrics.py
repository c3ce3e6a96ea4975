"""Metrics of KV routers: decisions, shared cache, and messages between replicas."""

from typing import Any

from dynamo.core.metrics import MetricsRegistry, log_buckets
from dynamo.kv_router.decision import Decision
from dynamo.protocols.discovery import EndpointId


class KvRouterMetrics:
    """Durations and results of the decisions for one worker set."""

    def __init__(self, registry: MetricsRegistry, router_id: str, endpoint: EndpointId) -> None:
        buckets = log_buckets(0.01, 100.0, 16)

        def overhead(name: str, what: str) -> Any:
            family = registry.histogram(f"dynamo_router_overhead_{name}_ms", what, ("router_id",), buckets)
            return family.labels(router_id=router_id)

        self._hashing = overhead("block_hashing", "Time to hash a prompt's blocks, in milliseconds")
        self._scheduling = overhead("scheduling", "Time to look up, score, choose and book, in milliseconds")
        self._total = overhead("total", "Total time of a routing decision, in milliseconds")
        self._hit_rate = registry.histogram(
            "dynamo_component_router_kv_hit_rate",
            "Fraction of a prompt's blocks that are cached on the chosen worker",
            ("router_id",),
            tuple(step / 10 for step in range(11)),
        ).labels(router_id=router_id)
        self._requests = registry.counter(
            "dynamo_component_router_requests_total", "Requests placed on a worker", ("router_id",)
        ).labels(router_id=router_id)
        self._lost = registry.histogram(
            "dynamo_component_router_overlap_blocks_lost",
            "Cached prompt blocks of the best worker beyond those of the chosen one",
            ("router_id", "worker_type"),
            (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0),
        ).labels(router_id=router_id, worker_type="aggregated")
        self.silent_workers = registry.gauge(
            "dynamo_component_router_kv_event_source_mismatch_workers",
            "Workers that publish no KV events although events are expected",
            ("target_component", "target_endpoint", "target_namespace"),
        ).labels(
            target_component=endpoint.component, target_endpoint=endpoint.name, target_namespace=endpoint.namespace
        )

    def decided(self, decision: Decision, hashing_s: float, scheduling_s: float) -> None:
        """Record a decision that was made without waiting."""
        self._hashing.observe(hashing_s * 1e3)
        self._scheduling.observe(scheduling_s * 1e3)
        self._total.observe((hashing_s + scheduling_s) * 1e3)
        self._requests.inc()
        if decision.blocks:
            self._hit_rate.observe(decision.overlap_blocks / decision.blocks)
            most = max(decision.snapshot.prompt.device.values(), default=0)
            self._lost.observe(max(0, most - decision.device_blocks))


class SharedCacheMetrics:
    """Lookup times and hit rates of a shared cache."""

    def __init__(self, registry: MetricsRegistry, router_id: str) -> None:
        def family(make: Any, name: str, what: str, *more: Any) -> Any:
            return make(name, what, ("router_id",), *more).labels(router_id=router_id)

        self._lookups = family(
            registry.histogram,
            "dynamo_router_overhead_shared_cache_query_ms",
            "Time of a shared cache lookup, in milliseconds",
            log_buckets(0.01, 100.0, 16),
        )
        self.errors = family(
            registry.counter,
            "dynamo_router_shared_cache_errors_total",
            "Messages of a shared cache that were unreadable or lost",
        )
        self._rate = family(
            registry.histogram,
            "dynamo_component_router_shared_cache_hit_rate",
            "Fraction of a prompt's blocks in a shared cache",
            tuple(step / 10 for step in range(11)),
        )
        self._beyond = family(
            registry.histogram,
            "dynamo_component_router_shared_cache_beyond_blocks",
            "Blocks in a shared cache that are not cached on the chosen worker",
            (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0),
        )

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
        prefix = "dynamo_router_replica_sync_"
        self.sent = registry.counter(prefix + "events_sent_total", "Request events sent to other routers").labels()
        self.received = registry.counter(
            prefix + "events_received_total", "Request events received from other routers"
        ).labels()
        self.unreadable = registry.counter(
            prefix + "unreadable_total", "Unreadable messages from other routers"
        ).labels()


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
