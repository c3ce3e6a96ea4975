"""Block and sequence hashes, bit-identical to those of Dynamo 1.6.1.

    tokens_hash   = XXH3-64(seed S, the block's tokens as little-endian u32)
    sequence_hash = tokens_hash of the first block, then XXH3-64(seed 1337, LE u64 previous, LE u64 tokens_hash)

A sequence hash covers its whole prefix, so two requests share a prefix of n blocks exactly when their n-th
sequence hashes are equal. A trailing partial block has no hash.

`_hashing.c` has equivalents of two functions that hash a whole prompt in one call (docs/decisions/0008). They are built where a
compiler is available at installation; elsewhere the Python functions, their definition, are used.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_digest, xxh3_64_intdigest

__all__ = [
    "SEED", "U64", "as_u32", "block_hashes", "mixed_block_hashes", "next_sequence_hash", "packed_block_hashes", "packed_hashes",
    "packed_sequence_hashes", "python_packed_block_hashes", "python_packed_sequence_hashes", "seed_of", "sequence_hashes",
    "unpacked_hashes",
]  # fmt: skip

SEED = 1337  # Upstream's constant.
U64 = (1 << 64) - 1


def seed_of(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return the seed of a request's block hashes; it depends on the adapter and the salt, so that blocks are not shared."""
    seed = SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & U64


def python_packed_block_hashes(tokens: Sequence[int], block_size: int, seed: int = SEED) -> bytes:
    """Return the block hashes, eight bytes each, most significant first, to compare prompts as memory.

    Raise `OverflowError` or `TypeError` for a token that is not an unsigned 32-bit integer.
    """
    view, width = memoryview(as_u32(tokens)), block_size * 4
    return b"".join([xxh3_64_digest(view[at : at + width], seed) for at in range(0, len(view) - width + 1, width)])


def as_u32(tokens: Sequence[int]) -> bytes:
    """Return tokens in the form that is hashed: four bytes each, least significant first."""
    data = array("I", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def next_sequence_hash(previous: int | None, tokens_hash: int) -> int:
    """Return the sequence hash of a block, given that of the preceding one (None for the first block)."""
    if previous is None:
        return tokens_hash
    return xxh3_64_intdigest(struct.pack("<QQ", previous, tokens_hash), SEED)


def sequence_hashes(tokens_hashes: Sequence[int]) -> list[int]:
    """Return the sequence hash of each block of a prefix."""
    hashes: list[int] = []
    previous: int | None = None
    for tokens_hash in tokens_hashes:
        previous = next_sequence_hash(previous, tokens_hash)
        hashes.append(previous)
    return hashes


def python_packed_sequence_hashes(packed: bytes) -> bytes:
    """Return the sequence hash of each block of a prefix; both packed as by `packed_block_hashes`."""
    count = len(packed) // 8
    return struct.pack(f">{count}Q", *sequence_hashes(struct.unpack(f">{count}Q", packed)))


try:
    from dynamo.tokens._hashing import packed_block_hashes, packed_sequence_hashes
except ImportError:  # Not built where no compiler was available.
    packed_block_hashes, packed_sequence_hashes = python_packed_block_hashes, python_packed_sequence_hashes


def block_hashes(tokens: Sequence[int], block_size: int, seed: int = SEED) -> list[int]:
    """Return the hash of each complete block's tokens, first to last. Raise as `packed_block_hashes`."""
    packed = packed_block_hashes(tokens, block_size, seed)
    return list(unpacked_hashes(packed))


def packed_hashes(hashes: Sequence[int]) -> bytes:
    """Return hashes packed as by `packed_block_hashes`."""
    return struct.pack(f">{len(hashes)}Q", *hashes)


def unpacked_hashes(packed: bytes) -> tuple[int, ...]:
    """Return the hashes that `packed_hashes` or `packed_block_hashes` packed."""
    return struct.unpack(f">{len(packed) // 8}Q", packed)


def mixed_block_hashes(
    tokens: Sequence[int],
    block_size: int,
    seed: int = SEED,
    media: Sequence[Sequence[int]] = (),
    *,
    is_eagle: bool = False,
) -> list[int]:
    """Return the block hashes for prompts with images, and for engines that look one token ahead.

    `media` are, by block, the hashes of the images, videos and sounds that overlap it; a block beyond them has none.
    With `is_eagle` a block is hashed together with the next token, and a block without one has no hash.
    """
    view, stride = memoryview(as_u32(tokens)), block_size * 4
    width = stride + 4 if is_eagle else stride
    hashes = []
    for number, at in enumerate(range(0, len(view) - width + 1, stride)):
        block: bytes | memoryview = view[at : at + width]
        if number < len(media) and media[number]:
            block = bytes(block) + struct.pack(f"<{len(media[number])}Q", *sorted(media[number]))
        hashes.append(xxh3_64_intdigest(block, seed))
    return hashes
