"""Bytes of a token's keys and values, by a model's config.json, or by transformers where its layout is another."""

import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
NESTED = ("text_config", "llm_config", "language_config", "decoder", "thinker_config")
"""Fields with the configuration of the text model, within that of a model of several modalities."""
NESTING_MAX = 3
VALUE_BYTES = {
    "float32": 4,
    **dict.fromkeys(
        ("fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "float8_e4m3fn", "float8_e5m2", "int8"), 1
    ),
}
"""Bytes of a value, for types other than the 16 bits of most models."""


def compute_kv_bytes_per_token(model_path: str, kv_cache_dtype: str = "auto") -> int | None:
    """Return the bytes of a token's keys and values of a directory or a hub id; None, logged, if they are unknown."""
    try:
        config = _text_config(model_path)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("cannot compute kv_bytes_per_token: the configuration of %s: %s", model_path, error)
        return None
    found = kv_bytes(config, kv_cache_dtype)
    if found is None:
        logger.warning("cannot compute kv_bytes_per_token: %s lacks %s", model_path, " or ".join(SIZES))
    return found


def kv_bytes(config: Any, kv_cache_dtype: str) -> int | None:
    """Return layers * 2 * heads * head size * value bytes; None if a configuration does not state them."""
    layers, heads, hidden = (stated(config, name) for name in SIZES)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and heads):
        return None
    kv_heads = stated(config, "num_key_value_heads", "num_kv_heads") or heads
    head_size = stated(config, "head_dim") or hidden // heads
    return int(layers * 2 * kv_heads * head_size * get_kv_cache_dtype_bytes(config, kv_cache_dtype))


def get_kv_cache_dtype_bytes(config: Any, kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of a value; `auto` is the type of the model."""
    kind = kv_cache_dtype
    if kind == "auto":
        kind = str(stated(config, "dtype", "torch_dtype")).removeprefix("torch.")
    return VALUE_BYTES.get(kind, 2)


def stated(config: Any, *names: str) -> Any:
    """Return the first value that a configuration, an object or a mapping, states."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


def text_model(config: Mapping[str, Any], depth: int = NESTING_MAX) -> Mapping[str, Any] | None:
    """Return the part of a config.json that states the text model's sizes."""
    if all(isinstance(config.get(name), int) for name in SIZES):
        return config
    nested = [config.get(name) for name in NESTED] if depth else []
    found = (text_model(one, depth - 1) for one in nested if isinstance(one, Mapping))
    return next((one for one in found if one is not None), None)


def _text_config(model_path: str) -> Any:
    """Return a model's configuration. Raise `OSError`, `ValueError`, `KeyError`."""
    folder = Path(model_path)
    if folder.is_dir():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = text_model(config)
        if found is not None:
            return found
        logger.info("the layout of %s is unknown: reading it with transformers", folder / "config.json")
    try:
        transformers = importlib.import_module("transformers")  # It imports torch, which most models do not need here.
    except ImportError as error:
        raise ValueError(f"{error}; pip install transformers") from None
    config = transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
