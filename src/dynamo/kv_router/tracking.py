"""TrackingHash: hashes by which routers identify the blocks of active requests (`--router-tracking-hash`).

    public-xxh3-v1   the public sequence hashes: any process that has the prompt can compute them
    keyed-xxh3-v1    the same construction with seeds derived from a secret: only routers with the same key agree

The two seeds are the first sixteen bytes of a keyed BLAKE3 over everything that separates prompts: key id, model, routing
group, block size, salt, adapter, and whether blocks include the next token. They equal those of Dynamo 1.6.1.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from xxhash import xxh3_64_intdigest

from dynamo.core.errors import ConfigError
from dynamo.kv_router.runs import pack
from dynamo.tokens.hashing import mixed_block_hashes

Algorithm = Literal["public-xxh3-v1", "keyed-xxh3-v1"]
PUBLIC: Algorithm = "public-xxh3-v1"
KEYED: Algorithm = "keyed-xxh3-v1"

KEY_BYTES = 32
DOMAIN = b"dynamo.router.tracking-hash/keyed-xxh3-v1\0"
GROUP = "default"
"""The routing group of workers found through discovery."""


@dataclass(frozen=True, slots=True)
class TrackingKey:
    """A secret and its id."""

    key_id: str
    secret: bytes = field(repr=False)

    def seeds(
        self,
        model: str,
        block_size: int,
        *,
        group: str = GROUP,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        is_eagle: bool = False,
    ) -> tuple[int, int]:
        """Return the seeds of the block hash and of the chain of blocks."""
        from blake3 import blake3

        parts = [
            DOMAIN,
            _framed(1, self.key_id.encode()),
            _framed(2, model.encode()),
            _framed(3, group.encode()),
            _framed(4, struct.pack("<I", block_size)),
            _optional(5, cache_salt),
            _optional(6, lora_name),
            _framed(7, bytes([is_eagle])),
        ]
        found: tuple[int, int] = struct.unpack_from("<QQ", blake3(b"".join(parts), key=self.secret).digest())
        return found

    def sequence(
        self,
        tokens: Sequence[int],
        block_size: int,
        seeds: tuple[int, int],
        media: Sequence[Sequence[int]] = (),
        *,
        is_eagle: bool = False,
    ) -> bytes:
        """Return a prompt's packed sequence hashes under those seeds."""
        block_seed, chain_seed = seeds
        hashes = mixed_block_hashes(tokens, block_size, block_seed, media, is_eagle=is_eagle)
        for number in range(1, len(hashes)):
            hashes[number] = xxh3_64_intdigest(struct.pack("<QQ", hashes[number - 1], hashes[number]), chain_seed)
        return pack(hashes)


def check_tracking(algorithm: str, key_file: str | None, key_id: str | None) -> None:
    """Raise `ConfigError` for inconsistent settings."""
    if algorithm == PUBLIC:
        if key_file is not None or key_id is not None:
            raise ConfigError("--router-tracking-key-file and -key-id need --router-tracking-hash keyed-xxh3-v1")
        return
    if key_file is None:
        raise ConfigError(f"--router-tracking-hash {algorithm} needs --router-tracking-key-file")
    if not key_id or key_id.strip() != key_id:
        raise ConfigError(
            f"--router-tracking-hash {algorithm} needs --router-tracking-key-id, a name without surrounding spaces"
        )


def read_key(path: str, key_id: str) -> TrackingKey:
    """Read the key from a file. Raises `ConfigError`, whose message does not contain the key."""
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--router-tracking-key-file cannot be read: {error.strerror}") from None
    if len(secret) != KEY_BYTES:
        raise ConfigError(
            f"--router-tracking-key-file holds {len(secret)} bytes: must hold exactly {KEY_BYTES} raw bytes"
        )
    return TrackingKey(key_id, secret)


def _framed(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + struct.pack("<Q", len(value)) + value


def _optional(tag: int, value: str | None) -> bytes:
    if not value:
        return bytes([tag, 0])
    text = value.encode()
    return bytes([tag, 1]) + struct.pack("<Q", len(text)) + text
