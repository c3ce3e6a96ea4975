"""Checkpoint: the tensors of a directory in Hugging Face layout, as float32."""

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
class _Entry:
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""


class Checkpoint:
    """Tensors by name, read when they are asked for. Remembers which were, so that none is overlooked."""

    def __init__(self, path: str, *, single: str = SINGLE) -> None:
        """`single` is the file's name where all tensors are in one."""
        self.path = path
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[str, npt.NDArray[np.uint8]] = {}
        self._read: set[str] = set()
        for file in _files(path, single):
            self._entries |= _header(file)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str, *shape: int) -> F32:
        """One tensor, converted to float32, in memory of its own. Raises `ConfigError` if it is not of this shape."""
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(f"{self.path}: the checkpoint has no tensor {name}")
        if entry.shape != shape:
            raise ConfigError(f"{entry.file}: {name} has shape {entry.shape}; config.json asks for {shape}")
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
        """The tensor if the checkpoint has it."""
        return self.tensor(name, *shape) if name in self else None

    def unread(self) -> list[str]:
        """The tensors that nobody asked for."""
        return sorted(self._entries.keys() - self._read)


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises `ConfigError` with the file's name."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _files(path: str, name: str) -> list[str]:
    single = os.path.join(path, name)
    if os.path.exists(single):
        return [single]
    index = os.path.join(path, INDEX)
    if not os.path.exists(index):
        raise ConfigError(f"{path}: neither {SINGLE} nor {INDEX} is there")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError(f"{index}: no weight_map")
    return [os.path.join(path, name) for name in sorted(set(map(str, shards.values())))]


def _header(file: str) -> dict[str, _Entry]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise ConfigError(f"{file}: not a safetensors file")
            header = json.loads(stream.read(length))
            size = stream.seek(0, os.SEEK_END) - 8 - length
    except FileNotFoundError:
        raise ConfigError(f"{file}: the index names it, but it is not there") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error})") from None
    header.pop("__metadata__", None)
    entries = {}
    for name, meta in header.items():
        begin, end = meta["data_offsets"]
        if end > size:
            raise ConfigError(f"{file}: cut short: {name} ends at byte {end} of {size}")
        entries[name] = _Entry(file, meta["dtype"], tuple(meta["shape"]), 8 + length + begin)
    return entries
