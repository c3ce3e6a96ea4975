"""Names: hashes of a trace's block names, as used by engines and routers.

A trace's block of, for example, 512 tokens corresponds to eight engine blocks of 64. Hashes are computed from names
instead of tokens, so no tokens are generated. Tokens after a prompt's last complete block have no name.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from dynamo.core.errors import ConfigError
from dynamo.tokens.hashing import U64, packed_sequence_hashes

REMEMBERED_MAX = 1 << 15  # Names whose hashes are cached: popular prefixes, some 15 MB.


@dataclass(slots=True)
class PromptNames:
    """Hashes of a prompt's complete blocks."""

    tokens_hashes: list[int]
    sequence_hashes: list[int]
    packed: bytes
    """Token hashes in the router's packed form."""


class Namer:
    """Conversion of names for one block size of the trace and one of the engines."""

    def __init__(self, trace_block_tokens: int, engine_block_tokens: int) -> None:
        if trace_block_tokens % engine_block_tokens and engine_block_tokens % trace_block_tokens:
            raise ConfigError(
                f"block size {engine_block_tokens} does not fit the trace's block size {trace_block_tokens}: "
                "one must be a multiple of the other (--trace-block-size, block_size of --extra-engine-args)"
            )
        self._engine_tokens = engine_block_tokens
        self._parts = max(1, trace_block_tokens // engine_block_tokens)
        self._joined = max(1, engine_block_tokens // trace_block_tokens)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def names(self, hash_ids: Sequence[int], tokens: int) -> PromptNames:
        """Return the blocks of a prompt of `tokens` tokens. Raise `ConfigError` if there are too few hash ids."""
        complete = tokens // self._engine_tokens
        found: list[int] = []
        for at in range(0, len(hash_ids) // self._joined * self._joined, self._joined):
            if len(found) >= complete:
                break
            found += self._blocks(tuple(hash_ids[at : at + self._joined]))
        if len(found) < complete:
            raise ConfigError(f"{len(hash_ids)} hash_ids do not cover a prompt of {tokens} tokens")
        del found[complete:]
        packed = struct.pack(f">{complete}Q", *found)
        chained = list(struct.unpack(f">{complete}Q", packed_sequence_hashes(packed)))
        return PromptNames(found, chained, packed)

    def _blocks(self, ids: tuple[int, ...]) -> list[int]:
        known = self._known.get(ids)
        if known is None:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            head = struct.pack(f"<{len(ids)}Q", *(name & U64 for name in ids))
            known = [xxh3_64_intdigest(head + bytes((part & 255, part >> 8))) for part in range(self._parts)]
            self._known[ids] = known
        return known
