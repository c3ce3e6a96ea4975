"""Prometheus names of metrics and labels, importable as in upstream.

Families of components that do not exist here are omitted: the KV block manager, TensorRT-LLM's extras, tokio.
"""


class component_names:
    ROUTER = "router"


class distributed_runtime:
    UPTIME_SECONDS = "uptime_seconds"


class frontend_perf:
    DETOKENIZE_TOKEN_COUNT = "detokenize_token_count"
    DETOKENIZE_TOTAL_US = "detokenize_total_us"
    EVENT_LOOP_DELAY_SECONDS = "event_loop_delay_seconds"
    EVENT_LOOP_STALL_TOTAL = "event_loop_stall_total"
    STAGE_DISPATCH = "dispatch"
    STAGE_DURATION_SECONDS = "stage_duration_seconds"
    STAGE_PREPROCESS = "preprocess"
    STAGE_REQUESTS = "stage_requests"
    STAGE_ROUTE = "route"
    TEMPLATE_SECONDS = "template_seconds"
    TOKENIZER_CACHE_CACHED_TOKENS_TOTAL = "tokenizer_cache_cached_tokens_total"
    TOKENIZER_CACHE_HITS_TOTAL = "tokenizer_cache_hits_total"
    TOKENIZER_CACHE_MISSES_TOTAL = "tokenizer_cache_misses_total"
    TOKENIZER_CACHE_UNCACHED_TOKENS_TOTAL = "tokenizer_cache_uncached_tokens_total"
    TOKENIZE_SECONDS = "tokenize_seconds"


class frontend_service:
    ACTIVE_REQUESTS = "active_requests"
    AUDIO_PER_REQUEST = "audio_per_request"
    CACHED_TOKENS = "cached_tokens"
    DISCONNECTED_CLIENTS = "disconnected_clients"
    EMBEDDING_LATENCY_SECONDS = "embedding_latency_seconds"
    FAILURES_TOTAL = "failures_total"
    IMAGES_PER_REQUEST = "images_per_request"
    IMAGE_TOKENS_PER_REQUEST = "image_tokens_per_request"
    INFLIGHT_REQUESTS = "inflight_requests"
    INPUT_SEQUENCE_TOKENS = "input_sequence_tokens"
    INTER_TOKEN_LATENCY_SECONDS = "inter_token_latency_seconds"
    KV_BEST_ELIGIBLE_CACHED_PREFIX_TOKENS_TOTAL = "kv_best_eligible_cached_prefix_tokens_total"
    KV_HIT_RATE = "kv_hit_rate"
    KV_SELECTED_CACHED_PREFIX_TOKENS_TOTAL = "kv_selected_cached_prefix_tokens_total"
    KV_TRANSFER_ESTIMATED_LATENCY_SECONDS = "kv_transfer_estimated_latency_seconds"
    KV_WORKER_REUSED_TOKENS_TOTAL = "kv_worker_reused_tokens_total"
    LORA_ACTIVE_REQUESTS = "lora_active_requests"
    LORA_CHURN_LOADS_TOTAL = "lora_churn_loads_total"
    LORA_CHURN_UNLOADS_TOTAL = "lora_churn_unloads_total"
    LORA_ESTIMATED_LOAD = "lora_estimated_load"
    LORA_IS_ACTIVE = "lora_is_active"
    LORA_OVERFLOW_COUNT = "lora_overflow_count"
    LORA_RAW_ARRIVAL_COUNT = "lora_raw_arrival_count"
    LORA_REPLICA_FACTOR = "lora_replica_factor"
    METRICS_PREFIX_ENV = "DYN_METRICS_PREFIX"
    MIGRATION_OUTCOME_LABEL = "outcome"
    MIGRATION_TYPE_LABEL = "migration_type"
    MODEL_CANCELLATION_TOTAL = "model_cancellation_total"
    MODEL_CONTEXT_LENGTH = "model_context_length"
    MODEL_KV_CACHE_BLOCK_SIZE = "model_kv_cache_block_size"
    MODEL_MAX_NUM_BATCHED_TOKENS = "model_max_num_batched_tokens"
    MODEL_MAX_NUM_SEQS = "model_max_num_seqs"
    MODEL_MIGRATION_DURATION_SECONDS = "model_migration_duration_seconds"
    MODEL_MIGRATION_LIMIT = "model_migration_limit"
    MODEL_MIGRATION_MAX_SEQ_LEN_EXCEEDED_TOTAL = "model_migration_max_seq_len_exceeded_total"
    MODEL_MIGRATION_TOTAL = "model_migration_total"
    MODEL_READY = "model_ready"
    MODEL_REJECTION_TOTAL = "model_rejection_total"
    MODEL_TOTAL_KV_BLOCKS = "model_total_kv_blocks"
    NON_MAX_OVERLAP_SELECTIONS_TOTAL = "non_max_overlap_selections_total"
    OPERATION_LABEL = "operation"
    OUTPUT_SEQUENCE_TOKENS = "output_sequence_tokens"
    OUTPUT_TOKENS_TOTAL = "output_tokens_total"
    OVERLAP_BLOCKS_LOST = "overlap_blocks_lost"
    QUEUED_REQUESTS = "queued_requests"
    REQUESTS_STARTED_TOTAL = "requests_started_total"
    REQUESTS_TOTAL = "requests_total"
    REQUEST_DURATION_SECONDS = "request_duration_seconds"
    ROUTER_QUEUE_PENDING_REQUESTS = "router_queue_pending_requests"
    SHARED_CACHE_BEYOND_BLOCKS = "shared_cache_beyond_blocks"
    SHARED_CACHE_HIT_RATE = "shared_cache_hit_rate"
    TIME_TO_FIRST_TOKEN_SECONDS = "time_to_first_token_seconds"
    TOKENIZER_LATENCY_MS = "tokenizer_latency_ms"
    VIDEOS_PER_REQUEST = "videos_per_request"
    WORKER_ACTIVE_DECODE_BLOCKS = "worker_active_decode_blocks"
    WORKER_ACTIVE_PREFILL_TOKENS = "worker_active_prefill_tokens"
    WORKER_LAST_INPUT_SEQUENCE_TOKENS = "worker_last_input_sequence_tokens"
    WORKER_LAST_INTER_TOKEN_LATENCY_SECONDS = "worker_last_inter_token_latency_seconds"
    WORKER_LAST_TIME_TO_FIRST_TOKEN_SECONDS = "worker_last_time_to_first_token_seconds"

    class error_type:
        CANCELLED = "cancelled"
        INTERNAL = "internal"
        NONE = ""
        NOT_FOUND = "not_found"
        NOT_IMPLEMENTED = "not_implemented"
        OVERLOAD = "overload"
        RESPONSE_TIMEOUT = "response_timeout"
        UNAVAILABLE = "unavailable"
        VALIDATION = "validation"

    class migration_outcome:
        CANCELLED = "cancelled"
        FAILURE = "failure"
        SUCCESS = "success"

    class migration_type:
        NEW_REQUEST = "new_request"
        ONGOING_REQUEST = "ongoing_request"

    class operation:
        DETOKENIZE = "detokenize"
        TOKENIZE = "tokenize"

    class request_type:
        STREAM = "stream"
        UNARY = "unary"

    class status:
        ERROR = "error"
        SUCCESS = "success"


class kv_publisher:
    ENGINES_DROPPED_EVENTS_TOTAL = "kv_publisher_engines_dropped_events_total"
    ZMQ_CONVERSION_ISSUES_TOTAL = "kv_publisher_zmq_conversion_issues_total"
    ZMQ_EVENTS_TOTAL = "kv_publisher_zmq_events_total"
    ZMQ_FILTERED_EVENTS_TOTAL = "kv_publisher_zmq_filtered_events_total"
    ZMQ_SUSPICIOUS_EVENTS_TOTAL = "kv_publisher_zmq_suspicious_events_total"


class kvindexer:
    ERRORS_TOTAL = "errors_total"
    MODELS = "models"
    REQUESTS_TOTAL = "requests_total"
    REQUEST_DURATION_SECONDS = "request_duration_seconds"
    WORKERS = "workers"


class kvrouter:
    KV_CACHE_EVENTS_APPLIED = "kv_cache_events_applied"


class kvstats:
    GPU_CACHE_USAGE_PERCENT = "gpu_cache_usage_percent"
    KV_CACHE_HIT_RATE = "kv_cache_hit_rate"
    TOTAL_BLOCKS = "total_blocks"


class labels:
    COMPONENT = "dynamo_component"
    DP_RANK = "dp_rank"
    ENDPOINT = "dynamo_endpoint"
    MODEL = "model"
    MODEL_NAME = "model_name"
    NAMESPACE = "dynamo_namespace"
    ROUTER_ID = "router_id"
    WORKER_ID = "worker_id"
    WORKER_TYPE = "worker_type"


class lifecycle:
    CLEANUP_TIME_SECONDS = "cleanup_time_seconds"
    DRAIN_TIME_SECONDS = "drain_time_seconds"


class model_info:
    LOAD_TIME_SECONDS = "model_load_time_seconds"


class name_prefix:
    COMPONENT = "dynamo_component"
    FRONTEND = "dynamo_frontend"
    KVINDEXER = "dynamo_kvindexer"
    REJECTION = "dynamo_rejection"
    REQUEST_PLANE = "dynamo_request_plane"
    ROUTER = "dynamo_router"
    ROUTING_OVERHEAD = "dynamo_routing_overhead"
    TOKIO = "dynamo_tokio"
    TRANSPORT = "dynamo_transport"
    WORK_HANDLER = "dynamo_work_handler"


class request_plane:
    INFLIGHT_REQUESTS = "inflight_requests"
    QUEUE_SECONDS = "queue_seconds"
    ROUNDTRIP_TTFT_SECONDS = "roundtrip_ttft_seconds"
    SEND_SECONDS = "send_seconds"


class router:
    INPUT_SEQUENCE_TOKENS = "router_input_sequence_tokens"
    INTER_TOKEN_LATENCY_SECONDS = "router_inter_token_latency_seconds"
    KV_BEST_ELIGIBLE_CACHED_PREFIX_TOKENS_TOTAL = "router_kv_best_eligible_cached_prefix_tokens_total"
    KV_EVENT_SOURCE_MISMATCH_WORKERS = "router_kv_event_source_mismatch_workers"
    KV_HIT_RATE = "router_kv_hit_rate"
    KV_SELECTED_CACHED_PREFIX_TOKENS_TOTAL = "router_kv_selected_cached_prefix_tokens_total"
    KV_WORKER_REUSED_TOKENS_TOTAL = "router_kv_worker_reused_tokens_total"
    NON_MAX_OVERLAP_SELECTIONS_TOTAL = "router_non_max_overlap_selections_total"
    OUTPUT_SEQUENCE_TOKENS = "router_output_sequence_tokens"
    OVERLAP_BLOCKS_LOST = "router_overlap_blocks_lost"
    REMOTE_INDEXER_QUERY_FAILURES_TOTAL = "router_remote_indexer_query_failures_total"
    REMOTE_INDEXER_WRITE_FAILURES_TOTAL = "router_remote_indexer_write_failures_total"
    REQUESTS_STARTED_TOTAL = "router_requests_started_total"
    REQUESTS_TOTAL = "router_requests_total"
    SHARED_CACHE_BEYOND_BLOCKS = "router_shared_cache_beyond_blocks"
    SHARED_CACHE_HIT_RATE = "router_shared_cache_hit_rate"
    TIME_TO_FIRST_TOKEN_SECONDS = "router_time_to_first_token_seconds"
    WORKER_REGISTERED = "router_worker_registered"


class router_request:
    METRIC_PREFIX = "router_"


class routing_overhead:
    BLOCK_HASHING_MS = "overhead_block_hashing_ms"
    INDEXER_FIND_MATCHES_MS = "overhead_indexer_find_matches_ms"
    SCHEDULING_MS = "overhead_scheduling_ms"
    SEQ_HASHING_MS = "overhead_seq_hashing_ms"
    SHARED_CACHE_ERRORS_TOTAL = "shared_cache_errors_total"
    SHARED_CACHE_QUERY_MS = "overhead_shared_cache_query_ms"
    TOTAL_MS = "overhead_total_ms"


class task_tracker:
    TASKS_CANCELLED_TOTAL = "tasks_cancelled_total"
    TASKS_FAILED_TOTAL = "tasks_failed_total"
    TASKS_ISSUED_TOTAL = "tasks_issued_total"
    TASKS_REJECTED_TOTAL = "tasks_rejected_total"
    TASKS_STARTED_TOTAL = "tasks_started_total"
    TASKS_SUCCESS_TOTAL = "tasks_success_total"


class transport:
    class nats:
        ERRORS_TOTAL = "nats_errors_total"

    class tcp:
        ACCEPT_BACKOFF_TOTAL = "tcp_accept_backoff_total"
        BYTES_RECEIVED_TOTAL = "tcp_bytes_received_total"
        BYTES_SENT_TOTAL = "tcp_bytes_sent_total"
        ERRORS_TOTAL = "tcp_errors_total"
        POOL_ACTIVE = "tcp_pool_active"
        POOL_IDLE = "tcp_pool_idle"
        SERVER_QUEUE_DEPTH = "tcp_server_queue_depth"


class work_handler:
    CANCELLATION_TOTAL = "cancellation_total"
    ENQUEUE_REJECTED_TOTAL = "enqueue_rejected_total"
    ERRORS_TOTAL = "errors_total"
    ERROR_TYPE_LABEL = "error_type"
    INFLIGHT_REQUESTS = "inflight_requests"
    NETWORK_TRANSIT_SECONDS = "network_transit_seconds"
    PERMIT_WAIT_SECONDS = "permit_wait_seconds"
    POOL_ACTIVE_TASKS = "pool_active_tasks"
    POOL_CAPACITY = "pool_capacity"
    QUEUE_CAPACITY = "queue_capacity"
    QUEUE_DEPTH = "queue_depth"
    REQUESTS_TOTAL = "requests_total"
    REQUEST_BYTES_TOTAL = "request_bytes_total"
    REQUEST_DURATION_SECONDS = "request_duration_seconds"
    RESPONSE_BYTES_TOTAL = "response_bytes_total"
    TIME_TO_FIRST_RESPONSE_SECONDS = "time_to_first_response_seconds"

    class error_types:
        DESERIALIZATION = "deserialization"
        GENERATE = "generate"
        INVALID_MESSAGE = "invalid_message"
        PUBLISH_FINAL = "publish_final"
        PUBLISH_RESPONSE = "publish_response"
        RESPONSE_STREAM = "response_stream"
        SERIALIZATION = "serialization"
