"""Layout: the layout of a block's bytes, and the header that identifies a block outside memory. Pure."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from dynamo.kvbm.logical.blocks import BlockIdentity

PAGE_BYTES = 4096
"""Alignment that direct I/O requires for addresses, lengths and file offsets."""

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"DYNKVBM1"
_HEADER = struct.Struct("<8sQQQQIIQQ")
HEADER_BYTES = _HEADER.size + 8
"""Size of a header, including its own checksum at the end."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape, data type and model of a block."""

    shape: tuple[int, ...]
    dtype: str
    model: str
    """Everything that determines the meaning of the numbers: the model, its revision, its quantisation."""

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def stride_bytes(self) -> int:
        """Distance between two blocks, in whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def fingerprint(self) -> int:
        """Hash that is equal for layouts with interchangeable blocks, and differs for all others."""
        return xxh3_64_intdigest(repr((self.shape, self.dtype, self.model)).encode())


class CorruptBlock(Exception):
    """The bytes differ from those that were written."""


def checksum(data: Bytes) -> int:
    return xxh3_64_intdigest(data.data)


def pack_header(identity: BlockIdentity, data: Bytes, fingerprint: int) -> bytes:
    """Return the header of a block."""
    parent = identity.parent_hash
    has_parent = 0 if parent is None else 1
    body = _HEADER.pack(
        _MAGIC,
        fingerprint,
        identity.sequence_hash,
        identity.tokens_hash,
        parent or 0,
        has_parent,
        identity.priority,
        data.nbytes,
        checksum(data),
    )
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Parsed header of a block."""

    identity: BlockIdentity
    length: int
    data_checksum: int

    def check(self, data: Bytes, sequence_hash: int) -> None:
        """Raise `CorruptBlock` if the bytes do not match the header."""
        if self.identity.sequence_hash != sequence_hash:
            raise CorruptBlock("another block")
        if self.length != data.nbytes:
            raise CorruptBlock(f"wrong length: {self.length} bytes were written, {data.nbytes} expected")
        if self.data_checksum != checksum(data):
            raise CorruptBlock("checksum mismatch")


def unpack_header(raw: bytes | memoryview, fingerprint: int) -> BlockHeader:
    """Parse a header. Raise `CorruptBlock` for a missing or torn one, or one of another model or layout."""
    body, seal = bytes(raw[: _HEADER.size]), bytes(raw[_HEADER.size : HEADER_BYTES])
    if len(seal) < 8 or not body.startswith(_MAGIC):
        raise CorruptBlock("no block header found")
    if xxh3_64_intdigest(body) != int.from_bytes(seal, "little"):
        raise CorruptBlock("the header is torn")
    _, found, key, tokens_hash, parent, has_parent, priority, length, data_checksum = _HEADER.unpack(body)
    if found != fingerprint:
        raise CorruptBlock("the block is of another model or layout")
    return BlockHeader(BlockIdentity(key, tokens_hash, parent if has_parent else None, priority), length, data_checksum)


def parents_first(content: Iterable[tuple[int, BlockIdentity]]) -> dict[int, BlockIdentity]:
    """Order blocks such that each follows its parent, if the parent is among them."""
    items = list(content)
    by_parent: dict[int | None, list[tuple[int, BlockIdentity]]] = {}
    present = {identity.sequence_hash for _, identity in items}
    for slot, identity in items:
        parent = identity.parent_hash if identity.parent_hash in present else None
        by_parent.setdefault(parent, []).append((slot, identity))
    ordered: dict[int, BlockIdentity] = {}
    seen: set[int] = set()
    waiting = by_parent.get(None, [])[::-1]
    while waiting:
        slot, identity = waiting.pop()
        ordered[slot] = identity
        if identity.sequence_hash not in seen:
            seen.add(identity.sequence_hash)
            waiting += by_parent.get(identity.sequence_hash, [])[::-1]
    return ordered
