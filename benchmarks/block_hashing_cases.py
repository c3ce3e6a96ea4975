"""The cases of `benchmarks.block_hashing`; runs under either interpreter and imports nothing of the project."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

BLOCKS = (16, 64, 512)
BLOCK_SIZES = (16, 64)
CALLS_BLOCKS = 20_000
"""Blocks hashed in one measurement."""


def tokens_of(blocks: int, block_size: int) -> list[int]:
    """Return the tokens of a prompt, the same ones in every process."""
    rng = random.Random(blocks)
    return [rng.randrange(150_000) for _ in range(blocks * block_size)]


def measured(hashed: Callable[[Sequence[int], int], Any]) -> dict[str, float]:
    """Return nanoseconds of processor time per block, by case."""
    found = {}
    for block_size in BLOCK_SIZES:
        for blocks in BLOCKS:
            tokens, calls = tokens_of(blocks, block_size), CALLS_BLOCKS // blocks
            hashed(tokens, block_size)
            began = time.process_time_ns()
            for _ in range(calls):
                hashed(tokens, block_size)
            found[f"{blocks} blocks of {block_size}"] = (time.process_time_ns() - began) / calls / blocks
    return found
