"""Unsupported flags: flags of upstream's vLLM worker that are accepted by name only. Pure."""

from dynamo.core.waiting import Waiting

WAITING = (
    Waiting("--use-vllm-tokenizer", "DYN_VLLM_USE_TOKENIZER", False),
    Waiting("--route-to-encoder", "DYN_VLLM_ROUTE_TO_ENCODER", False),
    Waiting("--mm-prompt-template", "DYN_VLLM_MM_PROMPT_TEMPLATE", "USER: <image>\n<prompt> ASSISTANT:"),
    Waiting("--frontend-decoding", "DYN_VLLM_FRONTEND_DECODING", False),
    Waiting("--custom-encoder-class", "DYN_CUSTOM_ENCODER_CLASS", ""),
    Waiting("--embedding-transfer-mode", "DYN_VLLM_EMBEDDING_TRANSFER_MODE", "nixl-write"),
    Waiting("--embedding-frontend-tokenization", "DYN_VLLM_EMBEDDING_FRONTEND_TOKENIZATION", False),
    Waiting("--embedding-worker-processes", "DYN_VLLM_EMBEDDING_WORKER_PROCESSES", "1"),
    Waiting("--realtime", "DYN_VLLM_REALTIME", False),
    Waiting("--classify-worker", "DYN_VLLM_CLASSIFY_WORKER", False),
    Waiting("--model-express-url", "MODEL_EXPRESS_URL", ""),
    Waiting("--gms-shadow-mode", "DYN_VLLM_GMS_SHADOW_MODE", False),
    Waiting("--benchmark-mode", "DYN_BENCHMARK_MODE", ""),
    Waiting("--benchmark-points-file", "DYN_BENCHMARK_POINTS_FILE", ""),
    Waiting("--prefill-max-new-token-samples", "DYN_PREFILL_MAX_NEW_TOKEN_SAMPLES", "64"),
    Waiting("--prefill-max-kv-read-token-samples", "DYN_PREFILL_MAX_KV_READ_TOKEN_SAMPLES", "16"),
    Waiting("--decode-max-kv-read-token-samples", "DYN_DECODE_MAX_KV_READ_TOKEN_SAMPLES", "128"),
    Waiting("--decode-max-batch-size-samples", "DYN_DECODE_MAX_BATCH_SIZE_SAMPLES", "128"),
    Waiting("--prefix-max-batch-size-samples", "DYN_PREFIX_MAX_BATCH_SIZE_SAMPLES", "3"),
    Waiting("--benchmark-prefill-granularity", "DYN_BENCHMARK_PREFILL_GRANULARITY", ""),
    Waiting("--benchmark-prefill-kv-read-granularity", "DYN_BENCHMARK_PREFILL_KV_READ_GRANULARITY", ""),
    Waiting("--benchmark-prefill-batch-granularity", "DYN_BENCHMARK_PREFILL_BATCH_GRANULARITY", ""),
    Waiting("--benchmark-decode-length-granularity", "DYN_BENCHMARK_DECODE_LENGTH_GRANULARITY", ""),
    Waiting("--benchmark-decode-batch-granularity", "DYN_BENCHMARK_DECODE_BATCH_GRANULARITY", ""),
    Waiting("--benchmark-randomize-kda-state", "DYN_BENCHMARK_RANDOMIZE_KDA_STATE", False),
    Waiting("--benchmark-hybrid-live-state", "DYN_BENCHMARK_HYBRID_LIVE_STATE", False),
    Waiting("--benchmark-warmup-iterations", "DYN_BENCHMARK_WARMUP_ITERATIONS", "5"),
    Waiting("--benchmark-output-path", "DYN_BENCHMARK_OUTPUT_PATH", "/tmp/benchmark_results.json"),  # noqa: S108
    Waiting("--benchmark-collect-imbalanced", "DYN_BENCHMARK_COLLECT_IMBALANCED", False),
    Waiting("--benchmark-timeout", "DYN_BENCHMARK_TIMEOUT", "900"),
    Waiting("--benchmark-max-batch-size", "DYN_BENCHMARK_MAX_BATCH_SIZE", ""),
)
