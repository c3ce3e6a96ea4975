"""Checkpoint: tensors of a Hugging Face model directory, as float32."""

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamo.core.errors import ConfigError

F32 = npt.NDArray[np.float32]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000  # The format's own limit; more means that the file is something else.
STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Position from the start of the file, in bytes."""


class Checkpoint:
    """Tensors by name, read on demand. Records which ones were read, so that unused tensors are detected."""

    def __init__(self, path: str, *, single: str = SINGLE) -> None:
        """`single`: file name of a checkpoint that consists of one file."""
        self.path = path
        self._entries: dict[str, _TensorEntry] = {}
        self._maps: dict[str, npt.NDArray[np.uint8]] = {}
        self._read: set[str] = set()
        for file in _files(path, single):
            self._entries |= _header(file)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str, *shape: int) -> F32:
        """Return one tensor as a float32 copy. Raise `ConfigError` if it is missing or has another shape."""
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(f"{self.path}: the checkpoint has no tensor {name}")
        if entry.shape != shape:
            raise ConfigError(f"{entry.file}: {name} has shape {entry.shape}; expected {shape} from config.json")
        dtype = STORED.get(entry.dtype)
        if dtype is None:
            raise ConfigError(f"{entry.file}: {name} is stored as {entry.dtype}; the engine reads {', '.join(STORED)}")
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, dtype=np.uint8, mode="r")
        self._read.add(name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        stored = self._maps[entry.file][entry.offset : entry.offset + size].view(dtype).reshape(shape)
        if entry.dtype == "BF16":  # The upper half of a float32.
            widened: F32 = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
            return widened
        return np.array(stored, dtype=np.float32)

    def optional(self, name: str, *shape: int) -> F32 | None:
        """Return the tensor, or None if the checkpoint does not contain it."""
        return self.tensor(name, *shape) if name in self else None

    def unread(self) -> list[str]:
        """Return the names of the tensors that were not read."""
        return sorted(self._entries.keys() - self._read)


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raise `ConfigError` with the file's name."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _files(path: str, name: str) -> list[str]:
    single = os.path.join(path, name)
    if os.path.exists(single):
        return [single]
    index = os.path.join(path, INDEX)
    if not os.path.exists(index):
        raise ConfigError(f"{path}: must contain {SINGLE} or {INDEX}")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError(f"{index}: no weight_map")
    return [os.path.join(path, name) for name in sorted(set(map(str, shards.values())))]


def _header(file: str) -> dict[str, _TensorEntry]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise ConfigError(f"{file}: not a safetensors file")
            header = json.loads(stream.read(length))
            size = stream.seek(0, os.SEEK_END) - 8 - length
    except FileNotFoundError:
        raise ConfigError(f"{file}: file listed in the index does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error})") from None
    header.pop("__metadata__", None)
    entries = {}
    for name, meta in header.items():
        begin, end = meta["data_offsets"]
        if end > size:
            raise ConfigError(f"{file}: truncated: {name} ends at byte {end} of {size}")
        entries[name] = _TensorEntry(file, meta["dtype"], tuple(meta["shape"]), 8 + length + begin)
    return entries
