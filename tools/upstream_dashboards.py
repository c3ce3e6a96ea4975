"""Metrics and labels that the queries of upstream's public dashboards name, and those of them that we do not emit.

    python -m tools.upstream_dashboards

The dashboards are those of upstream's repository (`deploy/observability`, `dev/observability`); some are older than the release whose
metrics they show. `REASONS` explains each difference; a test requires that there are no others.
"""

import sys

from tools.metrics_page import Metric, recorded

FRONTEND, COMPONENT, PLANNER, OPERATOR = "dynamo_frontend_", "dynamo_component_", "dynamo_planner_", "dynamo_operator_"

DASHBOARDS: dict[str, dict[str, tuple[str, ...]]] = {
    "dynamo": {
        f"{FRONTEND}requests_total": ("model", "error_type", "status"),
        f"{FRONTEND}input_sequence_tokens": ("model",),
        f"{FRONTEND}output_sequence_tokens": ("model",),
        f"{FRONTEND}time_to_first_token_seconds": ("model",),
        f"{FRONTEND}inter_token_latency_seconds": ("model",),
        f"{FRONTEND}request_duration_seconds": ("model",),
        f"{FRONTEND}active_requests": ("model",),
        f"{FRONTEND}stage_requests": ("stage", "model"),
        f"{FRONTEND}cached_tokens": ("model",),
        f"{FRONTEND}worker_active_decode_blocks": ("worker_id", "dp_rank", "worker_type"),
        f"{FRONTEND}worker_active_prefill_tokens": ("worker_id", "dp_rank", "worker_type"),
        f"{COMPONENT}router_kv_hit_rate": (),
        "dynamo_router_overhead_block_hashing_ms": (),
        "dynamo_router_overhead_indexer_find_matches_ms": (),
        "dynamo_router_overhead_seq_hashing_ms": (),
        "dynamo_router_overhead_scheduling_ms": (),
        "dynamo_router_overhead_total_ms": (),
        f"{COMPONENT}kv_cache_events_applied": ("event_type", "status"),
        f"{COMPONENT}requests_total": ("model",),
        f"{COMPONENT}cancellation_total": ("model",),
        f"{COMPONENT}errors_total": ("model", "error_type"),
        f"{COMPONENT}request_duration_seconds": ("model",),
    },
    "disagg": {
        f"{FRONTEND}requests_total": ("request_type", "status"),
        f"{FRONTEND}time_to_first_token_seconds": ("model",),
        f"{FRONTEND}request_duration_seconds": ("model",),
        f"{FRONTEND}inter_token_latency_seconds": ("model",),
        f"{FRONTEND}input_sequence_tokens": (),
        f"{FRONTEND}output_sequence_tokens": (),
        f"{FRONTEND}queued_requests": ("model",),
        f"{COMPONENT}request_duration_seconds": ("dynamo_component", "dynamo_endpoint"),
        f"{COMPONENT}requests_total": ("dynamo_component", "dynamo_endpoint"),
        f"{COMPONENT}gpu_cache_usage_percent": ("dynamo_component",),
        f"{COMPONENT}total_blocks": ("dynamo_component",),
        f"{COMPONENT}request_bytes_total": ("dynamo_component",),
        f"{COMPONENT}response_bytes_total": ("dynamo_component",),
    },
    "kvbm": {
        "dynamo_kvbm_host_cache_hit_rate": (),
        "dynamo_kvbm_disk_cache_hit_rate": (),
        "dynamo_kvbm_matched_tokens": (),
        "dynamo_kvbm_offload_blocks_d2h": (),
        "dynamo_kvbm_offload_blocks_h2d": (),
        "dynamo_kvbm_offload_blocks_d2d": (),
        "dynamo_kvbm_onboard_blocks_h2d": (),
        "dynamo_kvbm_onboard_blocks_d2d": (),
    },
    "planner": {
        f"{PLANNER}num_prefill_workers": (),
        f"{PLANNER}num_decode_workers": (),
        f"{PLANNER}gpu_hours": (),
        f"{PLANNER}observed_ttft_ms": (),
        f"{PLANNER}observed_itl_ms": (),
        f"{PLANNER}observed_requests_per_second": (),
        f"{PLANNER}observed_request_duration_seconds": (),
        f"{PLANNER}observed_isl": (),
        f"{PLANNER}observed_osl": (),
        f"{PLANNER}predicted_requests_per_second": (),
        f"{PLANNER}predicted_isl": (),
        f"{PLANNER}predicted_osl": (),
        f"{PLANNER}predicted_num_prefill_replicas": (),
        f"{PLANNER}predicted_num_decode_replicas": (),
        f"{PLANNER}p_correction_factor": (),
        f"{PLANNER}d_correction_factor": (),
    },
    "operator": {
        f"{OPERATOR}reconcile_total": ("resource_type", "result"),
        f"{OPERATOR}reconcile_duration_seconds": ("resource_type",),
        f"{OPERATOR}reconcile_errors_total": ("resource_type", "error_type"),
        f"{OPERATOR}webhook_requests_total": ("resource_type", "operation", "result"),
        f"{OPERATOR}webhook_duration_seconds": ("resource_type",),
        f"{OPERATOR}webhook_denials_total": ("resource_type", "operation", "reason"),
        f"{OPERATOR}resources_total": ("resource_type", "status", "namespace"),
    },
}
"""Metric families of each dashboard, and the labels that its queries select or group by. Labels that a scraper adds are left out."""

OLDER = "name of an older release; upstream 1.6.1 does not emit it either: "
MISSING = "emitted by upstream 1.6.1, not by us yet"
PART = "label of upstream's operator, not of ours yet: its series have no such label, and panels that select a value are empty"
REASONS = {
    f"{FRONTEND}stage_requests model": "upstream 1.6.1 has the labels phase and stage only: its panel is empty too",
    f"{FRONTEND}worker_active_decode_blocks": MISSING,
    f"{FRONTEND}worker_active_prefill_tokens": MISSING,
    "dynamo_router_overhead_indexer_find_matches_ms": MISSING,
    "dynamo_router_overhead_seq_hashing_ms": MISSING,
    f"{COMPONENT}requests_total model": "added to the series of engines that set it (`metrics_labels`), as upstream's",
    f"{COMPONENT}cancellation_total model": "added to the series of engines that set it (`metrics_labels`), as upstream's",
    f"{COMPONENT}errors_total model": "added to the series of engines that set it (`metrics_labels`), as upstream's",
    f"{COMPONENT}request_duration_seconds model": "added to the series of engines that set it (`metrics_labels`), as upstream's",
    **dict.fromkeys(DASHBOARDS["kvbm"], "prefix of the dashboard; ours emits kvbm_…"),
    f"{PLANNER}num_prefill_workers": OLDER + "num_prefill_replicas",
    f"{PLANNER}num_decode_workers": OLDER + "num_decode_replicas",
    f"{PLANNER}observed_isl": OLDER + "observed_input_sequence_tokens",
    f"{PLANNER}observed_osl": OLDER + "observed_output_sequence_tokens",
    f"{PLANNER}predicted_isl": OLDER + "predicted_input_sequence_tokens",
    f"{PLANNER}predicted_osl": OLDER + "predicted_output_sequence_tokens",
    f"{PLANNER}p_correction_factor": OLDER + "correction factors were removed",
    f"{PLANNER}d_correction_factor": OLDER + "correction factors were removed",
    f"{OPERATOR}webhook_requests_total operation": PART,
    f"{OPERATOR}webhook_requests_total result": PART,
    f"{OPERATOR}webhook_duration_seconds resource_type": PART,
    f"{OPERATOR}webhook_denials_total operation": PART,
    f"{OPERATOR}webhook_denials_total reason": PART,
    f"{OPERATOR}resources_total namespace": PART,
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
