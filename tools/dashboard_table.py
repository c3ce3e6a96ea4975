"""Table of Grafana dashboards: every panel with its queries. `tools.dashboards` writes it as JSON.

A query names metrics of `docs/reference/metrics.md`; `$model`, `$worker` and `$namespace` are variables of the dashboard. A panel about a
situation that need not exist, such as migrations, is `optional`: its query may return nothing.
"""

from dataclasses import dataclass

RATE = "[$__rate_interval]"
MODEL = '{model=~"$model"}'


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    optional: bool = False
    """Whether its queries return nothing in a normal situation, or need a component that a graph may lack."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A selection at the top of a dashboard."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard."""

    name: str
    """Name of its file, and the end of its uid."""
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()


def quantiles(
    metric: str, selector: str = "", by: str = "", shares: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """Return queries of percentiles of a histogram, by further labels."""
    labels = f"le, {by}" if by else "le"
    prefix = f"{{{{{by}}}}} " if by else ""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{selector}{RATE})))",
            f"{prefix}p{share * 100:g}",
        )
        for share in shares
    )


def mean(metric: str, selector: str = "", by: str = "", legend: str = "mean") -> Query:
    """Return the query of a histogram's mean."""
    total, count = (_sum(f"rate({metric}_{part}{selector}{RATE})", by) for part in ("sum", "count"))
    return Query(f"{total} / {count}", legend)


def rate(metric: str, selector: str = "", by: str = "", legend: str = "") -> Query:
    """Return the query of a counter's increase per second."""
    return Query(_sum(f"rate({metric}{selector}{RATE})", by), legend or _legend(by))


def level(metric: str, selector: str = "", by: str = "", legend: str = "", operation: str = "sum") -> Query:
    """Return the query of a gauge."""
    return Query(_sum(f"{metric}{selector}", by, operation), legend or _legend(by))


def _sum(inner: str, by: str, operation: str = "sum") -> str:
    return f"{operation} by ({by}) ({inner})" if by else f"{operation}({inner})"


def _legend(by: str) -> str:
    return " ".join(f"{{{{{name.strip()}}}}}" for name in by.split(",")) if by else "total"


def panel(title: str, *queries: Query, **more: object) -> Panel:
    """Return a panel of these queries."""
    return Panel(title, queries, **more)  # type: ignore[arg-type]


MODELS = Variable("model", "Model", "label_values(dynamo_frontend_requests_started_total, model)")
FRONTEND = "dynamo_frontend"
GENERATE = '{dynamo_endpoint="generate"}'
PREFILL, DECODE = (f'{{dynamo_component="{name}", dynamo_endpoint="generate"}}' for name in ("prefill", "backend"))

OVERVIEW = Dashboard(
    "overview",
    "Dynamo / Overview",
    "Requests, tokens, latencies and load of frontends and workers",
    (
        Row(
            "Now",
            (
                panel(
                    "Requests per second", rate(f"{FRONTEND}_requests_total", MODEL), kind="stat", unit="reqps", width=4
                ),
                panel(
                    "Requests that succeed",
                    Query(
                        f'sum(rate({FRONTEND}_requests_total{{model=~"$model", status="success"}}{RATE})) / sum(rate({FRONTEND}_requests_total{MODEL}{RATE}))',
                        "success",
                    ),
                    kind="stat",
                    unit="percentunit",
                    width=4,
                ),
                panel(
                    "Output tokens per second",
                    rate(f"{FRONTEND}_output_tokens_total", MODEL),
                    kind="stat",
                    unit="short",
                    width=4,
                ),
                panel(
                    "TTFT p95",
                    *quantiles(f"{FRONTEND}_time_to_first_token_seconds", MODEL, shares=(0.95,)),
                    kind="stat",
                    unit="s",
                    width=4,
                ),
                panel(
                    "ITL p95",
                    *quantiles(f"{FRONTEND}_inter_token_latency_seconds", MODEL, shares=(0.95,)),
                    kind="stat",
                    unit="s",
                    width=4,
                ),
                panel(
                    "Models ready",
                    level(f"{FRONTEND}_model_ready", MODEL, operation="count", legend="models"),
                    kind="stat",
                    width=4,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                panel("Requests by model", rate(f"{FRONTEND}_requests_total", MODEL, "model"), unit="reqps"),
                panel(
                    "Failures by type",
                    rate(f"{FRONTEND}_requests_total", '{model=~"$model", status="error"}', "error_type"),
                    unit="reqps",
                    optional=True,
                ),
                panel(
                    "Requests in flight",
                    level(f"{FRONTEND}_inflight_requests", MODEL, legend="in flight"),
                    level(f"{FRONTEND}_queued_requests", MODEL, legend="without a first token"),
                ),
                panel("Time to first token", *quantiles(f"{FRONTEND}_time_to_first_token_seconds", MODEL), unit="s"),
                panel("Inter-token latency", *quantiles(f"{FRONTEND}_inter_token_latency_seconds", MODEL), unit="s"),
                panel("Request duration", *quantiles(f"{FRONTEND}_request_duration_seconds", MODEL), unit="s"),
                panel(
                    "Stages, mean",
                    mean(f"{FRONTEND}_stage_duration_seconds", by="stage", legend="{{stage}}"),
                    unit="s",
                    description="Mean time of each stage of a request in the frontend",
                ),
                panel(
                    "Prompt and output tokens of a request",
                    mean(f"{FRONTEND}_input_sequence_tokens", MODEL, legend="prompt"),
                    mean(f"{FRONTEND}_output_sequence_tokens", MODEL, legend="output"),
                ),
                panel(
                    "Cached prompt tokens",
                    Query(
                        f"sum(rate({FRONTEND}_cached_tokens_sum{MODEL}{RATE})) / sum(rate({FRONTEND}_input_sequence_tokens_sum{MODEL}{RATE}))",
                        "share",
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "Reliability",
            (
                panel(
                    "Migrations",
                    rate(f"{FRONTEND}_model_migration_total", MODEL, "model, migration_type"),
                    optional=True,
                    unit="ops",
                ),
                panel(
                    "Rejections", rate(f"{FRONTEND}_model_rejection_total", MODEL, "model"), optional=True, unit="reqps"
                ),
                panel(
                    "Cancellations",
                    rate(f"{FRONTEND}_model_cancellation_total", MODEL, "model"),
                    optional=True,
                    unit="reqps",
                ),
                panel(
                    "Event loop of the frontend",
                    *quantiles(f"{FRONTEND}_event_loop_delay_seconds", shares=(0.5, 0.99)),
                    unit="s",
                    description="Delay of a timer; stalls delay tokens and health checks",
                ),
                panel("Event loop stalls", rate(f"{FRONTEND}_event_loop_stall_total", by="instance"), unit="ops"),
                panel("Open connections", level(f"{FRONTEND}_http_connections", by="instance")),
            ),
        ),
        Row(
            "Workers",
            (
                panel(
                    "Requests of each worker",
                    rate("dynamo_component_requests_total", GENERATE, "dynamo_component, worker_id"),
                    unit="reqps",
                ),
                panel(
                    "In flight at each worker",
                    level("dynamo_component_inflight_requests", GENERATE, "dynamo_component, worker_id"),
                ),
                panel(
                    "KV blocks in use",
                    level("dynamo_component_gpu_cache_usage_percent", by="worker_id, dp_rank"),
                    unit="percentunit",
                ),
            ),
        ),
    ),
    (MODELS,),
)

DISAGGREGATION = Dashboard(
    "disaggregation",
    "Dynamo / Disaggregation",
    "Prefill and decode workers, and the transfer of KV blocks between them",
    (
        Row(
            "Prefill",
            (
                panel(
                    "Prefills per second", rate("dynamo_component_requests_total", PREFILL, "worker_id"), unit="reqps"
                ),
                panel("Prefill duration", *quantiles("dynamo_component_request_duration_seconds", PREFILL), unit="s"),
                panel("Prefills in flight", level("dynamo_component_inflight_requests", PREFILL, "worker_id")),
            ),
        ),
        Row(
            "Decode",
            (
                panel("Decodes per second", rate("dynamo_component_requests_total", DECODE, "worker_id"), unit="reqps"),
                panel("Decode duration", *quantiles("dynamo_component_request_duration_seconds", DECODE), unit="s"),
                panel(
                    "KV blocks in use",
                    level(
                        "dynamo_component_gpu_cache_usage_percent", '{dynamo_component="backend"}', "worker_id, dp_rank"
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "Transfer",
            (
                panel(
                    "From prefill to first token",
                    *quantiles("dynamo_component_router_kv_transfer_estimated_latency_seconds"),
                    unit="s",
                    description="Time from the end of a prefill to the first token of its decode: an upper bound of the transfer",
                ),
                panel(
                    "KV bytes fetched",
                    rate("dynamo_component_kv_fetched_bytes_total", by="model, transport"),
                    unit="Bps",
                    optional=True,
                ),
                panel(
                    "Fetches by outcome",
                    rate("dynamo_component_kv_fetches_total", by="transport, outcome"),
                    unit="ops",
                    optional=True,
                ),
                panel(
                    "Blocks held for decode workers",
                    level("dynamo_component_kv_held_blocks", by="model"),
                    optional=True,
                ),
                panel(
                    "Prompts computed by decode workers",
                    rate("dynamo_component_local_prefills_total", by="model, reason"),
                    unit="ops",
                    optional=True,
                ),
                panel(
                    "Bytes of requests and responses",
                    rate("dynamo_component_request_bytes_total", GENERATE, legend="requests"),
                    rate("dynamo_component_response_bytes_total", GENERATE, legend="responses"),
                    unit="Bps",
                ),
            ),
        ),
    ),
)

KV_ROUTER = Dashboard(
    "kv-router",
    "Dynamo / KV router",
    "Decisions of the KV router, its cost, and the KV events that it follows",
    (
        Row(
            "Decisions",
            (
                panel(
                    "Decisions per second", rate("dynamo_component_router_requests_total", by="router_id"), unit="ops"
                ),
                panel(
                    "Cached share of prompts",
                    *quantiles("dynamo_component_router_kv_hit_rate", shares=(0.5, 0.9)),
                    mean("dynamo_component_router_kv_hit_rate"),
                    unit="percentunit",
                ),
                panel(
                    "Cached blocks given up for load",
                    mean("dynamo_component_router_overlap_blocks_lost", by="worker_type", legend="{{worker_type}}"),
                    description="Blocks cached on the best worker beyond those of the chosen one",
                ),
            ),
        ),
        Row(
            "Cost",
            (
                panel("Time of a decision", *quantiles("dynamo_router_overhead_total_ms"), unit="ms"),
                panel("Hashing", *quantiles("dynamo_router_overhead_block_hashing_ms"), unit="ms"),
                panel("Scheduling", *quantiles("dynamo_router_overhead_scheduling_ms"), unit="ms"),
            ),
        ),
        Row(
            "KV events",
            (
                panel(
                    "Events applied",
                    rate("dynamo_component_kv_cache_events_applied", by="event_type, status"),
                    unit="ops",
                ),
                panel(
                    "Gaps and recoveries",
                    rate("dynamo_router_kv_event_gaps_total", legend="gaps"),
                    rate("dynamo_router_kv_recoveries_total", legend="recoveries"),
                    rate("dynamo_router_kv_recovery_failures_total", legend="failed recoveries"),
                    unit="ops",
                ),
                panel(
                    "Workers without KV events",
                    level("dynamo_component_router_kv_event_source_mismatch_workers", by="target_component"),
                ),
                panel(
                    "Messages between routers",
                    rate("dynamo_router_replica_sync_events_sent_total", legend="sent"),
                    rate("dynamo_router_replica_sync_events_received_total", legend="received"),
                    unit="ops",
                    optional=True,
                ),
            ),
        ),
    ),
)

KVBM = Dashboard(
    "kvbm",
    "Dynamo / KV block manager",
    "Tiers below the engine's cache: hits, transfers, pools, failures",
    (
        Row(
            "Hits",
            (
                panel(
                    "Hit rate of the tiers",
                    level("kvbm_host_cache_hit_rate", legend="host", operation="avg"),
                    level("kvbm_disk_cache_hit_rate", legend="disk", operation="avg"),
                    level("kvbm_object_cache_hit_rate", legend="object store", operation="avg"),
                    unit="percentunit",
                ),
                panel("Matched tokens", rate("kvbm_matched_tokens", legend="tokens per second")),
                panel(
                    "Matched blocks",
                    rate("kvbm_match_blocks_total", by="pool", legend="{{pool}} requested"),
                    rate("kvbm_match_hits_total", by="pool", legend="{{pool}} found"),
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Transfers",
            (
                panel(
                    "Offload",
                    rate("kvbm_offload_blocks_d2h", legend="device to host"),
                    rate("kvbm_offload_blocks_h2d", legend="host to disk"),
                    rate("kvbm_offload_blocks_d2d", legend="device to disk"),
                    rate("kvbm_offload_blocks_d2o", legend="device to object store"),
                    unit="ops",
                ),
                panel(
                    "Onboard",
                    rate("kvbm_onboard_blocks_h2d", legend="host to device"),
                    rate("kvbm_onboard_blocks_d2d", legend="disk to device"),
                    rate("kvbm_onboard_blocks_o2d", legend="object store to device"),
                    rate("kvbm_onboard_blocks_p2d", legend="peer to device"),
                    unit="ops",
                ),
                panel(
                    "Object store",
                    rate("kvbm_offload_bytes_object", legend="written"),
                    rate("kvbm_onboard_bytes_object", legend="read"),
                    unit="Bps",
                ),
            ),
        ),
        Row(
            "Pools and failures",
            (
                panel(
                    "Blocks of the pools",
                    level("kvbm_inactive_pool_size", by="pool", legend="{{pool}} reusable"),
                    level("kvbm_reset_pool_size", by="pool", legend="{{pool}} free"),
                    level("kvbm_inflight", by="pool", legend="{{pool}} in use"),
                ),
                panel("Evictions", rate("kvbm_evictions_total", by="pool"), unit="ops"),
                panel(
                    "Failures",
                    rate("kvbm_disk_read_failures", legend="disk reads"),
                    rate("kvbm_disk_write_failures", legend="disk writes"),
                    rate("kvbm_object_read_failures", legend="object reads"),
                    rate("kvbm_object_write_failures", legend="object writes"),
                    rate("kvbm_onboard_timeouts", legend="onboard timeouts"),
                    rate("kvbm_offload_blocks_dropped", legend="offloads dropped"),
                    unit="ops",
                ),
            ),
        ),
    ),
)

PLANNER = Dashboard(
    "planner",
    "Dynamo / Planner",
    "Workers against demand, objectives, decisions and their plugins",
    (
        Row(
            "Workers and demand",
            (
                panel(
                    "Workers",
                    level("dynamo_planner_num_prefill_replicas", legend="prefill"),
                    level("dynamo_planner_num_decode_replicas", legend="decode"),
                    level("dynamo_planner_predicted_num_prefill_replicas", legend="prefill wanted"),
                    level("dynamo_planner_predicted_num_decode_replicas", legend="decode wanted"),
                ),
                panel(
                    "Requests per second",
                    level("dynamo_planner_observed_requests_per_second", legend="observed"),
                    level("dynamo_planner_predicted_requests_per_second", legend="predicted"),
                    unit="reqps",
                ),
                panel("GPU hours", level("dynamo_planner_gpu_hours", legend="since the start"), unit="h"),
            ),
        ),
        Row(
            "Objectives",
            (
                panel(
                    "Time to first token",
                    level("dynamo_planner_observed_ttft_ms", legend="observed"),
                    level("dynamo_planner_estimated_ttft_ms", legend="estimated"),
                    level("dynamo_planner_sla_target_ttft_ms", legend="objective", operation="max"),
                    unit="ms",
                ),
                panel(
                    "Inter-token latency",
                    level("dynamo_planner_observed_itl_ms", legend="observed"),
                    level("dynamo_planner_estimated_itl_ms", legend="estimated"),
                    level("dynamo_planner_sla_target_itl_ms", legend="objective", operation="max"),
                    unit="ms",
                ),
                panel(
                    "Tokens of a request",
                    level("dynamo_planner_observed_input_sequence_tokens", legend="prompt"),
                    level("dynamo_planner_observed_output_sequence_tokens", legend="output"),
                ),
            ),
        ),
        Row(
            "Decisions",
            (
                panel(
                    "Load reason",
                    level("dynamo_planner_load_scaling_decision", by="dynamo_planner_load_scaling_decision"),
                ),
                panel("Tick duration", *quantiles("dynamo_planner_tick_duration_seconds"), unit="s"),
                panel(
                    "Missed and late ticks",
                    rate("dynamo_planner_ticks_missed_total", legend="missed"),
                    rate("dynamo_planner_tick_timeout_total", legend="too long"),
                    unit="ops",
                ),
                panel("Failures", rate("dynamo_planner_failures_total", by="operation"), unit="ops", optional=True),
                panel(
                    "Plugins",
                    rate("dynamo_planner_plugin_evaluations_total", by="plugin_id, stage, result"),
                    unit="ops",
                    optional=True,
                ),
                panel(
                    "Queued tokens of the engines",
                    level("dynamo_planner_engine_queued_prefill_tokens", by="worker_id"),
                    optional=True,
                ),
            ),
        ),
    ),
)

OPERATOR = Dashboard(
    "operator",
    "Dynamo / Operator",
    "Reconciles, webhooks and resources of the Kubernetes operator",
    (
        Row(
            "Reconcile",
            (
                panel("Reconciles", rate("dynamo_operator_reconcile_total", by="resource_type, result"), unit="ops"),
                panel(
                    "Duration",
                    *quantiles("dynamo_operator_reconcile_duration_seconds", by="resource_type", shares=(0.95,)),
                    unit="s",
                ),
                panel(
                    "Errors",
                    rate("dynamo_operator_reconcile_errors_total", by="resource_type, error_type"),
                    unit="ops",
                    optional=True,
                ),
                panel(
                    "Queue",
                    level("dynamo_operator_workqueue_depth", by="name"),
                    level("dynamo_operator_workqueue_retries", by="name", legend="{{name}} retries"),
                ),
                panel("Writes", level("dynamo_operator_writes", by="operation")),
                panel("Resources", level("dynamo_operator_resources_total", by="resource_type, status")),
            ),
        ),
        Row(
            "Webhooks",
            (
                panel(
                    "Requests",
                    rate("dynamo_operator_webhook_requests_total", by="resource_type, operation, result"),
                    unit="reqps",
                ),
                panel(
                    "Duration",
                    *quantiles("dynamo_operator_review_duration_seconds", by="webhook", shares=(0.95,)),
                    unit="s",
                ),
                panel(
                    "Denials",
                    rate("dynamo_operator_webhook_denials_total", by="resource_type, operation, reason"),
                    unit="ops",
                    optional=True,
                ),
            ),
        ),
    ),
)

ENGINES = Dashboard(
    "engines",
    "Dynamo / Engines",
    "Batches, queues and caches of the engines, and the slots of their workers",
    (
        Row(
            "Worker",
            (
                panel(
                    "Slots in use",
                    level("dynamo_work_handler_pool_active_tasks", by="worker_id"),
                    level("dynamo_work_handler_queue_depth", by="worker_id", legend="{{worker_id}} queued"),
                ),
                panel("Wait for a slot", *quantiles("dynamo_work_handler_permit_wait_seconds"), unit="s"),
                panel(
                    "Arrival to first response",
                    *quantiles("dynamo_work_handler_time_to_first_response_seconds"),
                    unit="s",
                ),
                panel(
                    "Refused for load", rate("dynamo_work_handler_enqueue_rejected_total", by="worker_id"), unit="reqps"
                ),
                panel(
                    "Errors",
                    rate("dynamo_component_errors_total", by="worker_id, error_type"),
                    unit="ops",
                    optional=True,
                ),
                panel(
                    "KV blocks in use",
                    level("dynamo_component_gpu_cache_usage_percent", by="worker_id, dp_rank"),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "vLLM and mocker",
            (
                panel(
                    "Batch and queue",
                    level("vllm:num_requests_running", by="instance", legend="{{instance}} running"),
                    level("vllm:num_requests_waiting", by="instance", legend="{{instance}} waiting"),
                ),
                panel(
                    "KV cache in use",
                    level("vllm:kv_cache_usage_perc", by="instance", operation="avg"),
                    unit="percentunit",
                ),
                panel("Preemptions", rate("vllm:num_preemptions_total", by="instance"), unit="ops"),
                panel("Time to first token", *quantiles("vllm:time_to_first_token_seconds"), unit="s"),
                panel("Inter-token latency", *quantiles("vllm:inter_token_latency_seconds"), unit="s"),
                panel("Request latency", *quantiles("vllm:e2e_request_latency_seconds"), unit="s"),
            ),
        ),
        Row(
            "TensorRT-LLM",
            (
                panel(
                    "KV cache in use",
                    level("trtllm_kv_cache_utilization", by="instance", operation="avg"),
                    unit="percentunit",
                    optional=True,
                    width=12,
                ),
                panel(
                    "KV cache hits",
                    level("trtllm_kv_cache_hit_rate", by="instance", operation="avg"),
                    unit="percentunit",
                    optional=True,
                    width=12,
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, DISAGGREGATION, KV_ROUTER, KVBM, PLANNER, OPERATOR, ENGINES)
