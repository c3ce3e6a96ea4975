import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler.models import model_config, model_directory, stored_bytes
from dynamo.profiler.spec import ProfileSpec, profile_spec


def spec(model: str, **changes: Any) -> ProfileSpec:
    hardware = {"gpuSku": "h100_sxm", "numGpusPerNode": 8}
    return profile_spec({"model": model, "image": "i", "hardware": hardware, **changes})


def test_configuration_of_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert model_config(spec(str(tmp_path))) == {"hidden_size": 8}


def test_model_in_the_cache_volume_precedes_the_name(tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text('{"hidden_size": 9}')
    cache = {"pvcName": "models", "pvcModelPath": "qwen", "pvcMountPath": str(tmp_path)}
    assert model_config(spec("Qwen/Qwen3-32B", modelCache=cache)) == {"hidden_size": 9}
    absent = {**cache, "pvcModelPath": "other"}
    assert model_directory(spec("Qwen/Qwen3-32B", modelCache=absent)) is None
    assert model_config(spec("Qwen/Qwen3-32B", modelCache=absent))["hidden_size"] == 5120


@pytest.mark.parametrize(("text", "error"), [(None, "has no config.json"), ("{", "cannot read"), ("[]", "JSON object")])
def test_unusable_directories_are_refused(tmp_path: Path, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=error):
        model_config(spec(str(tmp_path)))


def test_size_of_weights_is_that_of_the_index_or_of_the_files(tmp_path: Path) -> None:
    assert stored_bytes(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert stored_bytes(tmp_path) == 4
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 99}}))
    assert stored_bytes(tmp_path) == 99
    assert stored_bytes(None) is None
