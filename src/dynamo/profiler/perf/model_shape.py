"""Model shape: the sizes in a model's `config.json` from which weights, operations and cache of a token are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Sections of multimodal models that describe the language model."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
STATE_SPACE = ("mamba_d_state", "ssm_state_size", "mamba_num_heads", "linear_num_value_heads", "state_size")
"""Fields of layers whose state does not grow with the context; their step times are not modelled."""
QUANTIZED_BITS = {"fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5, "modelopt_fp4": 4.5, "awq": 4.25, "gptq": 4.25}
DTYPE_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: one compressed key-value vector per token, shared by all heads."""

    kv_rank: int
    rope_dim: int
    q_rank: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts of a layer."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: int = 0
    """Layers with a dense MLP instead of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    weight_bits: float = 16.0
    """Bits per weight of linear layers, scales included; embeddings have 16."""
    kv_bits: float = 16.0
    quant_block: int = 1
    """Rows and columns of one scale of quantized weights."""
    ties_embeddings: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def is_moe(self) -> bool:
        """Return whether layers have experts."""
        return self.experts is not None

    @property
    def attention_params(self) -> int:
        """Return the weights of one layer's attention."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        one = self.latent
        query_dim = self.heads * (one.nope_dim + one.rope_dim)
        query = one.q_rank * (self.hidden + query_dim) if one.q_rank else self.hidden * query_dim
        keys_values = self.hidden * (one.kv_rank + one.rope_dim) + one.kv_rank * self.heads * (one.nope_dim + one.v_dim)
        return query + keys_values + self.heads * one.v_dim * self.hidden

    @property
    def expert_params(self) -> int:
        """Return the weights of one expert; zero without experts."""
        return 3 * self.hidden * self.experts.intermediate if self.experts else 0

    @property
    def expert_layers(self) -> int:
        """Return the number of layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def dense_params(self) -> int:
        """Return the weights that every token uses, of all layers, without embeddings."""
        attention = self.layers * self.attention_params
        mlp = (self.layers - self.expert_layers) * 3 * self.hidden * self.intermediate
        shared = self.expert_layers * 3 * self.hidden * self.experts.shared_intermediate if self.experts else 0
        return attention + mlp + shared

    @property
    def routed_params(self) -> int:
        """Return the weights of all experts of all layers."""
        return self.expert_layers * self.expert_params * (self.experts.count if self.experts else 0)

    @property
    def active_params(self) -> int:
        """Return the weights that one token uses, with the output projection."""
        routed = self.expert_layers * self.expert_params * (self.experts.per_token if self.experts else 0)
        return self.dense_params + routed + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all weights."""
        embeddings = self.hidden * self.vocab * (1 if self.ties_embeddings else 2)
        return (self.dense_params + self.routed_params) * self.weight_bits / 8 + embeddings * 2

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the bytes of one token in the cache, of all layers and heads."""
        values = 2 * self.kv_heads * self.head_dim
        if self.latent is not None:
            values = self.latent.kv_rank + self.latent.rope_dim
        return self.layers * values * self.kv_bits / 8


class UnsupportedModel(ConfigError):
    """The model has parts whose performance is not modelled."""


def model_shape(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Return the shape of a `config.json`. Raise `UnsupportedModel` for one that the performance model does not cover."""
    body: Mapping[str, Any] = config
    for section in NESTED:
        if isinstance(body.get(section), Mapping):
            body = {**config, **body[section]}
    architecture = str((config.get("architectures") or ["unknown"])[0])
    if any(body.get(field) for field in STATE_SPACE):
        raise UnsupportedModel(
            f"{name}: {architecture} has state-space layers, which the performance model does not cover"
        )
    try:
        heads = int(body["num_attention_heads"])
        hidden = int(body["hidden_size"])
        layers = int(body["num_hidden_layers"])
        vocab = int(body["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{name}: config.json of {architecture} lacks {error}: not a decoder-only transformer"
        ) from None
    experts = _experts(body, layers)
    bits, block = _quantization(config.get("quantization_config") or body.get("quantization_config"), body)
    return ModelShape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(body.get("num_key_value_heads") or heads),
        head_dim=int(body.get("head_dim") or hidden // heads),
        intermediate=int(body.get("intermediate_size") or body.get("ffn_hidden_size") or 4 * hidden),
        vocab=vocab,
        max_context=int(body.get("max_position_embeddings") or body.get("max_sequence_length") or 0),
        weight_bits=bits,
        quant_block=block,
        ties_embeddings=bool(body.get("tie_word_embeddings", False)),
        latent=_latent(body),
        experts=experts,
    )


def _latent(body: Mapping[str, Any]) -> LatentAttention | None:
    if not body.get("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_rank=int(body["kv_lora_rank"]),
        rope_dim=int(body.get("qk_rope_head_dim") or 64),
        q_rank=int(body.get("q_lora_rank") or 0),
        nope_dim=int(body.get("qk_nope_head_dim") or 128),
        v_dim=int(body.get("v_head_dim") or 128),
    )


def _experts(body: Mapping[str, Any], layers: int) -> Experts | None:
    count = next((int(body[name]) for name in EXPERTS if body.get(name)), 0)
    if count < 2:
        return None
    intermediate = int(body.get("moe_intermediate_size") or body.get("intermediate_size") or 0)
    shared = int(body.get("shared_expert_intermediate_size") or 0)
    if not shared and body.get("n_shared_experts"):
        shared = int(body["n_shared_experts"]) * intermediate
    per_token = next(
        (int(body[name]) for name in ("num_experts_per_tok", "moe_topk", "experts_per_token") if body.get(name)), 1
    )
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=intermediate,
        shared_intermediate=shared,
        dense_layers=min(layers, int(body.get("first_k_dense_replace") or 0)),
    )


def _quantization(config: Any, body: Mapping[str, Any]) -> tuple[float, int]:
    """Return the bits per weight, and the width of a scale's block."""
    dtype = str(body.get("torch_dtype") or body.get("dtype") or "bfloat16")
    plain = DTYPE_BITS.get(dtype, 16.0)
    if not isinstance(config, Mapping):
        return plain, 1
    block = config.get("weight_block_size")
    width = int(block[0]) if isinstance(block, list) and block else 1
    method = str(config.get("quant_algo") or config.get("quant_method") or "").lower()
    if isinstance(config.get("bits"), int):
        return config["bits"] + 0.25, width
    if method == "compressed-tensors":
        groups = config.get("config_groups") or {}
        sizes = [((one or {}).get("weights") or {}).get("num_bits") for one in groups.values()]
        known = [size for size in sizes if isinstance(size, int)]
        return (float(known[0]) if known else 8.0), width
    return next((bits for name, bits in QUANTIZED_BITS.items() if name in method), plain), width
