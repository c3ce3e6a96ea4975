"""Architecture: model dimensions and options, read from config.json."""

import logging
import os
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.cpu.checkpoint import read_json
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.rope import Rope

logger = logging.getLogger(__name__)

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
CLASSIFIER, SPEAKER = "ForSequenceClassification", "ForCausalLM"
"""Suffixes of the architecture name: a classifier scores labels, a causal language model scores tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder with grouped-query attention, rotary positions and a gated SiLU.

    Biases and QK-norm are applied if the checkpoint contains them.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    """`max_position_embeddings`: the longest sequence that the model was trained for."""
    has_tied_embeddings: bool
    labels: tuple[str, ...] = ()
    """Labels of a classifier; empty for a generative model."""
    rope: Rope

    @classmethod
    def read(cls, path: str) -> "Architecture":
        """Read the architecture from a model directory. Raise `ConfigError` if the engine does not support the model."""
        file = os.path.join(path, "config.json")
        config = read_json(file)
        try:
            return cls._of(config)
        except KeyError as error:
            raise ConfigError(f"{file}: {error.args[0]} is missing") from None
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    @classmethod
    def _of(cls, config: dict[str, Any]) -> "Architecture":
        name = (config.get("architectures") or ["none"])[0]
        labels: tuple[str, ...] = ()
        if name.endswith(CLASSIFIER):
            name = name.removesuffix(CLASSIFIER) + SPEAKER
            labels = _labels(config)
        if name not in SUPPORTED:
            raise ConfigError(f"the architecture is {name}; the engine computes {', '.join(SUPPORTED)}")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act is {config['hidden_act']!r}; the engine computes 'silu'")
        if config.get("quantization_config"):
            raise ConfigError("the checkpoint is quantized; the engine reads plain float weights")
        _refuse_sliding_window(config)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or (128 if name == "Qwen3ForCausalLM" else hidden // heads))
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads or head_dim % 2:
            raise ConfigError(f"{heads} heads of {head_dim} cannot share {kv_heads} key-value heads")
        context_length = int(config["max_position_embeddings"])
        return cls(
            name=name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context_length=context_length,
            labels=labels,
            has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=Rope.read(config, head_dim, context_length),
        )


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels, named as in `transformers`; two labels by default."""
    named = config.get("id2label")
    if not named:
        return tuple(f"LABEL_{number}" for number in range(int(config.get("num_labels", 2))))
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _refuse_sliding_window(config: dict[str, Any]) -> None:
    kinds = config.get("layer_types")
    if kinds is None and config.get("use_sliding_window") and config.get("sliding_window"):
        is_sliding = int(config.get("max_window_layers", 28)) < int(config["num_hidden_layers"])
    else:
        is_sliding = any(kind != "full_attention" for kind in kinds or ())
    if is_sliding:
        raise ConfigError("some layers attend to a sliding window; the engine computes full attention only")


def cache_size(config: CpuConfig, shape: Architecture) -> tuple[int, int]:
    """Return the longest sequence and the number of blocks. Raise `ConfigError` if the requested sizes do not fit."""
    context_length = config.max_model_len or shape.context_length
    if context_length > shape.rope.reach:
        raise ConfigError(f"--max-model-len {context_length}: must be at most {shape.rope.reach}, the model's maximum")
    blocks = config.kv_cache_blocks or _affordable_blocks(config, shape, context_length)
    cached_tokens = blocks * config.block_size
    if cached_tokens >= context_length:
        return context_length, blocks
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {context_length}: the KV cache holds {blocks} blocks of {config.block_size} tokens"
        )
    logger.warning(
        "the KV cache holds %d tokens, which limits the context; the model supports %d (raise --kv-cache-memory-mb)",
        cached_tokens,
        context_length,
    )
    return cached_tokens, blocks


def _affordable_blocks(config: CpuConfig, shape: Architecture, context_length: int) -> int:
    """Return the number of blocks that fit into the memory, at most as many as all slots can fill."""
    token_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    affordable = config.kv_cache_memory_mb * 2**20 // (token_bytes * config.block_size)
    wanted = config.max_num_seqs * -(-context_length // config.block_size)
    return max(1, min(affordable, wanted))
