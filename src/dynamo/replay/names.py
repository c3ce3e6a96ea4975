"""Names: hashes of a trace's block names, as used by engines and routers.

A trace's block of, for example, 512 tokens corresponds to eight engine blocks of 64. Hashes are computed from names
instead of tokens, so no tokens are generated. Tokens after a prompt's last complete block have no name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamo.core.errors import ConfigError
from dynamo.tokens.hashing import U64, packed_sequence_hashes, unpacked_hashes

Hashes = NDArray[np.uint64]
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Constants of SplitMix64's finalizer."""


@dataclass(slots=True)
class PromptNames:
    """Hashes of a prompt's complete blocks."""

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
        self._places = np.arange(self._parts, dtype=np.uint64)
        """Numbers of the engine's blocks in a block of the trace."""

    def names(self, hash_ids: Sequence[int], tokens: int) -> PromptNames:
        """Return the blocks of a prompt of `tokens` tokens. Raise `ConfigError` if there are too few hash ids."""
        complete = tokens // self._engine_tokens
        blocks = -(-complete // self._parts)
        if len(hash_ids) < blocks * self._joined:
            raise ConfigError(f"{len(hash_ids)} hash_ids do not cover a prompt of {tokens} tokens")
        hashes = self._hashes(hash_ids[: blocks * self._joined])[:complete]
        packed = hashes.astype(">u8").tobytes()
        return PromptNames(list(unpacked_hashes(packed_sequence_hashes(packed))), packed)

    def _hashes(self, hash_ids: Sequence[int]) -> Hashes:
        """Return a hash for each engine block of these blocks of the trace."""
        ids = np.array([name & U64 for name in hash_ids], np.uint64)
        if self._joined > 1:
            columns = ids.reshape(-1, self._joined)
            hashes = mixed(columns[:, 0])
            for column in range(1, self._joined):
                hashes = mixed(hashes ^ columns[:, column])
            return hashes
        return mixed((ids[:, None] * np.uint64(self._parts) + self._places).reshape(-1))


def mixed(values: Hashes) -> Hashes:
    """Return hashes of integers by the finalizer of SplitMix64, which gives different values different hashes."""
    values = (values ^ (values >> SHIFTS[0])) * FACTORS[0]
    values = (values ^ (values >> SHIFTS[1])) * FACTORS[1]
    return values ^ (values >> SHIFTS[2])
