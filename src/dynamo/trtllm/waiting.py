"""Unsupported flags: flags of upstream's TensorRT-LLM worker that are accepted by name only. Pure."""

from dynamo.core.waiting import Waiting

WAITING = (
    Waiting("--revision", "DYN_TRTLLM_REVISION", "", hint="set --model to the directory of that revision"),
    Waiting("--modality", "DYN_TRTLLM_MODALITY", "text"),
    Waiting("--enable-multimodal", "DYN_TRTLLM_ENABLE_MULTIMODAL", False),
    Waiting("--encode-endpoint", "DYN_TRTLLM_ENCODE_ENDPOINT", ""),
    Waiting("--allowed-local-media-path", "DYN_TRTLLM_ALLOWED_LOCAL_MEDIA_PATH", ""),
    Waiting("--max-file-size-mb", "DYN_TRTLLM_MAX_FILE_SIZE_MB", "50"),
    Waiting("--conversation-affinity", "DYN_ENGINE_CONV_AFFINITY", False),
    Waiting("--conversation-affinity-dp-rank-source", None, "engine"),
    Waiting("--torch-dtype", "DYN_TRTLLM_TORCH_DTYPE", "bfloat16"),
    Waiting("--attn-backend", "DYN_TRTLLM_ATTN_BACKEND", "VANILLA"),
    Waiting("--quant-dynamic", "DYN_TRTLLM_QUANT_DYNAMIC", True),
    Waiting("--model-loader-extra-config", "DYN_TRTLLM_MODEL_LOADER_EXTRA_CONFIG", ""),
    Waiting("--default-height", "DYN_TRTLLM_DEFAULT_HEIGHT", "480"),
    Waiting("--default-width", "DYN_TRTLLM_DEFAULT_WIDTH", "832"),
    Waiting("--default-num-inference-steps", "DYN_TRTLLM_DEFAULT_NUM_INFERENCE_STEPS", "50"),
    Waiting("--default-guidance-scale", "DYN_TRTLLM_DEFAULT_GUIDANCE_SCALE", "5.0"),
    Waiting("--default-num-frames", "DYN_TRTLLM_DEFAULT_NUM_FRAMES", "81"),
    Waiting("--default-num-images-per-prompt", "DYN_TRTLLM_DEFAULT_NUM_IMAGES_PER_PROMPT", "1"),
)
