"""Room: maximum sequence length and number of KV blocks for the flags and the model. Pure except for a warning."""

import logging

from dynamo.core.errors import ConfigError
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import CpuConfig

logger = logging.getLogger(__name__)


def room_of(config: CpuConfig, shape: Architecture) -> tuple[int, int]:
    """Return the longest sequence and the number of blocks. Raise `ConfigError` if the requested sizes do not fit."""
    context_length = config.max_model_len or shape.context_length
    if context_length > shape.rope.reach:
        raise ConfigError(f"--max-model-len {context_length}: must be at most {shape.rope.reach}, the model's maximum")
    blocks = config.kv_cache_blocks or _affordable_blocks(config, shape, context_length)
    room = blocks * config.block_size
    if room >= context_length:
        return context_length, blocks
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {context_length}: the KV cache holds {blocks} blocks of {config.block_size} tokens"
        )
    logger.warning(
        "the KV cache holds %d tokens, which limits the context; the model supports %d (raise --kv-cache-memory-mb)",
        room,
        context_length,
    )
    return room, blocks


def _affordable_blocks(config: CpuConfig, shape: Architecture, context_length: int) -> int:
    """Return the number of blocks that fit into the memory, at most as many as all slots can fill."""
    token_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    affordable = config.kv_cache_memory_mb * 2**20 // (token_bytes * config.block_size)
    wanted = config.max_num_seqs * -(-context_length // config.block_size)
    return max(1, min(affordable, wanted))
