"""Sizes of common public models, for names on the Hugging Face hub whose `config.json` cannot be downloaded."""

from collections.abc import Mapping
from typing import Any

FIELDS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
KIMI = {**DEEPSEEK_V3, "n_routed_experts": 384, "first_k_dense_replace": 1}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
LLAMA = {"architectures": ["LlamaForCausalLM"]}
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def _qwen3_moe(experts: int, per_token: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": intermediate,
    }


def _minimax(max_context: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    more = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    return (62, 3072, 48, 8, 128, 1536, 200064, max_context), more


def _gpt_oss(experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    }


_KIMI = (61, 7168, 64, 64, 192, 18432, 163840, 131072)
_LLAMA_8B = (32, 4096, 32, 8, 128, 14336, 128256, 131072)
_LLAMA_70B = (80, 8192, 64, 8, 128, 28672, 128256, 131072)
_QWEN3_32B = (64, 5120, 64, 8, 128, 25600, 151936, 40960)
_QWEN3_30B = (48, 2048, 32, 4, 128, 6144, 151936, 40960)
_QWEN3_235B = (94, 4096, 64, 4, 128, 12288, 151936, 40960)
_DEEPSEEK = (61, 7168, 128, 128, 192, 18432, 129280, 163840)
SIZES: dict[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ((28, 1024, 16, 8, 128, 3072, 151936, 40960), {**QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-1.7B": ((28, 2048, 16, 8, 128, 6144, 151936, 40960), {**QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-4B": ((36, 2560, 32, 8, 128, 9728, 151936, 40960), {**QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-8B": ((36, 4096, 32, 8, 128, 12288, 151936, 40960), QWEN3),
    "Qwen/Qwen3-14B": ((40, 5120, 40, 8, 128, 17408, 151936, 40960), QWEN3),
    "Qwen/Qwen3-32B": (_QWEN3_32B, QWEN3),
    "Qwen/Qwen3-32B-FP8": (_QWEN3_32B, {**QWEN3, **FP8}),
    "Qwen/Qwen3-30B-A3B": (_QWEN3_30B, _qwen3_moe(128, 8, 768)),
    "Qwen/Qwen3-30B-A3B-FP8": (_QWEN3_30B, {**_qwen3_moe(128, 8, 768), **FP8}),
    "Qwen/Qwen3-235B-A22B": (_QWEN3_235B, _qwen3_moe(128, 8, 1536)),
    "Qwen/Qwen3-235B-A22B-FP8": (_QWEN3_235B, {**_qwen3_moe(128, 8, 1536), **FP8}),
    "meta-llama/Llama-3.1-8B-Instruct": (_LLAMA_8B, LLAMA),
    "nvidia/Llama-3.1-8B-Instruct-FP8": (_LLAMA_8B, {**LLAMA, "quantization_config": {"quant_method": "fp8"}}),
    "meta-llama/Llama-3.1-70B-Instruct": (_LLAMA_70B, LLAMA),
    "meta-llama/Llama-3.3-70B-Instruct": (_LLAMA_70B, LLAMA),
    "meta-llama/Llama-3.1-405B-Instruct": ((126, 16384, 128, 8, 128, 53248, 128256, 131072), LLAMA),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        (32, 4096, 32, 8, 128, 14336, 32000, 32768),
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek-ai/DeepSeek-V3": (_DEEPSEEK, DEEPSEEK_V3),
    "deepseek-ai/DeepSeek-V3-0324": (_DEEPSEEK, DEEPSEEK_V3),
    "deepseek-ai/DeepSeek-V3.1": (_DEEPSEEK, DEEPSEEK_V3),
    "deepseek-ai/DeepSeek-R1": (_DEEPSEEK, DEEPSEEK_V3),
    "deepseek-ai/DeepSeek-R1-0528": (_DEEPSEEK, DEEPSEEK_V3),
    "moonshotai/Kimi-K2-Instruct": (_KIMI, {**KIMI, **FP8}),
    "moonshotai/Kimi-K2.5": (_KIMI, {**KIMI, "quantization_config": {"quant_method": "compressed-tensors", "bits": 4}}),
    "openai/gpt-oss-20b": ((24, 2880, 64, 8, 64, 2880, 201088, 131072), _gpt_oss(32)),
    "openai/gpt-oss-120b": ((36, 2880, 64, 8, 64, 2880, 201088, 131072), _gpt_oss(128)),
    "MiniMaxAI/MiniMax-M2": _minimax(196608),
    "MiniMaxAI/MiniMax-M2.5": _minimax(196608),
}
"""Values of `FIELDS`, and further fields, by name."""


def known_config(name: str) -> dict[str, Any] | None:
    """Return the relevant part of a model's `config.json`; None for a model that is not in the table."""
    found = SIZES.get(name)
    return None if found is None else {**dict(zip(FIELDS, found[0], strict=True)), **found[1]}
