"""Prometheus names of metrics and labels, importable as in upstream.

Includes the names of components that do not exist here, so that programs for upstream find them.
"""


class component_names:
    ROUTER = "router"


class distributed_runtime:
    UPTIME_SECONDS = "uptime_seconds"


class frontend_perf:
    STAGE_DURATION_SECONDS = "stage_duration_seconds"
    STAGE_REQUESTS = "stage_requests"
    STAGE_PREPROCESS = "preprocess"
    STAGE_ROUTE = "route"
    STAGE_DISPATCH = "dispatch"
    TOKENIZE_SECONDS = "tokenize_seconds"
    TEMPLATE_SECONDS = "template_seconds"
    TOKENIZER_CACHE_HITS_TOTAL = "tokenizer_cache_hits_total"
    TOKENIZER_CACHE_MISSES_TOTAL = "tokenizer_cache_misses_total"
    TOKENIZER_CACHE_CACHED_TOKENS_TOTAL = "tokenizer_cache_cached_tokens_total"
    TOKENIZER_CACHE_UNCACHED_TOKENS_TOTAL = "tokenizer_cache_uncached_tokens_total"
    DETOKENIZE_TOTAL_US = "detokenize_total_us"
    DETOKENIZE_TOKEN_COUNT = "detokenize_token_count"
    EVENT_LOOP_DELAY_SECONDS = "event_loop_delay_seconds"
    EVENT_LOOP_STALL_TOTAL = "event_loop_stall_total"


class frontend_service:
    METRICS_PREFIX_ENV = "DYN_METRICS_PREFIX"
    MODEL_READY = "model_ready"
    REQUESTS_TOTAL = "requests_total"
    REQUESTS_STARTED_TOTAL = "requests_started_total"
    FAILURES_TOTAL = "failures_total"
    QUEUED_REQUESTS = "queued_requests"
    INFLIGHT_REQUESTS = "inflight_requests"
    ACTIVE_REQUESTS = "active_requests"
    DISCONNECTED_CLIENTS = "disconnected_clients"
    REQUEST_DURATION_SECONDS = "request_duration_seconds"
    INPUT_SEQUENCE_TOKENS = "input_sequence_tokens"
    OUTPUT_SEQUENCE_TOKENS = "output_sequence_tokens"
    KV_HIT_RATE = "kv_hit_rate"
    KV_BEST_ELIGIBLE_CACHED_PREFIX_TOKENS_TOTAL = "kv_best_eligible_cached_prefix_tokens_total"
    KV_SELECTED_CACHED_PREFIX_TOKENS_TOTAL = "kv_selected_cached_prefix_tokens_total"
    KV_WORKER_REUSED_TOKENS_TOTAL = "kv_worker_reused_tokens_total"
    KV_TRANSFER_ESTIMATED_LATENCY_SECONDS = "kv_transfer_estimated_latency_seconds"
    SHARED_CACHE_HIT_RATE = "shared_cache_hit_rate"
    SHARED_CACHE_BEYOND_BLOCKS = "shared_cache_beyond_blocks"
    NON_MAX_OVERLAP_SELECTIONS_TOTAL = "non_max_overlap_selections_total"
    OVERLAP_BLOCKS_LOST = "overlap_blocks_lost"
    CACHED_TOKENS = "cached_tokens"
    TOKENIZER_LATENCY_MS = "tokenizer_latency_ms"
    OUTPUT_TOKENS_TOTAL = "output_tokens_total"
    TIME_TO_FIRST_TOKEN_SECONDS = "time_to_first_token_seconds"
    INTER_TOKEN_LATENCY_SECONDS = "inter_token_latency_seconds"
    EMBEDDING_LATENCY_SECONDS = "embedding_latency_seconds"
    IMAGES_PER_REQUEST = "images_per_request"
    VIDEOS_PER_REQUEST = "videos_per_request"
    AUDIO_PER_REQUEST = "audio_per_request"
    IMAGE_TOKENS_PER_REQUEST = "image_tokens_per_request"
    MODEL_TOTAL_KV_BLOCKS = "model_total_kv_blocks"
    MODEL_MAX_NUM_SEQS = "model_max_num_seqs"
    MODEL_MAX_NUM_BATCHED_TOKENS = "model_max_num_batched_tokens"
    MODEL_CONTEXT_LENGTH = "model_context_length"
    MODEL_KV_CACHE_BLOCK_SIZE = "model_kv_cache_block_size"
    MODEL_MIGRATION_LIMIT = "model_migration_limit"
    MODEL_MIGRATION_TOTAL = "model_migration_total"
    MODEL_MIGRATION_DURATION_SECONDS = "model_migration_duration_seconds"
    MODEL_MIGRATION_MAX_SEQ_LEN_EXCEEDED_TOTAL = "model_migration_max_seq_len_exceeded_total"
    MODEL_CANCELLATION_TOTAL = "model_cancellation_total"
    MODEL_REJECTION_TOTAL = "model_rejection_total"
    WORKER_ACTIVE_DECODE_BLOCKS = "worker_active_decode_blocks"
    WORKER_ACTIVE_PREFILL_TOKENS = "worker_active_prefill_tokens"
    WORKER_LAST_TIME_TO_FIRST_TOKEN_SECONDS = "worker_last_time_to_first_token_seconds"
    WORKER_LAST_INPUT_SEQUENCE_TOKENS = "worker_last_input_sequence_tokens"
    WORKER_LAST_INTER_TOKEN_LATENCY_SECONDS = "worker_last_inter_token_latency_seconds"
    ROUTER_QUEUE_PENDING_REQUESTS = "router_queue_pending_requests"
    LORA_REPLICA_FACTOR = "lora_replica_factor"
    LORA_IS_ACTIVE = "lora_is_active"
    LORA_ESTIMATED_LOAD = "lora_estimated_load"
    LORA_RAW_ARRIVAL_COUNT = "lora_raw_arrival_count"
    LORA_ACTIVE_REQUESTS = "lora_active_requests"
    LORA_CHURN_LOADS_TOTAL = "lora_churn_loads_total"
    LORA_CHURN_UNLOADS_TOTAL = "lora_churn_unloads_total"
    LORA_OVERFLOW_COUNT = "lora_overflow_count"
    MIGRATION_TYPE_LABEL = "migration_type"
    MIGRATION_OUTCOME_LABEL = "outcome"
    OPERATION_LABEL = "operation"

    class error_type:
        NONE = ""
        VALIDATION = "validation"
        NOT_FOUND = "not_found"
        OVERLOAD = "overload"
        UNAVAILABLE = "unavailable"
        CANCELLED = "cancelled"
        RESPONSE_TIMEOUT = "response_timeout"
        INTERNAL = "internal"
        NOT_IMPLEMENTED = "not_implemented"

    class migration_outcome:
        SUCCESS = "success"
        FAILURE = "failure"
        CANCELLED = "cancelled"

    class migration_type:
        NEW_REQUEST = "new_request"
        ONGOING_REQUEST = "ongoing_request"

    class operation:
        TOKENIZE = "tokenize"
        DETOKENIZE = "detokenize"

    class request_type:
        STREAM = "stream"
        UNARY = "unary"

    class status:
        SUCCESS = "success"
        ERROR = "error"


class kv_publisher:
    ENGINES_DROPPED_EVENTS_TOTAL = "kv_publisher_engines_dropped_events_total"
    ZMQ_EVENTS_TOTAL = "kv_publisher_zmq_events_total"
    ZMQ_FILTERED_EVENTS_TOTAL = "kv_publisher_zmq_filtered_events_total"
    ZMQ_CONVERSION_ISSUES_TOTAL = "kv_publisher_zmq_conversion_issues_total"
    ZMQ_SUSPICIOUS_EVENTS_TOTAL = "kv_publisher_zmq_suspicious_events_total"


class kvbm:
    OFFLOAD_BLOCKS_D2H = "offload_blocks_d2h"
    OFFLOAD_BLOCKS_H2D = "offload_blocks_h2d"
    OFFLOAD_BLOCKS_D2D = "offload_blocks_d2d"
    ONBOARD_BLOCKS_H2D = "onboard_blocks_h2d"
    ONBOARD_BLOCKS_D2D = "onboard_blocks_d2d"
    MATCHED_TOKENS = "matched_tokens"
    HOST_CACHE_HIT_RATE = "host_cache_hit_rate"
    DISK_CACHE_HIT_RATE = "disk_cache_hit_rate"
    OBJECT_CACHE_HIT_RATE = "object_cache_hit_rate"
    OFFLOAD_BLOCKS_D2O = "offload_blocks_d2o"
    ONBOARD_BLOCKS_O2D = "onboard_blocks_o2d"
    OFFLOAD_BYTES_OBJECT = "offload_bytes_object"
    ONBOARD_BYTES_OBJECT = "onboard_bytes_object"
    OBJECT_READ_FAILURES = "object_read_failures"
    OBJECT_WRITE_FAILURES = "object_write_failures"


class kvindexer:
    REQUEST_DURATION_SECONDS = "request_duration_seconds"
    REQUESTS_TOTAL = "requests_total"
    ERRORS_TOTAL = "errors_total"
    MODELS = "models"
    WORKERS = "workers"


class kvrouter:
    KV_CACHE_EVENTS_APPLIED = "kv_cache_events_applied"


class kvstats:
    TOTAL_BLOCKS = "total_blocks"
    GPU_CACHE_USAGE_PERCENT = "gpu_cache_usage_percent"
    KV_CACHE_HIT_RATE = "kv_cache_hit_rate"


class labels:
    COMPONENT = "dynamo_component"
    NAMESPACE = "dynamo_namespace"
    ENDPOINT = "dynamo_endpoint"
    DP_RANK = "dp_rank"
    WORKER_ID = "worker_id"
    MODEL = "model"
    MODEL_NAME = "model_name"
    WORKER_TYPE = "worker_type"
    ROUTER_ID = "router_id"


class lifecycle:
    CLEANUP_TIME_SECONDS = "cleanup_time_seconds"
    DRAIN_TIME_SECONDS = "drain_time_seconds"


class model_info:
    LOAD_TIME_SECONDS = "model_load_time_seconds"


class name_prefix:
    COMPONENT = "dynamo_component"
    FRONTEND = "dynamo_frontend"
    ROUTER = "dynamo_router"
    KVINDEXER = "dynamo_kvindexer"
    REQUEST_PLANE = "dynamo_request_plane"
    TRANSPORT = "dynamo_transport"
    WORK_HANDLER = "dynamo_work_handler"
    REJECTION = "dynamo_rejection"
    TOKIO = "dynamo_tokio"
    ROUTING_OVERHEAD = "dynamo_routing_overhead"


class request_plane:
    QUEUE_SECONDS = "queue_seconds"
    SEND_SECONDS = "send_seconds"
    ROUNDTRIP_TTFT_SECONDS = "roundtrip_ttft_seconds"
    INFLIGHT_REQUESTS = "inflight_requests"


class router:
    REQUESTS_STARTED_TOTAL = "router_requests_started_total"
    REQUESTS_TOTAL = "router_requests_total"
    REMOTE_INDEXER_QUERY_FAILURES_TOTAL = "router_remote_indexer_query_failures_total"
    REMOTE_INDEXER_WRITE_FAILURES_TOTAL = "router_remote_indexer_write_failures_total"
    KV_EVENT_SOURCE_MISMATCH_WORKERS = "router_kv_event_source_mismatch_workers"
    TIME_TO_FIRST_TOKEN_SECONDS = "router_time_to_first_token_seconds"
    INTER_TOKEN_LATENCY_SECONDS = "router_inter_token_latency_seconds"
    INPUT_SEQUENCE_TOKENS = "router_input_sequence_tokens"
    OUTPUT_SEQUENCE_TOKENS = "router_output_sequence_tokens"
    KV_HIT_RATE = "router_kv_hit_rate"
    KV_BEST_ELIGIBLE_CACHED_PREFIX_TOKENS_TOTAL = "router_kv_best_eligible_cached_prefix_tokens_total"
    KV_SELECTED_CACHED_PREFIX_TOKENS_TOTAL = "router_kv_selected_cached_prefix_tokens_total"
    KV_WORKER_REUSED_TOKENS_TOTAL = "router_kv_worker_reused_tokens_total"
    SHARED_CACHE_HIT_RATE = "router_shared_cache_hit_rate"
    SHARED_CACHE_BEYOND_BLOCKS = "router_shared_cache_beyond_blocks"
    NON_MAX_OVERLAP_SELECTIONS_TOTAL = "router_non_max_overlap_selections_total"
    OVERLAP_BLOCKS_LOST = "router_overlap_blocks_lost"
    WORKER_REGISTERED = "router_worker_registered"


class router_request:
    METRIC_PREFIX = "router_"


class routing_overhead:
    BLOCK_HASHING_MS = "overhead_block_hashing_ms"
    INDEXER_FIND_MATCHES_MS = "overhead_indexer_find_matches_ms"
    SEQ_HASHING_MS = "overhead_seq_hashing_ms"
    SCHEDULING_MS = "overhead_scheduling_ms"
    TOTAL_MS = "overhead_total_ms"
    SHARED_CACHE_QUERY_MS = "overhead_shared_cache_query_ms"
    SHARED_CACHE_ERRORS_TOTAL = "shared_cache_errors_total"


class task_tracker:
    TASKS_ISSUED_TOTAL = "tasks_issued_total"
    TASKS_STARTED_TOTAL = "tasks_started_total"
    TASKS_SUCCESS_TOTAL = "tasks_success_total"
    TASKS_CANCELLED_TOTAL = "tasks_cancelled_total"
    TASKS_FAILED_TOTAL = "tasks_failed_total"
    TASKS_REJECTED_TOTAL = "tasks_rejected_total"


class tokio_perf:
    WORKER_MEAN_POLL_TIME_NS = "worker_mean_poll_time_ns"
    GLOBAL_QUEUE_DEPTH = "global_queue_depth"
    BUDGET_FORCED_YIELD_TOTAL = "budget_forced_yield_total"
    WORKER_BUSY_RATIO = "worker_busy_ratio"
    WORKER_PARK_COUNT_TOTAL = "worker_park_count_total"
    WORKER_LOCAL_QUEUE_DEPTH = "worker_local_queue_depth"
    WORKER_STEAL_COUNT_TOTAL = "worker_steal_count_total"
    WORKER_OVERFLOW_COUNT_TOTAL = "worker_overflow_count_total"
    QUEUE_OVERLOAD_WARNINGS_TOTAL = "queue_overload_warnings_total"
    BLOCKING_THREADS = "blocking_threads"
    BLOCKING_IDLE_THREADS = "blocking_idle_threads"
    BLOCKING_QUEUE_DEPTH = "blocking_queue_depth"
    ALIVE_TASKS = "alive_tasks"


class transport:
    class nats:
        ERRORS_TOTAL = "nats_errors_total"

    class tcp:
        POOL_ACTIVE = "tcp_pool_active"
        POOL_IDLE = "tcp_pool_idle"
        BYTES_SENT_TOTAL = "tcp_bytes_sent_total"
        BYTES_RECEIVED_TOTAL = "tcp_bytes_received_total"
        ERRORS_TOTAL = "tcp_errors_total"
        SERVER_QUEUE_DEPTH = "tcp_server_queue_depth"
        ACCEPT_BACKOFF_TOTAL = "tcp_accept_backoff_total"


class trtllm_additional:
    NUM_ABORTED_REQUESTS_TOTAL = "trtllm_num_aborted_requests_total"
    REQUEST_TYPE_IMAGE_TOTAL = "trtllm_request_type_image_total"
    REQUEST_TYPE_STRUCTURED_OUTPUT_TOTAL = "trtllm_request_type_structured_output_total"
    KV_TRANSFER_SUCCESS_TOTAL = "trtllm_kv_transfer_success_total"
    KV_TRANSFER_LATENCY_SECONDS = "trtllm_kv_transfer_latency_seconds"
    KV_TRANSFER_BYTES = "trtllm_kv_transfer_bytes"
    KV_TRANSFER_SPEED_GB_S = "trtllm_kv_transfer_speed_gb_s"
    KV_EVENT_BUFFER_CAPACITY = "trtllm_kv_event_buffer_capacity"
    KV_EVENT_DRAIN_BATCH_SIZE = "trtllm_kv_event_drain_batch_size"
    KV_EVENT_ID_GAP_EVENTS_TOTAL = "trtllm_kv_event_id_gap_events_total"


class work_handler:
    REQUESTS_TOTAL = "requests_total"
    REQUEST_BYTES_TOTAL = "request_bytes_total"
    RESPONSE_BYTES_TOTAL = "response_bytes_total"
    INFLIGHT_REQUESTS = "inflight_requests"
    REQUEST_DURATION_SECONDS = "request_duration_seconds"
    ERRORS_TOTAL = "errors_total"
    CANCELLATION_TOTAL = "cancellation_total"
    NETWORK_TRANSIT_SECONDS = "network_transit_seconds"
    TIME_TO_FIRST_RESPONSE_SECONDS = "time_to_first_response_seconds"
    QUEUE_DEPTH = "queue_depth"
    QUEUE_CAPACITY = "queue_capacity"
    ENQUEUE_REJECTED_TOTAL = "enqueue_rejected_total"
    PERMIT_WAIT_SECONDS = "permit_wait_seconds"
    POOL_ACTIVE_TASKS = "pool_active_tasks"
    POOL_CAPACITY = "pool_capacity"
    ERROR_TYPE_LABEL = "error_type"

    class error_types:
        DESERIALIZATION = "deserialization"
        INVALID_MESSAGE = "invalid_message"
        RESPONSE_STREAM = "response_stream"
        GENERATE = "generate"
        SERIALIZATION = "serialization"
        PUBLISH_RESPONSE = "publish_response"
        PUBLISH_FINAL = "publish_final"
