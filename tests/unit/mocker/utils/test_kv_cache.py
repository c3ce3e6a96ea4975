"""Bytes of a token's keys and values."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.mocker.utils.kv_cache import compute_kv_bytes_per_token, get_kv_cache_dtype_bytes

TEXT = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("config", [TEXT, {"text_config": TEXT}, {"thinker_config": {"text_config": TEXT}}])
def test_kv_bytes_per_token_are_computed_from_the_model_config(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compute_kv_bytes_per_token(str(tmp_path)) == 256
    assert compute_kv_bytes_per_token(str(tmp_path), "fp8") == 128


@pytest.mark.parametrize(("kind", "size"), [("int8", 1), ("fp8_e4m3", 1), ("float32", 4), ("auto", 2), ("other", 2)])
def test_kv_cache_dtype_sizes_are_in_bytes(kind: str, size: int) -> None:
    assert get_kv_cache_dtype_bytes(SimpleNamespace(dtype="torch.bfloat16"), kind) == size


def test_nested_model_config_is_read_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**TEXT))
    read = SimpleNamespace(from_pretrained=lambda path, **_: config if path == "org/model" else None)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=read))
    assert compute_kv_bytes_per_token("org/model") == 256


def test_kv_bytes_per_token_of_an_unknown_model_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert compute_kv_bytes_per_token(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    assert compute_kv_bytes_per_token(str(tmp_path)) is None
