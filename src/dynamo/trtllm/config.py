"""TrtllmConfig: the flags of `python -m dynamo.trtllm`, and their conversion into arguments of `LLM`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import yaml

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS, WorkerOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.config import build_parser, environ, from_namespace, option
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported
from dynamo.trtllm.dynamic_flags import DYNAMIC_FLAG_PREFIX, split_dynamic_flags

PROG = "python -m dynamo.trtllm"
EVENTS_MAX = 1024  # Size of TensorRT-LLM's event buffer between two polls.
MODES = {
    "aggregated": DisaggregationMode.AGGREGATED,
    "agg": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}
UNSUPPORTED_FLAGS = (
    *UNSUPPORTED_WORKER_FLAGS,
    UnsupportedFlag("--revision", "DYN_TRTLLM_REVISION", "", hint="set --model to the directory of that revision"),
    UnsupportedFlag("--modality", "DYN_TRTLLM_MODALITY", "text"),
    UnsupportedFlag("--enable-multimodal", "DYN_TRTLLM_ENABLE_MULTIMODAL", False),
    UnsupportedFlag("--encode-endpoint", "DYN_TRTLLM_ENCODE_ENDPOINT", ""),
    UnsupportedFlag("--allowed-local-media-path", "DYN_TRTLLM_ALLOWED_LOCAL_MEDIA_PATH", ""),
    UnsupportedFlag("--max-file-size-mb", "DYN_TRTLLM_MAX_FILE_SIZE_MB", "50"),
    UnsupportedFlag("--conversation-affinity", "DYN_ENGINE_CONV_AFFINITY", False),
    UnsupportedFlag("--conversation-affinity-dp-rank-source", None, "engine"),
    UnsupportedFlag("--torch-dtype", "DYN_TRTLLM_TORCH_DTYPE", "bfloat16"),
    UnsupportedFlag("--attn-backend", "DYN_TRTLLM_ATTN_BACKEND", "VANILLA"),
    UnsupportedFlag("--quant-dynamic", "DYN_TRTLLM_QUANT_DYNAMIC", True),
    UnsupportedFlag("--model-loader-extra-config", "DYN_TRTLLM_MODEL_LOADER_EXTRA_CONFIG", ""),
    UnsupportedFlag("--default-height", "DYN_TRTLLM_DEFAULT_HEIGHT", "480"),
    UnsupportedFlag("--default-width", "DYN_TRTLLM_DEFAULT_WIDTH", "832"),
    UnsupportedFlag("--default-num-inference-steps", "DYN_TRTLLM_DEFAULT_NUM_INFERENCE_STEPS", "50"),
    UnsupportedFlag("--default-guidance-scale", "DYN_TRTLLM_DEFAULT_GUIDANCE_SCALE", "5.0"),
    UnsupportedFlag("--default-num-frames", "DYN_TRTLLM_DEFAULT_NUM_FRAMES", "81"),
    UnsupportedFlag("--default-num-images-per-prompt", "DYN_TRTLLM_DEFAULT_NUM_IMAGES_PER_PROMPT", "1"),
    UnsupportedFlag("--quant-algo", "DYN_TRTLLM_QUANT_ALGO", ""),
    UnsupportedFlag("--enable-teacache", "DYN_TRTLLM_ENABLE_TEACACHE", False),
    UnsupportedFlag("--teacache-use-ret-steps", "DYN_TRTLLM_TEACACHE_USE_RET_STEPS", True),
    UnsupportedFlag("--teacache-thresh", "DYN_TRTLLM_TEACACHE_THRESH", "0.2"),
    UnsupportedFlag("--disable-torch-compile", "DYN_TRTLLM_DISABLE_TORCH_COMPILE", False),
    UnsupportedFlag("--enable-fullgraph", "DYN_TRTLLM_ENABLE_FULLGRAPH", False),
    UnsupportedFlag("--enable-cuda-graph", "DYN_TRTLLM_ENABLE_CUDA_GRAPH", False),
    UnsupportedFlag("--dit-ulysses-size", "DYN_TRTLLM_DIT_ULYSSES_SIZE", "1"),
    UnsupportedFlag("--dit-ring-size", "DYN_TRTLLM_DIT_RING_SIZE", "1"),
    UnsupportedFlag("--dit-cfg-size", "DYN_TRTLLM_DIT_CFG_SIZE", "1"),
    UnsupportedFlag("--enable-layerwise-nvtx-marker", "DYN_TRTLLM_ENABLE_LAYERWISE_NVTX_MARKER", False),
    UnsupportedFlag("--skip-warmup", "DYN_TRTLLM_SKIP_WARMUP", False),
)
"""Flags of upstream's TensorRT-LLM worker that are refused unless they have their default value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig(WorkerOptions):
    """Options of a TensorRT-LLM worker. Any argument of `LLM` may be given as --trtllm.<dotted.name> <value>."""

    COMMON: ClassVar = (
        "--model",
        "--served-model-name",
        "--tensor-parallel-size",
        "--max-batch-size",
        "--max-num-tokens",
        "--max-seq-len",
        "--free-gpu-memory-fraction",
        "--disaggregation-mode",
        "--dyn-tool-call-parser",
        "--dyn-reasoning-parser",
        "--discovery-backend",
    )
    model: str = option(
        "", "--model", "DYN_TRTLLM_MODEL", "Directory of the model, or its name on the hub", aliases=("--model-path",)
    )
    served_model_name: str | None = option(
        None, "--served-model-name", "DYN_TRTLLM_SERVED_MODEL_NAME", "Name of the model in requests"
    )
    tensor_parallel_size: int = option(
        1, "--tensor-parallel-size", "DYN_TRTLLM_TENSOR_PARALLEL_SIZE", "GPUs that share each layer"
    )
    pipeline_parallel_size: int = option(
        1, "--pipeline-parallel-size", "DYN_TRTLLM_PIPELINE_PARALLEL_SIZE", "Pipeline stages, each with its own layers"
    )
    expert_parallel_size: int | None = option(
        None, "--expert-parallel-size", "DYN_TRTLLM_EXPERT_PARALLEL_SIZE", "GPUs over which the experts are distributed"
    )
    enable_attention_dp: bool = option(
        False, "--enable-attention-dp", "DYN_TRTLLM_ENABLE_ATTENTION_DP", "Use data parallelism for attention layers"
    )
    kv_block_size: int = option(32, "--kv-block-size", "DYN_TRTLLM_KV_BLOCK_SIZE", "Tokens per KV block")
    gpus_per_node: int | None = option(None, "--gpus-per-node", "DYN_TRTLLM_GPUS_PER_NODE", "GPUs per machine")
    max_batch_size: int | None = option(
        None, "--max-batch-size", "DYN_TRTLLM_MAX_BATCH_SIZE", "Maximum requests per step"
    )
    max_num_tokens: int | None = option(
        None, "--max-num-tokens", "DYN_TRTLLM_MAX_NUM_TOKENS", "Maximum tokens per step"
    )
    max_seq_len: int | None = option(
        None, "--max-seq-len", "DYN_TRTLLM_MAX_SEQ_LEN", "Maximum of prompt and output tokens of a request"
    )
    max_beam_width: int | None = option(
        None, "--max-beam-width", "DYN_TRTLLM_MAX_BEAM_WIDTH", "Maximum beams per request"
    )
    free_gpu_memory_fraction: float = option(
        0.9,
        "--free-gpu-memory-fraction",
        "DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION",
        "Fraction of the GPU memory left free by the weights that is used for KV blocks, above 0 to 1",
    )
    extra_engine_args: str = option(
        "", "--extra-engine-args", "DYN_TRTLLM_EXTRA_ENGINE_ARGS", "YAML file with further arguments of LLM"
    )
    override_engine_args: str = option(
        "",
        "--override-engine-args",
        "DYN_TRTLLM_OVERRIDE_ENGINE_ARGS",
        "JSON object with arguments of LLM that override all others",
    )
    publish_kv_events: bool = option(
        False,
        "--publish-kv-events",
        "DYN_TRTLLM_PUBLISH_KV_EVENTS",
        "Publish KV cache events for routers",
    )
    publish_metrics: bool = option(
        False, "--publish-metrics", "DYN_TRTLLM_PUBLISH_METRICS", "Publish the engine's load for routers and planners"
    )
    publish_events_and_metrics: bool = option(
        False,
        "--publish-events-and-metrics",
        "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS",
        "Deprecated: the same as --publish-kv-events --publish-metrics",
    )
    load_format: str = option("auto", "--load-format", "DYN_TRTLLM_LOAD_FORMAT", "Source of the weights: auto or dummy")
    guided_decoding_backend: str | None = option(
        None,
        "--guided-decoding-backend",
        "DYN_TRTLLM_GUIDED_DECODING_BACKEND",
        "Backend of guided decoding: xgrammar or llguidance",
    )
    disaggregation_mode: str | None = option(
        None,
        "--disaggregation-mode",
        "DYN_TRTLLM_DISAGGREGATION_MODE",
        "Phase of requests that this worker computes: aggregated (both phases), prefill or decode",
        choices=tuple(MODES),
    )

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        if not self.model:
            raise ConfigError("--model is required: the model's directory, or its name on the hub")
        if self.kv_block_size < 1:
            raise ConfigError(f"--kv-block-size {self.kv_block_size}: must be 1 or more")
        if not 0 < self.free_gpu_memory_fraction <= 1:
            raise ConfigError(
                f"--free-gpu-memory-fraction {self.free_gpu_memory_fraction}: must be above 0 and at most 1"
            )

    @property
    def role(self) -> DisaggregationMode:
        return MODES[self.disaggregation_mode or "aggregated"]


def read_command_line(argv: Sequence[str]) -> tuple[TrtllmConfig, dict[str, Any]]:
    """Return the options, and the arguments of `--trtllm.<dotted.name> <value>`. Raise `ConfigError`."""
    variables = environ()
    own, dynamic = split_dynamic_flags(argv)
    patches = {argument_name(name): value for name, value in dynamic.items()}
    kept = drop_unsupported(UNSUPPORTED_FLAGS, own, variables, declared_flags(TrtllmConfig))
    namespace = build_parser(TrtllmConfig, variables=variables, prog=PROG).parse_args(kept)
    config = from_namespace(TrtllmConfig, namespace)
    if config.publish_events_and_metrics:
        config = replace(config, publish_kv_events=True, publish_metrics=True)
    return config, patches


def argument_name(name: str) -> str:
    """Return the name of an argument of `LLM`, which may be written with hyphens. Raise `ConfigError`."""
    found = name.replace("-", "_")
    if not found.isidentifier():
        raise ConfigError(f"{DYNAMIC_FLAG_PREFIX}{name}: must be {DYNAMIC_FLAG_PREFIX}<dotted.name>")
    return found


def engine_args(config: TrtllmConfig, model_path: str, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` from the flags, the file and the overrides, in this order. Raise `ConfigError`."""
    given = {
        "moe_expert_parallel_size": config.expert_parallel_size,
        "gpus_per_node": config.gpus_per_node,
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "max_seq_len": config.max_seq_len,
        "max_beam_width": config.max_beam_width,
        "guided_decoding_backend": config.guided_decoding_backend,
    }
    args: dict[str, Any] = {
        "model": model_path,
        "backend": "pytorch",
        "skip_tokenizer_init": config.guided_decoding_backend is None,  # Grammars are compiled for the tokenizer.
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_attention_dp": config.enable_attention_dp,
        "kv_cache_config": {
            "free_gpu_memory_fraction": config.free_gpu_memory_fraction,
            "tokens_per_block": config.kv_block_size,
        },
        **{name: value for name, value in given.items() if value is not None},
    }
    if config.load_format != "auto":
        args["load_format"] = config.load_format
    if config.publish_kv_events:
        args["kv_cache_config"]["event_buffer_max_size"] = EVENTS_MAX
    if config.publish_metrics:
        args["enable_iter_perf_stats"] = True
    if config.role is not DisaggregationMode.AGGREGATED:
        args["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if config.extra_engine_args:
        args = merged(args, _from_file(config.extra_engine_args))
    if config.override_engine_args:
        args = merged(args, _from_json(config.override_engine_args))
    return merged(args, patches)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one mapping over the other, recursively."""
    found = dict(base)
    for name, value in over.items():
        below = found.get(name)
        found[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--extra-engine-args {path}: {' '.join(str(error).split())}") from None
    return _object(found or {}, f"--extra-engine-args {path}")


def _from_json(text: str) -> dict[str, Any]:
    try:
        return _object(json.loads(text), "--override-engine-args")
    except ValueError as error:
        raise ConfigError(f"--override-engine-args: not JSON: {error}") from None


def _object(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must be an object of arguments of LLM")
    return found
