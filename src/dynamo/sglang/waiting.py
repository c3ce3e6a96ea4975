"""Unsupported flags: flags of upstream's SGLang worker that are accepted by name only. Pure."""

from dynamo.core.waiting import Waiting

WAITING = (
    Waiting("--use-sglang-tokenizer", "DYN_SGL_USE_TOKENIZER", False),
    Waiting("--gateway-workers", "DYN_SGL_GATEWAY_WORKERS", ""),
    Waiting("--dedicated-mm-encoder", "DYN_SGL_DEDICATED_MM_ENCODER", False),
    Waiting("--embedding-transfer-mode", "DYN_SGL_EMBEDDING_TRANSFER_MODE", "nixl-write"),
    Waiting("--embedding-worker", "DYN_SGL_EMBEDDING_WORKER", False),
    Waiting("--rerank-worker", "DYN_SGL_RERANK_WORKER", False),
    Waiting("--image-diffusion-worker", "DYN_SGL_IMAGE_DIFFUSION_WORKER", False),
    Waiting("--disagg-config", "DYN_SGL_DISAGG_CONFIG", ""),
    Waiting("--disagg-config-key", "DYN_SGL_DISAGG_CONFIG_KEY", ""),
    Waiting("--video-generation-worker", "DYN_SGL_VIDEO_GENERATION_WORKER", False),
    Waiting("--frontend-decoding", "DYN_SGL_FRONTEND_DECODING", False),
    Waiting("--sglang-trace-level", "SGLANG_TRACE_LEVEL", "2"),
)
