"""Facts about model directories and names."""

import json
from pathlib import Path

import pytest

from dynamo.ops.doctor import checkpoint
from dynamo.ops.doctor.checkpoint import checkpoint_facts, nearest_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model-1.safetensors").write_bytes(b"x" * 4096)
    return path


def test_complete_directory_has_architecture_tokenizer_and_weights(model: Path) -> None:
    facts = checkpoint_facts(str(model), {})
    assert (facts.path, facts.architecture, facts.has_tokenizer) == (str(model), "LlamaForCausalLM", True)
    assert (facts.config_error, facts.missing, facts.placeholders, facts.weights_bytes) == ("", (), (), 4096)


def test_missing_shards_and_pointers_are_found(model: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-3.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    facts = checkpoint_facts(str(model), {})
    assert (facts.missing, facts.placeholders) == (("model-2.safetensors",), ("model-3.safetensors",))


@pytest.mark.parametrize(("text", "words"), [(None, "no config.json"), ("{", "no valid JSON"), ("[]", "JSON object")])
def test_wrong_configuration_is_an_error(model: Path, text: str | None, words: str) -> None:
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    assert words in checkpoint_facts(str(model), {}).config_error


def test_path_that_does_not_exist_has_the_nearest_directory(model: Path) -> None:
    facts = checkpoint_facts(str(model.parent / "modle"), {})
    assert (facts.path, facts.is_name, facts.nearest) == ("", False, str(model))
    assert checkpoint_facts(str(model / "config.json"), {}).is_file
    assert nearest_directory("/zzzz/yyyy") == ""


def test_name_is_looked_up_in_the_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "cached_snapshot", {"org/cached": str(model)}.get)
    assert checkpoint_facts("org/cached", {}).path == str(model)
    facts = checkpoint_facts("org/other", {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "x"})
    assert (facts.is_name, facts.is_offline, facts.has_token) == (True, True, True)
