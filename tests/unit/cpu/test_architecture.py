import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.cpu.architecture import Architecture


def test_architecture_is_read_from_config_json(write_model: Callable[..., str]) -> None:
    shape = Architecture.read(write_model())
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 8)
    assert (shape.vocab_size, shape.context_length, shape.has_tied_embeddings) == (96, 256, False)


def test_architecture_of_llama_divides_its_width_among_heads(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Architecture.read(str(tmp_path))
    assert (shape.head_dim, shape.kv_heads, shape.rope.theta) == (16, 4, 500000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture is GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_key_value_heads": 3}, "4 heads of 8 cannot share 3"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding window"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type is 'spiral'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ],
)
def test_architecture_refuses_an_unsupported_model(
    write_model: Callable[..., str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Architecture.read(write_model(**changes))
    assert "config.json" in str(raised.value)


def test_architecture_accepts_a_window_that_no_layer_uses(write_model: Callable[..., str]) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}
    assert Architecture.read(write_model(**changes)).layers == 2


def test_architecture_error_names_a_missing_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        Architecture.read(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_architecture_refuses_a_config_that_is_not_an_object(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        Architecture.read(str(tmp_path))
