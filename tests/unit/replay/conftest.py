"""Fixtures of the replay tests."""

import pytest

from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession
from dynamo.replay.synthetic import Shape, sessions


@pytest.fixture
def engine() -> EngineArgs:
    """A small one: prompts are cut in chunks, and the cache evicts."""
    return EngineArgs(num_gpu_blocks=256, block_size=16, max_num_seqs=16, max_num_batched_tokens=512)


@pytest.fixture
def chatty() -> list[ReplaySession]:
    """Return conversations of three turns with common prefixes, four a second."""
    shape = Shape(
        input_tokens=300,
        output_tokens=40,
        requests=90,
        turns=3,
        shared_prefix_ratio=0.5,
        prefix_groups=4,
        inter_turn_delay_ms=500,
        request_rate=4,
        block_tokens=64,
    )
    return sessions(shape)
