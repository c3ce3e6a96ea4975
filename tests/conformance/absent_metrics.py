"""Metrics of the released frontend that ours does not have, each by its whole name, with the reason."""

ABSENT = {
    # There is no tokio: `dynamo_frontend_event_loop_*` report the event loop.
    "dynamo_tokio_alive_tasks",
    "dynamo_tokio_blocking_idle_threads",
    "dynamo_tokio_blocking_queue_depth",
    "dynamo_tokio_blocking_threads",
    "dynamo_tokio_budget_forced_yield",
    "dynamo_tokio_global_queue_depth",
    "dynamo_tokio_queue_overload_warnings",
    "dynamo_tokio_worker_busy_ratio",
    "dynamo_tokio_worker_local_queue_depth",
    "dynamo_tokio_worker_mean_poll_time_ns",
    "dynamo_tokio_worker_overflow_count",
    "dynamo_tokio_worker_park_count",
    "dynamo_tokio_worker_steal_count",
    # Only registered with `--shared-cache-type hicache`.
    "dynamo_component_router_shared_cache_beyond_blocks",
    "dynamo_component_router_shared_cache_hit_rate",
    "dynamo_router_overhead_shared_cache_query_ms",
    "dynamo_router_shared_cache_errors",
    # Not measured by our KV router yet.
    "dynamo_component_router_input_sequence_tokens",
    "dynamo_component_router_inter_token_latency_seconds",
    "dynamo_component_router_kv_transfer_estimated_latency_seconds",
    "dynamo_component_router_non_max_overlap_selections",
    "dynamo_component_router_output_sequence_tokens",
    "dynamo_component_router_requests_started",
    "dynamo_component_router_time_to_first_token_seconds",
    "dynamo_router_overhead_indexer_find_matches_ms",
    "dynamo_router_overhead_seq_hashing_ms",
    "dynamo_frontend_detokenize_total_us",  # Timing every token would cost more than detokenizing it.
    "dynamo_frontend_image_tokens_per_request",  # No engine reports it.
    "dynamo_frontend_tokenizer_cache_cached_tokens",  # The cache is keyed by words, not by prefixes.
    "dynamo_frontend_tokenizer_cache_uncached_tokens",
    "dynamo_transport_tcp_accept_backoff",  # asyncio accepts connections, and does not report when it waits.
}
"""In every router mode."""

ABSENT_WITHOUT_KV_ROUTER = {
    # Not measured by our KV router yet.
    "dynamo_component_router_kv_hit_rate",
    "dynamo_component_router_overlap_blocks_lost",
    "dynamo_component_router_requests",
    "dynamo_router_overhead_block_hashing_ms",
    "dynamo_router_overhead_scheduling_ms",
    "dynamo_router_overhead_total_ms",
}
"""Registered by our frontend with `--router-mode kv` only."""

ABSENT_WITH_KV_ROUTER = {
    # Replica sync has no metrics yet.
    "dynamo_component_router_active_sequence_ingress_drain_batches",
    "dynamo_component_router_active_sequence_ingress_events_applied",
    "dynamo_component_router_active_sequence_ingress_queue_depth",
    "dynamo_component_router_active_sequence_zmq_ingress_dropped_events",
    "dynamo_component_router_active_sequence_zmq_ingress_envelope_decode_errors",
    "dynamo_component_router_active_sequence_zmq_ingress_forced_aborts",
    "dynamo_component_router_active_sequence_zmq_ingress_identity_errors",
    "dynamo_component_router_active_sequence_zmq_ingress_out_of_order",
    "dynamo_component_router_active_sequence_zmq_ingress_payload_decode_errors",
    "dynamo_component_router_active_sequence_zmq_ingress_reconnects",
    "dynamo_component_router_active_sequence_zmq_ingress_replacements",
    "dynamo_component_router_active_sequence_zmq_ingress_sequence_gaps",
    "dynamo_component_router_active_sequence_zmq_ingress_sources",
    # The approximate index has a time limit, no leases and no eviction by use.
    "dynamo_component_router_approximate_cache_configured_policy",
    "dynamo_component_router_approximate_cache_effective_policy",
    "dynamo_component_router_approximate_lru_evicted_blocks",
    "dynamo_component_router_approximate_lru_eviction_batches",
    "dynamo_component_router_approximate_lru_fallback_activations",
    "dynamo_component_router_approximate_lru_leases",
    "dynamo_component_router_approximate_lru_messages_per_request",
    "dynamo_component_router_approximate_lru_mutation_queue_depth",
    "dynamo_component_router_approximate_lru_mutation_wait_seconds",
    "dynamo_component_router_approximate_lru_output_batches",
    # Gaps and recoveries of KV events are counted by `dynamo_router_kv_event_gaps` and its siblings.
    "dynamo_component_router_kv_zmq_ingress_batches",
    "dynamo_component_router_kv_zmq_ingress_lifecycle",
    "dynamo_component_router_kv_zmq_ingress_sources",
    # Not measured by our KV router yet.
    "dynamo_component_ckf_mutation",
    "dynamo_component_kv_cache_event_warnings",
    "dynamo_component_router_kv_best_eligible_cached_prefix_tokens",
    "dynamo_component_router_kv_selected_cached_prefix_tokens",
    "dynamo_component_router_kv_worker_reused_tokens",
    "dynamo_component_router_worker_registered",
    "dynamo_frontend_router_admission_received",
    "dynamo_frontend_router_admission_rejected",
    "dynamo_frontend_router_queue_backpressure",
    "dynamo_frontend_router_queue_pending_cached_tokens",
    "dynamo_frontend_router_queue_pending_isl_tokens",
    "dynamo_frontend_router_queue_pending_requests",
    "dynamo_frontend_worker_active_decode_blocks",
    "dynamo_frontend_worker_active_prefill_tokens",
}
"""Registered by the released frontend with `--router-mode kv` only."""
