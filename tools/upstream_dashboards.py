"""Metrics and labels that the queries of upstream's public dashboards name, and those of them that we do not emit.

    python -m tools.upstream_dashboards

The dashboards are those of upstream's repository (`deploy/observability`, `dev/observability`). `REASONS` explains each difference;
tests require that there are no others, and that no reason is outdated.
"""

import sys

from tools.metrics_page import Metric, recorded

FRONTEND, COMPONENT, PLANNER, OPERATOR = "dynamo_frontend_", "dynamo_component_", "dynamo_planner_", "dynamo_operator_"
ROUTER, KVBM, FAILOVER = "dynamo_router_overhead_", "kvbm_", f"{COMPONENT}engine_failover_"
HISTOGRAMS = (
    "input_sequence_tokens",
    "output_sequence_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
)
"""Histograms of the frontend that several dashboards show."""
OVERHEADS = ("block_hashing", "indexer_find_matches", "seq_hashing", "scheduling", "total")

DASHBOARDS: dict[str, dict[str, tuple[str, ...]]] = {
    "dynamo": {
        f"{FRONTEND}requests_total": ("model", "error_type", "status"),
        **{f"{FRONTEND}{name}": ("model",) for name in (*HISTOGRAMS, "request_duration_seconds", "cached_tokens")},
        f"{FRONTEND}active_requests": ("model",),
        f"{FRONTEND}queued_requests": ("model",),
        f"{FRONTEND}worker_active_decode_blocks": ("worker_id", "dp_rank", "worker_type"),
        f"{FRONTEND}worker_active_prefill_tokens": ("worker_id", "dp_rank", "worker_type"),
        f"{COMPONENT}router_kv_hit_rate": (),
        **{f"{ROUTER}{name}_ms": () for name in OVERHEADS},
        f"{COMPONENT}kv_cache_events_applied": ("event_type", "status"),
        f"{COMPONENT}requests_total": ("model",),
        f"{COMPONENT}cancellation_total": ("model",),
        f"{COMPONENT}errors_total": ("model", "error_type"),
        f"{COMPONENT}request_duration_seconds": ("model",),
        f"{COMPONENT}request_bytes_total": ("model", "dynamo_endpoint"),
        f"{COMPONENT}response_bytes_total": ("model", "dynamo_endpoint"),
    },
    "disagg": {
        f"{FRONTEND}requests_total": (),
        **{f"{FRONTEND}{name}": () for name in (*HISTOGRAMS, "request_duration_seconds")},
        f"{FRONTEND}stage_requests": ("stage",),
        f"{COMPONENT}request_duration_seconds": ("dynamo_component", "dynamo_endpoint"),
        f"{COMPONENT}requests_total": ("dynamo_component", "dynamo_endpoint"),
        f"{COMPONENT}gpu_cache_usage_percent": ("dynamo_component",),
        f"{COMPONENT}total_blocks": ("dynamo_component",),
        f"{COMPONENT}request_bytes_total": ("dynamo_endpoint",),
        f"{COMPONENT}response_bytes_total": ("dynamo_endpoint",),
    },
    "kvbm": {
        f"{KVBM}{name}": ()
        for name in (
            "host_cache_hit_rate",
            "disk_cache_hit_rate",
            "matched_tokens",
            "offload_blocks_d2h",
            "offload_blocks_h2d",
            "offload_blocks_d2d",
            "onboard_blocks_h2d",
            "onboard_blocks_d2d",
        )
    },
    "planner": {
        f"{PLANNER}{name}": ()
        for name in (
            "num_prefill_replicas",
            "num_decode_replicas",
            "gpu_hours",
            "observed_ttft_ms",
            "observed_itl_ms",
            "observed_requests_per_second",
            "observed_request_duration_seconds",
            "observed_input_sequence_tokens",
            "observed_output_sequence_tokens",
            "predicted_requests_per_second",
            "predicted_input_sequence_tokens",
            "predicted_output_sequence_tokens",
            "predicted_num_prefill_replicas",
            "predicted_num_decode_replicas",
            "sla_target_ttft_ms",
            "sla_target_itl_ms",
        )
    },
    "operator": {
        f"{OPERATOR}reconcile_total": ("resource_type", "namespace", "result"),
        f"{OPERATOR}reconcile_duration_seconds": ("resource_type", "namespace"),
        f"{OPERATOR}reconcile_errors_total": ("resource_type", "namespace", "error_type"),
        f"{OPERATOR}webhook_requests_total": ("resource_type", "operation", "result"),
        f"{OPERATOR}webhook_duration_seconds": ("resource_type",),
        f"{OPERATOR}webhook_denials_total": ("resource_type", "operation", "reason"),
        f"{OPERATOR}resources_total": ("resource_type", "status", "namespace"),
    },
    "sglang": {
        **{f"{FRONTEND}{name}": () for name in (*HISTOGRAMS, "request_duration_seconds", "cached_tokens")},
        f"{FRONTEND}requests_total": ("model", "status"),
        f"{FRONTEND}active_requests": (),
        f"{FRONTEND}output_tokens_total": (),
        f"{FRONTEND}stage_requests": ("stage",),
        f"{COMPONENT}gpu_cache_usage_percent": ("worker_id",),
        f"{COMPONENT}inflight_requests": ("dynamo_endpoint", "worker_id"),
        f"{COMPONENT}requests_total": ("dynamo_endpoint", "worker_id"),
        f"{COMPONENT}total_blocks": ("dp_rank", "model"),
        f"{COMPONENT}router_kv_hit_rate": (),
        "dynamo_request_plane_roundtrip_ttft_seconds": (),
        **{f"{ROUTER}{name}_ms": () for name in OVERHEADS},
        "dynamo_tokio_worker_busy_ratio": ("worker",),
    },
    "failover": {
        f"{FAILOVER}state": ("state",),
        f"{FAILOVER}state_entered_timestamp_seconds": (),
        f"{FAILOVER}switch_attempts_total": (),
        f"{FAILOVER}switch_success_total": (),
        f"{FAILOVER}transitions_total": (),
    },
}
"""Metric families of each dashboard, and the labels that its queries select or group by.

Labels that a scraper adds are left out, and the metrics of engines (`sglang:…`), which workers pass on unchanged. Dashboards of
GPUs and of the machine show other exporters' metrics only.
"""

OF_ENGINES = "added to the series of engines that set it (`metrics_labels`), as upstream's"
LATER = "later than release 1.6.1: standby engines that take over a failed one's GPU memory"
REASONS = {
    **{
        f"{COMPONENT}{name} model": OF_ENGINES
        for name in (
            "requests_total",
            "cancellation_total",
            "errors_total",
            "request_duration_seconds",
            "request_bytes_total",
            "response_bytes_total",
        )
    },
    "dynamo_tokio_worker_busy_ratio": "threads of upstream's runtime; the event loop's delay is dynamo_frontend_event_loop_delay_seconds",
    **dict.fromkeys(DASHBOARDS["failover"], LATER),
}
"""Reason of each difference: a metric, or a metric and a label."""


def main() -> int:
    """Print the differences."""
    for dashboard in DASHBOARDS:
        for difference in differences(dashboard):
            print(f"{dashboard}: {difference}: {REASONS.get(difference, 'no reason known')}")
    return 0


def differences(dashboard: str) -> list[str]:
    """Return the metrics of a dashboard that we do not declare, and labels that ours lack, as `metric label`."""
    declared: dict[str, Metric] = {one.name: one for one in recorded()[0]}
    found = []
    for name, labels in DASHBOARDS[dashboard].items():
        ours = declared.get(name)
        if ours is None:
            found.append(name)
        else:
            found += [f"{name} {label}" for label in labels if label not in ours.labels]
    return found


if __name__ == "__main__":
    sys.exit(main())
