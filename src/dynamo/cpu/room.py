"""Room: how long a sequence may be and how many KV blocks there are, given the flags and the model. Pure but for a warning."""

import logging

from dynamo.core.errors import ConfigError
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import CpuConfig

logger = logging.getLogger(__name__)


def room_of(config: CpuConfig, shape: Architecture) -> tuple[int, int]:
    """The longest sequence and the number of blocks. Raises `ConfigError` if what was asked for does not fit."""
    context_length = config.max_model_len or shape.context_length
    if context_length > shape.rope.reach:
        raise ConfigError(f"--max-model-len {context_length}: the model is made for {shape.rope.reach}")
    blocks = config.kv_cache_blocks or _affordable_blocks(config, shape, context_length)
    room = blocks * config.block_size
    if room >= context_length:
        return context_length, blocks
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {context_length}: the KV cache holds {blocks} blocks of {config.block_size} tokens"
        )
    logger.warning(
        "the KV cache holds %d tokens: they are the context, not the model's %d (see --kv-cache-memory-mb)",
        room,
        context_length,
    )
    return room, blocks


def _affordable_blocks(config: CpuConfig, shape: Architecture, context_length: int) -> int:
    """As many as the memory holds, but no more than all slots could ever fill."""
    token_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    affordable = config.kv_cache_memory_mb * 2**20 // (token_bytes * config.block_size)
    wanted = config.max_num_seqs * -(-context_length // config.block_size)
    return max(1, min(affordable, wanted))
