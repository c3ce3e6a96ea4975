"""Attention: products of queries with keys and values stored in pages.

A page is a KV block: `block_tokens` consecutive slots. The pages of a sequence may be anywhere in the cache, but pages that
are adjacent in the sequence are often adjacent in the cache. A sequence is therefore described by runs of slots, and each
run is read in place without a gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from dynamo.core import memory

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

QUERIES_MAX = 64  # Rows of a prefill that are computed together: few enough that their scores stay in a core's cache.
QUERIES_MIN = 8  # With fewer rows, a long context is read too many times for little work.
SCORES_MAX = 1 << 19  # Scores of such rows, in all heads; 2 MiB.

Run = tuple[int, int]
"""First slot and the slot after the last."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Rows of one sequence in a batch: `count` rows from `row`, which attend to `context` tokens including themselves."""

    row: int
    count: int
    context: int
    runs: Sequence[Run]


def cache_bytes(layers: int, kv_heads: int, slots: int, head_dim: int) -> int:
    """Return the size of a cache in bytes."""
    return layers * 2 * kv_heads * slots * head_dim * 4


class KvCache:
    """Keys and values of every layer, by slot. Keys of all heads come first, then values."""

    def __init__(
        self, layers: int, kv_heads: int, slots: int, head_dim: int, place: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """`place`: existing zeroed memory of `cache_bytes` bytes for the cache; None allocates it."""
        self.kv_heads = kv_heads
        shape = (layers, 2 * kv_heads, slots, head_dim)
        # The memory of slots that were never used is never touched, so that a generous cache costs nothing.
        self._pages = np.zeros(shape, np.float32) if place is None else place.view(np.float32).reshape(shape)
        self._rows = self._pages.reshape(layers, 2 * kv_heads * slots, head_dim)
        self._heads = np.arange(2 * kv_heads, dtype=np.intp) * slots

    def release(self) -> None:
        """Return the memory to the system; it is allocated again on use. The content is lost."""
        if not memory.release_pages(self._pages.ctypes.data, self._pages.nbytes):
            self._pages[...] = 0

    @property
    def pages(self) -> F32:
        """Return the whole cache in place: (layers, 2 * kv_heads, slots, head_dim)."""
        return self._pages

    def keys(self, layer: int) -> F32:
        return self._pages[layer, : self.kv_heads]

    def values(self, layer: int) -> F32:
        return self._pages[layer, self.kv_heads :]

    def between(self, start: int, stop: int) -> F32:
        """Return the content of these slots in place: (layers, 2 * kv_heads, slots, head_dim)."""
        return self._pages[:, :, start:stop]

    def rows_of(self, slots: Ids) -> Ids:
        """Return the rows to which the keys and values of each slot are written; the same in every layer."""
        return slots[:, None] + self._heads

    def write(self, layer: int, rows: Ids, keys_values: F32) -> None:
        """Write `keys_values` of shape (tokens, 2 * kv_heads, head_dim)."""
        self._rows[layer][rows] = keys_values


class DecodeGroup:
    """Sequences of similar length with one new token each, whose softmax is computed in one operation."""

    def __init__(self, spans: Sequence[TokenSpan], kv_heads: int, heads_per_kv: int) -> None:
        self.spans = spans
        self.first = spans[0].row
        longest = max(span.context for span in spans)
        shape = (len(spans), kv_heads, heads_per_kv, longest)
        self.scores = np.full(shape, -np.inf, np.float32)  # Entries that are never written stay masked in every layer.
        self.weights = np.empty(shape, np.float32)

    def attend(self, queries: F32, keys: F32, values: F32, out: F32) -> None:
        """Write the attention output to `out`; both are (rows, kv_heads, heads_per_kv, head_dim), queries already scaled."""
        scores, weights = self.scores, self.weights
        transposed = keys.swapaxes(1, 2)
        for place, span in enumerate(self.spans):
            _score(queries[span.row], transposed, span.runs, scores[place])
        np.subtract(scores, scores.max(axis=-1, keepdims=True), out=weights)
        np.exp(weights, out=weights)
        totals = weights.sum(axis=-1, keepdims=True)
        for place, span in enumerate(self.spans):
            _sum_values(weights[place], values, span.runs, out[span.row])
        out[self.first : self.first + len(self.spans)] /= totals


class Prefill:
    """Consecutive tokens of one sequence; each attends to itself and to all tokens before it."""

    def __init__(self, span: TokenSpan, kv_heads: int, heads_per_kv: int) -> None:
        self.span = span
        row_scores = kv_heads * heads_per_kv * span.context
        queries = min(QUERIES_MAX, max(QUERIES_MIN, SCORES_MAX // row_scores))
        self._heads = (kv_heads, heads_per_kv)
        self._scratch = np.empty(queries * row_scores, np.float32)
        self._mask = np.triu(np.full((queries, queries), -np.inf, np.float32), 1)
        self._parts = [self._part(first, min(queries, span.count - first)) for first in range(0, span.count, queries)]

    def attend(self, queries: F32, keys: F32, values: F32, out: F32) -> None:
        """Write the attention output to `out`, with arguments as in `DecodeGroup.attend`."""
        transposed = keys.swapaxes(1, 2)[:, None]
        values = values[:, None]
        for part in self._parts:
            rows = slice(part.row, part.row + part.count)
            part.attend(queries[rows].transpose(1, 2, 0, 3), transposed, values, out[rows].transpose(1, 2, 0, 3))

    def _part(self, first: int, count: int) -> "_Part":
        span = self.span
        visible = span.context - span.count + first + count
        scores = self._scratch[: self._heads[0] * self._heads[1] * count * visible]
        return _Part(
            span.row + first,
            count,
            _cut(span.runs, visible),
            scores.reshape(*self._heads, count, visible),
            self._mask[:count, :count],
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a prefill, with a buffer for their scores that the parts share."""

    row: int
    count: int
    runs: Sequence[Run]
    scores: F32
    mask: F32

    def attend(self, queries: F32, keys: F32, values: F32, out: F32) -> None:
        scores = self.scores
        _score(queries, keys, self.runs, scores)
        scores[..., -self.count :] += self.mask
        np.subtract(scores, scores.max(axis=-1, keepdims=True), out=scores)
        np.exp(scores, out=scores)
        totals = scores.sum(axis=-1, keepdims=True)
        _sum_values(scores, values, self.runs, out)
        out /= totals


def plan(spans: Sequence[TokenSpan], kv_heads: int, heads_per_kv: int) -> "list[DecodeGroup | Prefill]":
    """Return the operations that compute a batch's attention. Spans of one row come first, ordered by context."""
    single = groupby((span for span in spans if span.count == 1), key=_magnitude)
    return [
        *(DecodeGroup(list(similar), kv_heads, heads_per_kv) for _, similar in single),
        *(Prefill(span, kv_heads, heads_per_kv) for span in spans if span.count > 1),
    ]


def _magnitude(span: TokenSpan) -> int:
    """Return the power of two of the context; within one magnitude, padding at most doubles the work."""
    return span.context.bit_length()


def _score(queries: F32, keys: F32, runs: Sequence[Run], out: F32) -> None:
    """Compute the scores of every query with every key; `keys` are (..., head_dim, slots)."""
    at = 0
    for start, stop in runs:
        until = at + stop - start
        np.matmul(queries, keys[..., start:stop], out=out[..., at:until])
        at = until


def _sum_values(weights: F32, values: F32, runs: Sequence[Run], out: F32) -> None:
    """Sum the weighted values; `values` are (..., slots, head_dim)."""
    at = 0
    for start, stop in runs:
        until = at + stop - start
        if at == 0:
            np.matmul(weights[..., :until], values[..., start:stop, :], out=out)
        else:
            out += np.matmul(weights[..., at:until], values[..., start:stop, :])
        at = until


def _cut(runs: Sequence[Run], tokens: int) -> list[Run]:
    """Return the runs of the first `tokens` slots."""
    cut: list[Run] = []
    for start, stop in runs:
        if tokens <= 0:
            break
        cut.append((start, min(stop, start + tokens)))
        tokens -= stop - start
    return cut
