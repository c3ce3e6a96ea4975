"""Attention: products of queries with keys and values stored in pages.

A page is a KV block: `block_tokens` consecutive slots. The pages of a sequence may be anywhere in the cache, but pages that
are adjacent in the sequence are often adjacent in the cache. A sequence is therefore described by runs of slots. Single tokens
read each run in place; a prefill copies the slots of a tile together if they are in several runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from dynamo.core import memory
from dynamo.cpu.prefill import PrefillPart, Scratch, parts_of
from dynamo.cpu.spans import Ids, Run, TokenSpan

F32 = npt.NDArray[np.float32]


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


class StepAttention:
    """Attention of all sequences of a batch, as tasks that are independent of each other."""

    def __init__(self, spans: Sequence[TokenSpan], kv_heads: int, heads_per_kv: int, scratch: list[Scratch]) -> None:
        """`spans`: those of one row first, ordered by context. `scratch`: one for each thread that may run a task."""
        single = groupby((span for span in spans if span.count == 1), key=_magnitude)
        self.groups = [DecodeGroup(list(similar), kv_heads, heads_per_kv) for _, similar in single]
        parts = [part for span in spans if span.count > 1 for part in parts_of(span, kv_heads, heads_per_kv)]
        self.parts = sorted(
            parts, key=lambda part: -part.cost
        )  # The largest first: threads end at about the same time.
        self._scratch = scratch

    def tasks(self, queries: F32, keys: F32, values: F32, out: F32) -> list[Callable[[], None]]:
        """Return the tasks that compute one layer, with arguments as in `DecodeGroup.attend`."""
        return [
            *(partial(self._attend, part, queries, keys, values, out) for part in self.parts),
            *(partial(group.attend, queries, keys, values, out) for group in self.groups),
        ]

    def _attend(self, part: PrefillPart, queries: F32, keys: F32, values: F32, out: F32) -> None:
        scratch = self._scratch.pop()
        try:
            part.attend(queries, keys, values, out, scratch)
        finally:
            self._scratch.append(scratch)


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
