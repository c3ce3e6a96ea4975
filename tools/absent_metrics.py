"""Metrics of the released frontend that ours does not have, each by its whole name, with the reason.

The page of all metrics lists them; a conformance test requires that nothing else is missing.
"""

TOKIO = "There is no tokio; `dynamo_frontend_event_loop_*` report the event loop."
PLANE = "The event plane of ours reconnects and decodes for all topics of the process; gaps and unreadable payloads are counted."
FIFO = "Predicted caches are updated in place: there is no queue of mutations."

ABSENT = {
    **{
        f"dynamo_tokio_{name}": TOKIO
        for name in (
            "alive_tasks",
            "blocking_idle_threads",
            "blocking_queue_depth",
            "blocking_threads",
            "budget_forced_yield",
            "global_queue_depth",
            "queue_overload_warnings",
            "worker_busy_ratio",
            "worker_local_queue_depth",
            "worker_mean_poll_time_ns",
            "worker_overflow_count",
            "worker_park_count",
            "worker_steal_count",
        )
    },
    "dynamo_frontend_detokenize_total_us": "Timing every token would cost more than detokenizing it.",
    "dynamo_frontend_image_tokens_per_request": "No engine reports it.",
    "dynamo_frontend_tokenizer_cache_cached_tokens": "The tokenizer's cache is keyed by words, not by prefixes.",
    "dynamo_frontend_tokenizer_cache_uncached_tokens": "The tokenizer's cache is keyed by words, not by prefixes.",
    "dynamo_transport_tcp_accept_backoff": "asyncio accepts connections, and does not report when it waits.",
}
"""In every router mode."""

KV_ONLY = "A frontend without a KV router makes no such decision; with `--router-mode kv` it is reported."

ABSENT_WITHOUT_KV_ROUTER = {
    **{
        f"dynamo_router_overhead_{name}_ms": KV_ONLY
        for name in (
            "block_hashing",
            "indexer_find_matches",
            "scheduling",
            "seq_hashing",
            "shared_cache_query",
            "total",
        )
    },
    "dynamo_component_router_kv_hit_rate": KV_ONLY,
    "dynamo_component_router_non_max_overlap_selections": KV_ONLY,
    "dynamo_component_router_overlap_blocks_lost": KV_ONLY,
    "dynamo_component_router_shared_cache_beyond_blocks": KV_ONLY,
    "dynamo_component_router_shared_cache_hit_rate": KV_ONLY,
    "dynamo_router_shared_cache_errors": KV_ONLY,
}
"""Registered by our frontend with `--router-mode kv` only."""

ABSENT_WITH_KV_ROUTER = {
    **{
        f"dynamo_component_router_active_sequence_zmq_ingress_{name}": PLANE
        for name in (
            "dropped_events",
            "envelope_decode_errors",
            "forced_aborts",
            "identity_errors",
            "out_of_order",
            "reconnects",
            "replacements",
        )
    },
    "dynamo_component_router_active_sequence_ingress_queue_depth": "Events of other routers are applied as they arrive.",
    **{
        f"dynamo_component_router_approximate_lru_{name}": FIFO
        for name in (
            "eviction_batches",
            "fallback_activations",
            "leases",
            "messages_per_request",
            "mutation_queue_depth",
            "mutation_wait_seconds",
            "output_batches",
        )
    },
    "dynamo_component_ckf_mutation": "The index has no cuckoo filter.",
    "dynamo_component_kv_cache_event_warnings": "The index does not distinguish a block that is stored twice.",
}
"""With `--router-mode kv`."""

ABSENT_WITHOUT_REPLICA_SYNC = {
    f"dynamo_component_router_active_sequence_{name}": "Registered by our frontend with `--router-replica-sync` only."
    for name in (
        "ingress_drain_batches",
        "ingress_events_applied",
        "zmq_ingress_payload_decode_errors",
        "zmq_ingress_sequence_gaps",
        "zmq_ingress_sources",
    )
}
"""With `--router-mode kv`, without replica synchronization."""
