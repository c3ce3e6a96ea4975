import numpy as np
import pytest

from dynamo.cpu.prefill import COLUMNS_MAX, KEYS_MAX, QUERIES_MAX, Scratch, parts_of, queries_max
from dynamo.cpu.spans import TokenSpan


def test_prefill_reads_no_key_behind_the_last_query_of_a_part() -> None:
    parts = parts_of(TokenSpan(0, 1024, 1024, [(0, 1024)]), kv_heads=1, heads_per_kv=1)
    computed = sum(part.cost for part in parts)
    assert computed <= (1024 + QUERIES_MAX) * 1024 / 2


def test_prefill_of_few_tokens_is_one_part_of_all_heads() -> None:
    assert len(parts_of(TokenSpan(0, 8, 8, [(0, 8)]), kv_heads=4, heads_per_kv=2)) == 1


@pytest.mark.parametrize("heads_per_kv", [1, 2, 7, 8, 64])
def test_prefill_tile_is_bounded(heads_per_kv: int) -> None:
    most = queries_max(heads_per_kv)
    assert most * heads_per_kv <= COLUMNS_MAX
    assert 2 * most <= KEYS_MAX


def test_prefill_scores_may_be_far_apart() -> None:
    """The largest score is in the last tile; earlier tiles must not count, and nothing may overflow."""
    context = 3 * KEYS_MAX
    keys = np.full((1, context, 2), -300.0, np.float32)
    keys[0, -1] = 300
    values = np.zeros((1, context, 2), np.float32)
    values[0, -1] = 7
    queries = np.ones((2, 1, 1, 2), np.float32)
    out = np.full_like(queries, np.nan)
    for part in parts_of(TokenSpan(0, 2, context, [(0, context)]), kv_heads=1, heads_per_kv=1):
        part.attend(queries, keys, values, out, Scratch(1, 1, 2))
    assert out.ravel().tolist() == [0, 0, 7, 7]


def test_prefill_of_more_heads_than_columns_computes_one_token_at_a_time() -> None:
    heads, context = 2 * COLUMNS_MAX, KEYS_MAX
    keys = values = np.ones((1, context, 2), np.float32)
    queries = np.ones((2, 1, heads, 2), np.float32)
    out = np.full_like(queries, np.nan)
    for part in parts_of(TokenSpan(0, 2, context, [(0, context)]), kv_heads=1, heads_per_kv=heads):
        part.attend(queries, keys, values, out, Scratch(1, heads, 2))
    assert np.allclose(out, 1)
