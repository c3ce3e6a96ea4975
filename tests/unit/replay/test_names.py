"""Names: blocks of engines from blocks of traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.replay.names import Namer


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_prompts_share_as_many_blocks_as_their_common_hash_id_prefix(one: list[int], other: list[int]) -> None:
    namer = Namer(64, 16)
    ours, theirs = (namer.names(ids, len(ids) * 64) for ids in (one, other))
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    pairs = zip(ours.sequence_hashes, theirs.sequence_hashes, strict=False)
    assert sum(a == b for a, b in pairs) == 4 * common
    assert ours.packed[: 32 * common] == theirs.packed[: 32 * common]


def test_only_complete_blocks_have_hashes() -> None:
    found = Namer(512, 64).names((3, 4), 700)
    assert len(found.sequence_hashes) == 10
    assert len(found.packed) == 80


def test_engine_block_can_span_several_trace_blocks() -> None:
    namer = Namer(16, 64)
    one, other = namer.names((1, 2, 3, 4, 5), 80), namer.names((1, 2, 3, 9, 5), 80)
    assert len(one.packed) == 8
    assert one.packed != other.packed


@given(st.sets(st.integers(0, (1 << 56) - 1), min_size=2, max_size=64))
def test_different_hash_ids_have_different_hashes(ids: set[int]) -> None:
    packed = Namer(512, 64).names(sorted(ids), 512 * len(ids)).packed
    assert len({packed[at : at + 8] for at in range(0, len(packed), 8)}) == 8 * len(ids)


def test_incompatible_block_sizes_and_missing_hash_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        Namer(512, 48)
    with pytest.raises(ConfigError, match="cover"):
        Namer(512, 64).names((1,), 2000)
