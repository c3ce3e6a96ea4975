"""Layout: description of this engine's blocks, so that workers never exchange blocks of different models."""

import glob
import os

from xxhash import xxh3_128

from dynamo.cpu.architecture import Architecture
from dynamo.kvbm.transfer.base import Layout

PIECE_BYTES = 1 << 24


def layout_of(path: str, shape: Architecture, block_tokens: int) -> Layout:
    """Return the layout of a cache for the model in a directory."""
    return Layout(
        model=fingerprint(path),
        dtype="float32",
        item_bytes=4,
        block_tokens=block_tokens,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )


def fingerprint(path: str) -> str:
    """Return a hash of the weights, independent of their location."""
    digest = xxh3_128()
    with open(os.path.join(path, "config.json"), "rb") as file:
        digest.update(file.read())
    for name in sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors"))):
        size = os.path.getsize(name)
        digest.update(f"{os.path.basename(name)} {size}".encode())
        with open(name, "rb") as file:  # Hash the whole file: training may change only a few weights.
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
