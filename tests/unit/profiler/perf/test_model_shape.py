from typing import Any

import pytest

from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import UnsupportedModel, model_shape

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def test_grouped_heads_share_keys_and_values() -> None:
    shape = model_shape(SMALL)
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # Layers, keys and values, heads, head size, bytes.
    assert shape.attention_params == 64 * 16 * (4 + 2 + 2 + 4)


def test_latent_attention_caches_one_vector_per_token_and_layer() -> None:
    shape = model_shape(known_config("deepseek-ai/DeepSeek-V3") or {})
    assert shape.kv_bytes_per_token == 61 * (512 + 64) * 2


def test_active_parameters_of_a_mixture_count_only_chosen_experts() -> None:
    shape = model_shape(known_config("Qwen/Qwen3-235B-A22B") or {})
    assert shape.active_params == pytest.approx(22e9, rel=0.05)
    assert shape.routed_params > 200e9


def test_text_part_of_a_multimodal_model_is_read() -> None:
    outer = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": SMALL}
    assert model_shape(outer).layers == 2


@pytest.mark.parametrize(
    ("quantization", "bits", "block"),
    [
        (None, 16, 1),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 128),
        ({"quant_method": "gptq", "bits": 4}, 4.25, 1),
        ({"quant_method": "mxfp4"}, 4.25, 1),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8, 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 1),
    ],
)
def test_width_of_weights_follows_the_quantization(quantization: Any, bits: float, block: int) -> None:
    shape = model_shape({**SMALL, "quantization_config": quantization})
    assert (shape.weight_bits, shape.quant_block) == (bits, block)


def test_models_that_are_not_covered_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="state-space"):
        model_shape({**SMALL, "mamba_d_state": 16})
    with pytest.raises(UnsupportedModel, match="num_attention_heads"):
        model_shape({"architectures": ["UNet"]})
