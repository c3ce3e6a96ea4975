from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.cpu import prefill
from dynamo.cpu.attention import KvCache, StepAttention
from dynamo.cpu.prefill import Scratch
from dynamo.cpu.spans import TokenSpan

KV_HEADS, GROUP, DIM, SLOTS = 2, 2, 4, 400


def naive(queries: Any, keys: Any, values: Any, span: TokenSpan) -> Any:
    slots = [slot for start, stop in span.runs for slot in range(start, stop)]
    out = np.empty((span.count, KV_HEADS, GROUP, DIM))
    for row in range(span.count):
        visible = slots[: span.context - span.count + row + 1]
        for head in range(KV_HEADS):
            for member in range(GROUP):
                scores = keys[head, visible] @ queries[span.row + row, head, member]
                shares = np.exp(scores - scores.max())
                out[row, head, member] = shares / shares.sum() @ values[head, visible]
    return out


@st.composite
def batches(draw: Any) -> list[TokenSpan]:
    """Sequences cut into runs at random, single rows first and ordered, no two in the same slots."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 70), st.booleans()), min_size=1, max_size=5))
    spans, at, row = [], 0, 0
    for context, is_single in sorted(sizes, key=lambda size: (not size[1], size[0])):
        cuts = sorted({0, context, *draw(st.lists(st.integers(0, context), max_size=3))})
        runs = []
        for begin, end in pairwise(cuts):
            runs.append((at, at + end - begin))
            at += end - begin + draw(st.integers(0, 2))
        count = 1 if is_single else draw(st.integers(1, context))
        spans.append(TokenSpan(row, count, context, runs))
        row += count
    singles = [span for span in spans if span.count == 1]
    spans = sorted(singles, key=lambda span: span.context) + [span for span in spans if span.count > 1]
    row = 0
    for place, span in enumerate(spans):
        spans[place] = TokenSpan(row, span.count, span.context, span.runs)
        row += span.count
    return spans


def output(spans: list[TokenSpan]) -> tuple[Any, Any]:
    """Attention output and that of the naive computation."""
    rng = np.random.default_rng(1)
    rows = sum(span.count for span in spans)
    queries = rng.standard_normal((rows, KV_HEADS, GROUP, DIM)).astype(np.float32)
    keys, values = rng.standard_normal((2, KV_HEADS, SLOTS, DIM)).astype(np.float32)
    out = np.full_like(queries, np.nan)
    attention = StepAttention(spans, KV_HEADS, GROUP, [Scratch(KV_HEADS, GROUP, DIM)])
    for _ in range(2):  # As in two layers: the state of the first must not affect the second.
        for task in attention.tasks(queries, keys, values, out):
            task()
    want = np.concatenate([naive(queries, keys, values, span) for span in spans])
    return out, want


@settings(max_examples=60, deadline=None)
@given(batches())
def test_paged_attention_equals_plain_attention(spans: list[TokenSpan]) -> None:
    got, want = output(spans)
    assert np.allclose(got, want, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_paged_attention_in_small_tiles_equals_plain_attention(spans: list[TokenSpan]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"QUERIES_MAX": 6, "COLUMNS_MAX": 10, "KEYS_MAX": 13, "SCORES_MAX": 200}.items():
            patch.setattr(prefill, name, value)
        got, want = output(spans)
    assert np.allclose(got, want, atol=1e-5)


def test_paged_attention_does_not_pad_sequences_of_different_length_together() -> None:
    spans = [
        TokenSpan(0, 1, 5, [(0, 5)]),
        TokenSpan(1, 1, 7, [(8, 15)]),
        TokenSpan(2, 1, 300, [(20, 320)]),
        TokenSpan(3, 2, 2, [(16, 18)]),
    ]
    attention = StepAttention(spans, KV_HEADS, GROUP, [])
    assert [group.scores.shape[-1] for group in attention.groups] == [7, 300]


def test_paged_attention_reads_back_written_slots() -> None:
    cache = KvCache(2, KV_HEADS, 16, DIM)
    slots = np.array([3, 9, 4])
    written = np.random.default_rng(0).standard_normal((3, 2 * KV_HEADS, DIM)).astype(np.float32)
    cache.write(1, cache.rows_of(slots), written)
    assert np.array_equal(cache.keys(1)[:, slots], written[:, :KV_HEADS].swapaxes(0, 1))
    assert np.array_equal(cache.values(1)[:, slots], written[:, KV_HEADS:].swapaxes(0, 1))
    assert not cache.keys(0).any()
