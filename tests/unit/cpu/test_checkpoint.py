import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynamo.core.errors import ConfigError
from dynamo.cpu.checkpoint import Checkpoint


def write_raw(path: Path, dtype: str, shape: list[int], data: bytes) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_checkpoint_reads_float32_and_float16_as_float32(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 12).reshape(3, 4)
    save_file({"a": values.astype(np.float32), "b": values.astype(np.float16)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.tensor("a", 3, 4).dtype == checkpoint.tensor("b", 3, 4).dtype == np.float32
    assert np.allclose(checkpoint.tensor("a", 3, 4), values)
    assert np.allclose(checkpoint.tensor("b", 3, 4), values, atol=2e-3)


def test_checkpoint_converts_bfloat16_to_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 0.0, 3.0e38, 1e-30], np.float32)
    halves = (values.view(np.uint32) >> 16).astype("<u2")
    write_raw(tmp_path / "model.safetensors", "BF16", [5], halves.tobytes())
    read = Checkpoint(str(tmp_path)).tensor("w", 5)
    assert read.dtype == np.float32
    assert np.allclose(read, values, rtol=2**-7)
    assert read[:3].tolist() == [1.0, -2.5, 0.0]


def test_checkpoint_finds_a_tensor_in_its_shard(tmp_path: Path) -> None:
    shards = {"one": np.ones((2, 2), np.float32), "two": np.full((3,), 2, np.float32)}
    for name, tensor in shards.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in shards}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.tensor("two", 3).tolist() == [2, 2, 2]
    assert checkpoint.unread() == ["one"]


def test_checkpoint_tensors_are_writable(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.tensor("a", 3)[:] = 5
    assert checkpoint.tensor("a", 3).tolist() == [1, 1, 1]


def test_checkpoint_optional_tensor_may_be_absent(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert Checkpoint(str(tmp_path)).optional("b", 3) is None


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("absent", (3,), "no tensor absent"), ("a", (4,), r"a has shape \(3,\); expected \(4,\) from config.json")],
)
def test_checkpoint_error_names_the_tensor(tmp_path: Path, name: str, shape: Any, message: str) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        Checkpoint(str(tmp_path)).tensor(name, *shape)


def test_checkpoint_error_names_an_unsupported_dtype(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", "F8_E4M3", [4], b"\0" * 4)
    with pytest.raises(ConfigError, match=r"model\.safetensors: w is stored as F8_E4M3"):
        Checkpoint(str(tmp_path)).tensor("w", 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 64, "not a safetensors file"),
        (b"\x04\0\0\0\0\0\0\0nope", "not a safetensors file"),
        (b"", "not a safetensors file"),
    ],
)
def test_checkpoint_refuses_a_file_of_another_format(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Checkpoint(str(tmp_path))


def test_checkpoint_refuses_a_truncated_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, "F32", [4], b"\0" * 16)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="truncated: w ends at byte 16 of 13"):
        Checkpoint(str(tmp_path))


def test_checkpoint_refuses_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must contain model\.safetensors or"):
        Checkpoint(str(tmp_path))


def test_checkpoint_error_names_a_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"gone\.safetensors: file listed in the index does not exist"):
        Checkpoint(str(tmp_path))


def test_checkpoint_refuses_an_index_without_map(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        Checkpoint(str(tmp_path))
