"""Qwen3 model with random weights and its own tokenizer, and a LoRA adapter for it.

python -m tests.engines.tiny_model DIRECTORY
"""

import json
import os
import sys

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
Weights = npt.NDArray[np.float32]
VOCABULARY = 2048
LAYERS = 2
HIDDEN = 256
INNER = 512
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
LENGTH = 4096
SPECIAL = ("<|end|>", "<|start|>", "<|stop|>")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' + message.content + '<|stop|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"
)


def write_model(path: str) -> str:
    """Write a directory in Hugging Face layout; config.json is written last and marks it as complete."""
    if os.path.exists(os.path.join(path, "config.json")):
        return path
    os.makedirs(path, exist_ok=True)
    ids = _write_tokenizer(path)
    save_file(_tensors(), os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    _write_json(path, "generation_config.json", {"bos_token_id": ids["<|end|>"], "eos_token_id": [ids["<|stop|>"]]})
    _write_json(
        path,
        "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": ids["<|end|>"],
            "eos_token_id": ids["<|stop|>"],
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "max_position_embeddings": LENGTH,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
        },
    )
    return path


def write_adapter(path: str, seed: int = 5) -> str:
    """Write a LoRA adapter of rank 8 for that model, strong enough to change its output."""
    os.makedirs(path, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, Weights] = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _random(rng, 8, HIDDEN, 0.5)
            tensors[f"{prefix}.lora_B.weight"] = _random(rng, rows, 8, 0.5)
    save_file(tensors, f"{path}/adapter_model.safetensors")
    _write_json(
        path,
        "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
        },
    )
    return path


def _write_tokenizer(path: str) -> dict[str, int]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([os.path.join(ROOT, name) for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")], trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCABULARY, "our own pages have words enough"
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    ids = {word: tokenizer.token_to_id(word) for word in SPECIAL}
    _write_json(
        path,
        "tokenizer_config.json",
        {
            "bos_token": None,
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|stop|>",
            "model_max_length": LENGTH,
            "pad_token": "<|end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return ids


def _random(rng: np.random.Generator, rows: int, columns: int, scale: float) -> Weights:
    """Return float32, which engines round to their own type; numpy has no bfloat16."""
    return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)


def _tensors() -> dict[str, Weights]:
    """Return tensors that make the likeliest token so likely that rounding does not change the text."""
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int, gain: float = 1.5) -> Weights:
        return _random(rng, rows, columns, gain / columns**0.5)

    def ones(size: int) -> Weights:
        return np.ones(size, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, 6.0),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 6.0),
        "model.norm.weight": ones(HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{layer}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return tensors


def _write_json(path: str, name: str, value: object) -> None:
    with open(os.path.join(path, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)


if __name__ == "__main__":
    print(write_model(sys.argv[1]))
